"""Pages of runs, made of what summary.json says: HTML with everything inside, and Markdown with pictures beside it."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from powerprop.files import write_atomically
from powerprop_paper.folder import read_json
from powerprop_paper.report.table import Table

Summary = Mapping[str, Any]
"""What summary.json says."""

LONG = 25
"""Lists of more values than this are shortened in the documentation."""
HEADLINE = "| headline | here | paper |\n| --- | --- | --- |\n"
"""The head of the table at the top of a page of the documentation, whose only row the index shows too."""
SMOKE = "smoke"
KINDS = {".svg": "svg+xml", ".gif": "gif"}


class Stat(NamedTuple):
    """A key number at the top of the page."""

    label: str
    value: str
    note: str = ""


class Headline(NamedTuple):
    """The one number of a run that the index of results shows: of what it is, ours, and the paper's."""

    what: str
    ours: str
    paper: str


# HTML


def html(summary: Summary, figures: Path) -> str:
    """The page as one file that loads nothing; `figures` has its pictures."""
    templates = Environment(loader=PackageLoader(__package__, ""), autoescape=True, undefined=StrictUndefined)
    templates.filters.update(
        inline=_inline, whole=_whole, paragraphs=_paragraphs, shown=_shown, table=Table.from_data,
        embedded=partial(_embedded, figures), csv=Table.to_csv, slug=_slug,
    )  # fmt: skip
    page = {"paper": "", "command": "", "stats": (), "config": {}, "versions": {}, **summary}
    return templates.get_template("page.html").render(page=page)


def _embedded(figures: Path, name: str) -> str:
    """A picture as part of the page."""
    path = figures / name
    if path.suffix not in KINDS:
        raise ValueError(f"only SVG pictures and GIF clips can be embedded, got '{path}'")
    return f"data:image/{KINDS[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _paragraphs(text: str) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", text.strip()) if part]


def _whole(text: str) -> str:
    """Text whose equations (`α = 2`) stay on one line."""
    return text.replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}")


def _inline(text: str) -> Markup:
    """Escaped text, with code between backticks."""
    safe = str(escape(_whole(" ".join(text.split()))))  # a string: Markup would escape what is put into it
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", safe))


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _slug(text: str) -> str:
    """A text's letters and digits, as the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


# Markdown


def write_docs(run: Path, docs: Path) -> None:
    """The page, pictures and summary.json of a finished run in the folder `docs`; notes that are there are linked."""
    summary = read_json(run / "summary.json")
    docs.mkdir(parents=True, exist_ok=True)
    for section in summary["sections"]:
        for image in section["figures"]:
            shutil.copyfile(run / "figures" / image["file"], docs / image["file"])
    write_atomically(docs / "README.md", markdown(summary, (docs / "notes.md").exists()).encode())
    shutil.copyfile(run / "summary.json", docs / "summary.json")


def markdown(summary: Summary, notes: bool = False) -> str:
    """The page of a run."""
    settings = {"preset": summary["preset"], **summary["config"]}
    parts = [
        f"# {summary['title']}", headline_row(summary["headline"], HEADLINE), summary["intro"], summary["paper"],
        f"```\n{summary['command']}\n```", *(part for each in summary["sections"] for part in _section(each)),
        "[Notes on this experiment](notes.md)" if notes else "", "## Settings",
        ", ".join(f"{name} {_short(value)}" for name, value in settings.items()),
        ", ".join(f"{name} {value}" for name, value in summary["versions"].items() if value),
    ]  # fmt: skip
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _section(section: Mapping[str, Any]) -> Iterable[str]:
    """Heading, text, pictures with their words and captions, and tables."""
    yield f"## {section['heading']}"
    yield section["text"]
    for image in section["figures"]:
        alt = re.sub(r"([\\\[\]])", r"\\\1", " ".join(image["alt"].split()))
        yield f"![{alt}]({image['file']})"
        yield f"*{image['caption']}*" if image["caption"] else ""
    yield from (Table.from_data(each).to_markdown() for each in section["tables"])


def headline_row(headline: Mapping[str, str] | None, before: str) -> str:
    """A headline as the row of a table, with what stands before it; nothing if there is none."""
    if headline is None:
        return ""
    return f"{before}| {' | '.join(_cell(headline[name]) for name in Headline._fields)} |"


def _cell(text: str) -> str:
    """Text that cannot end a table's cell or be taken for markup."""
    return re.sub(r"([\\*_|<>\[\]~])", r"\\\1", " ".join(text.split()))


def _short(value: object) -> object:
    """A long list as its ends and its length: `config.json` has the rest."""
    if not isinstance(value, list) or len(value) <= LONG:
        return value
    return f"[{value[0]}, {value[1]}, …, {value[-1]}] ({len(value)} values)"


def index(docs: Path, names: Iterable[str], preset: str) -> str:
    """One row for each of the folders that has a page: its headline beside the paper's."""
    intro = (
        f"Results of the preset `{preset}`: `powerprop results --preset {preset}` makes all of them anew. Each page "
        "has its command, settings and versions."
    )
    if (docs.parent / "figures.md").exists():
        intro += " How the figures are drawn: [figures.md](../figures.md)."
    rows = [_index_row(docs, name) for name in names if (docs / name / "summary.json").exists()]
    head = ["| experiment | headline | here | paper |", "| --- | --- | --- | --- |"]
    return "\n".join(["# Results", "", intro, "", *head, *rows]) + "\n"


def _index_row(docs: Path, name: str) -> str:
    """The title of a page as a link, and its headline."""
    summary = read_json(docs / name / "summary.json")
    row = headline_row(summary.get("headline"), "") or "| proves that it runs |  |  |"
    return f"| [{summary['title']}]({name}/README.md) {row}"
