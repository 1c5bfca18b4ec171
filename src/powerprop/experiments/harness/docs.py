"""Reports as Markdown with pictures beside them, for the documentation."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from powerprop.experiments.harness.experiment import Experiment, Findings
from powerprop.experiments.harness.folder import own_folder
from powerprop.experiments.harness.pages import PROVES
from powerprop.files import replacing
from powerprop.report import Image, Page, Section

LONG = 25
"""Lists of more values than this are shortened."""

BENCHMARKS = "benchmarks"
"""A page beside those of the experiments, which `make bench` writes."""

HEADLINE = "| headline | here | paper |\n| --- | --- | --- |\n"
"""The head of the table at the top of a page, whose only row the index shows too."""


def write_docs(
    found: dict[str, Findings], experiments: dict[str, Experiment], preset: str, docs: Path, out: Path
) -> Path:
    """One folder per experiment with its page, pictures and `summary.json`, and an index of all; returns the index.

    Args:
        out: the folder that has the run of each experiment in a folder of its own, NAME-PRESET.
    """
    for name, findings in found.items():
        write_text(docs / name / "README.md", page_markdown(findings.page, docs / name))
        shutil.copyfile(own_folder(out, name, preset) / "summary.json", docs / name / "summary.json")
    write_text(docs / "README.md", index_markdown(docs, list(experiments), preset))
    return docs / "README.md"


def index_markdown(docs: Path, names: list[str], preset: str) -> str:
    """One row per experiment that has a page: its headline beside the paper's."""
    intro = (
        f"Results of the preset `{preset}`: `powerprop results --preset {preset}` makes all of them anew. Each page "
        "has its command, settings and versions."
    )
    if (docs.parent / "figures.md").exists():
        intro += " How the figures are drawn: [figures.md](../figures.md)."
    rows = [row for name in [*names, BENCHMARKS] if (row := _index_row(docs, name))]
    head = ["| experiment | headline | here | paper |", "| --- | --- | --- | --- |"]
    return "\n".join(["# Results", "", intro, "", *head, *rows]) + "\n"


def _index_row(docs: Path, name: str) -> str:
    """The title of a page as a link, and the row of its headline, empty if it claims nothing."""
    page = docs / name / "README.md"
    if not page.exists():
        return ""
    text = page.read_text(encoding="utf-8")
    title = text.partition("\n")[0].removeprefix("# ")
    claims = PROVES not in text
    headline = text.partition(HEADLINE)[2].partition("\n")[0] or f"| {'' if claims else 'proves that it runs'} |  |  |"
    return f"| [{title}]({name}/README.md) {headline}"


def page_markdown(page: Page, folder: Path) -> str:
    """The page of a run as Markdown; its pictures are copied into the folder, and notes that are there are linked."""
    parts = [f"# {page.title}"]
    if page.headline is not None:
        parts.append(f"{HEADLINE}| {' | '.join(_cell(text) for text in page.headline)} |")
    parts += [page.intro, page.paper_reference]
    if page.command:
        parts.append(f"```\n{page.command}\n```")
    parts += [part for section in page.sections for part in section_markdown(section, folder)]
    made_with = ", ".join(f"{name} {value}" for name, value in page.versions.items() if value)
    settings = ", ".join(f"{name} {_short(value)}" for name, value in page.config.items())
    notes = "[Notes on this experiment](notes.md)" if (folder / "notes.md").exists() else ""
    parts += [notes, "## Settings", settings, made_with]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _cell(text: str) -> str:
    """Text that cannot end a table's cell or be taken for markup."""
    return re.sub(r"([\\*_|<>\[\]~])", r"\\\1", " ".join(text.split()))


def _short(value: object) -> object:
    """A long list as its ends and its length: `config.json` has the rest."""
    if not isinstance(value, list | tuple) or len(value) <= LONG:
        return value
    return f"[{value[0]}, {value[1]}, …, {value[-1]}] ({len(value)} values)"


def section_markdown(section: Section, folder: Path) -> list[str]:
    """Heading, text, pictures and tables of one section."""
    folder.mkdir(parents=True, exist_ok=True)
    for image in section.figures:
        shutil.copyfile(image.path, folder / image.path.name)
    pictures = [part for image in section.figures for part in _picture(image)]
    return [f"## {section.heading}", section.text, *pictures, *(table.to_markdown() for table in section.tables)]


def _picture(image: Image) -> list[str]:
    """The picture with its words, and its caption below."""
    alt = re.sub(r"([\\\[\]])", r"\\\1", " ".join(image.alt.split()))
    return [f"![{alt}]({image.path.name})", *([f"*{image.caption}*"] if image.caption else [])]


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with replacing(path) as file:
        file.write(text.encode())
