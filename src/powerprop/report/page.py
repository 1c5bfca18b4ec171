"""Report pages: one HTML file with everything inside (figures, tables, styles), readable anywhere and for ever."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import NamedTuple, TypeAlias

from powerprop.files import replacing
from powerprop.report.image import Image
from powerprop.report.table import Table


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


@dataclass(frozen=True)
class Section:
    """A heading, text (blank lines separate paragraphs, backticks mark code), figures and tables."""

    heading: str
    text: str = ""
    figures: Sequence[Image] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Page:
    """One run.

    Args:
        title: what was run.
        intro: the claim in a sentence or two.
        sections: the results.
        config: every setting of the run, nested as it likes.
        versions: what it ran on.
        paper_reference: where the paper reports the same.
        stats: (label, value, note) of the key numbers.
        headline: the one for the index; None if the run claims nothing.
        command: makes the run again.
    """

    title: str
    intro: str
    sections: Sequence[Section]
    config: Mapping[str, object] = field(default_factory=dict)
    versions: Mapping[str, object] = field(default_factory=dict)
    paper_reference: str = ""
    stats: Sequence[Stat | tuple[str, str, str]] = ()
    headline: Headline | None = None
    command: str = ""


Contents: TypeAlias = list[tuple[str, str]]
"""(anchor, heading) of what a page links to."""


def write_page(page: Page, directory: str | Path, name: str = "report.html") -> Path:
    """Write ``page`` as one HTML file into ``directory`` and return its path."""
    return _write(Path(directory) / name, render_page(page))


def index_page(
    pages: Sequence[Page], directory: str | Path, title: str = "powerprop", intro: str = "", name: str = "index.html"
) -> Path:
    """Write several runs as one HTML file with links to each, and return its path."""
    if not pages:
        raise ValueError("an index needs at least one page, got none")
    return _write(Path(directory) / name, render_index(pages, title, intro))


def render_page(page: Page) -> str:
    """The HTML of one run."""
    anchors = _anchors([section.heading for section in page.sections])
    contents = [(anchor, section.heading) for anchor, section in zip(anchors, page.sections, strict=True)]
    body = _header(page, 1) + (_contents(contents) if len(contents) > 2 else "") + _body(page, anchors, 2)
    return _document(page.title, body)


def render_index(pages: Sequence[Page], title: str = "powerprop", intro: str = "") -> str:
    """The HTML of several runs below each other."""
    anchors = _anchors([page.title for page in pages])
    contents = [(anchor, page.title) for anchor, page in zip(anchors, pages, strict=True)]
    parts = [f"<header>\n<h1>{html.escape(title)}</h1>\n{_text(intro)}</header>\n", _contents(contents)]
    for anchor, page in zip(anchors, pages, strict=True):
        inner = [f"{anchor}-{name}" for name in _anchors([section.heading for section in page.sections])]
        parts.append(f'<article id="{anchor}">\n{_header(page, 2)}{_body(page, inner, 3)}</article>\n')
    return _document(title, "".join(parts))


def _write(path: Path, text: str) -> Path:
    with replacing(path) as file:
        file.write(text.encode())
    return path


def _document(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{_css()}</style>\n"
        f"</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )


def _css() -> str:
    return resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")


def _header(page: Page, level: int) -> str:
    tiles = "".join(_tile(Stat(*stat)) for stat in page.stats)
    tiles = f'<dl class="stats">{tiles}</dl>\n' if tiles else ""
    reference = f'<p class="reference">{_inline(page.paper_reference)}</p>\n' if page.paper_reference else ""
    title = f"<h{level}>{html.escape(page.title)}</h{level}>\n"
    command = f'<pre class="command"><code>{html.escape(page.command)}</code></pre>\n' if page.command else ""
    return f"<header>\n{title}{_text(page.intro)}{reference}{command}{tiles}</header>\n"


def _body(page: Page, anchors: Sequence[str], level: int) -> str:
    sections = (_section(section, anchor, level) for section, anchor in zip(page.sections, anchors, strict=True))
    return "".join(sections) + _details("Configuration", page.config) + _details("Versions", page.versions)


def _section(section: Section, anchor: str, level: int) -> str:
    figures = "".join(_figure(image) for image in section.figures)
    figures = f'<div class="figures">\n{figures}</div>\n' if figures else ""
    tables = "".join(table.to_html() for table in section.tables)
    heading = f"<h{level}>{html.escape(section.heading)}</h{level}>\n"
    return f'<section id="{anchor}">\n{heading}{_text(section.text)}{figures}{tables}</section>\n'


def _tile(stat: Stat) -> str:
    label, value, note = (html.escape(text) for text in stat)
    note = f'<dd class="note">{note}</dd>' if note else ""
    return f'<div><dt>{label}</dt><dd class="value">{value}</dd>{note}</div>'


def _figure(image: Image) -> str:
    """The picture inside the page; on a narrow screen a wide one scrolls, so that its letters can be read."""
    content = Path(image.path).read_bytes()
    kinds = {"svg+xml": b"<svg" in content[:1000], "gif": content.startswith(b"GIF8")}
    kind = next((name for name, fits in kinds.items() if fits), None)
    if kind is None:
        raise ValueError(f"only SVG pictures and GIF clips can be embedded, got {str(image.path)!r}")
    source = f"data:image/{kind};base64," + base64.b64encode(content).decode()
    alt = html.escape(image.alt, quote=True)
    caption = f"<figcaption>{_inline(image.caption)}</figcaption>" if image.caption else ""
    style, scrolls = (' class="wide"', ' tabindex="0"') if image.wide else ("", "")
    return f'<figure{style}><div class="scroll"{scrolls}><img src="{source}" alt="{alt}"></div>{caption}</figure>\n'


def _contents(contents: Contents) -> str:
    links = "".join(f'<li><a href="#{anchor}">{html.escape(text)}</a></li>' for anchor, text in contents)
    return f'<nav aria-label="Contents"><ul>{links}</ul></nav>\n'


def _details(name: str, values: Mapping[str, object]) -> str:
    if not values:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{html.escape(key)}</th><td>{html.escape(value)}</td></tr>' for key, value in _flat(values)
    )
    return f'<details><summary>{name}</summary><div class="scroll"><table>{rows}</table></div></details>\n'


def _flat(values: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as dotted names."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            rows += _flat(value, f"{name}.")
        else:
            rows.append((name, value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)))
    return rows


def _text(text: str) -> str:
    """Paragraphs of escaped text."""
    return "".join(f"<p>{_inline(part)}</p>\n" for part in re.split(r"\n\s*\n", text.strip()) if part)


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(" ".join(text.split())))


def _anchors(headings: Sequence[str]) -> list[str]:
    """Distinct names for links, made of the headings' letters and digits."""
    result: list[str] = []
    for heading in headings:
        stem = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") or "section"
        name, number = stem, 2
        while name in result:
            name, number = f"{stem}-{number}", number + 1
        result.append(name)
    return result
