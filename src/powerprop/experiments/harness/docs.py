"""Reports as Markdown with pictures beside them, for the documentation."""

from __future__ import annotations

import shutil
from pathlib import Path

from powerprop.experiments.harness.experiment import Experiment, Findings
from powerprop.files import replacing
from powerprop.report import Image, Section

LONG = 25
"""Lists of more values than this are shortened."""


def write_docs(
    found: dict[str, Findings], experiments: dict[str, Experiment], preset: str, docs: Path, out: Path
) -> Path:
    """One folder per experiment with its page, pictures and `summary.json`, and an index of all; returns the index.

    Args:
        out: the folder that has the run of each experiment in a folder of its own name.
    """
    for name, findings in found.items():
        write_text(docs / name / "README.md", page_markdown(findings, docs / name))
        shutil.copyfile(out / name / "summary.json", docs / name / "summary.json")
    pages = {name: docs / name / "README.md" for name in experiments}
    titles = {n: p.read_text(encoding="utf-8").partition("\n")[0][2:] for n, p in pages.items() if p.exists()}
    rows = [f"- [{title}]({name}/README.md): {experiments[name].paper}" for name, title in titles.items()]
    intro = f"Results of the preset `{preset}`: `powerprop results --preset {preset}` makes all of them anew."
    write_text(docs / "README.md", "\n".join(["# Results", "", intro, "", *rows]) + "\n")
    return docs / "README.md"


def page_markdown(findings: Findings, folder: Path) -> str:
    """The page of a run as Markdown; its pictures are copied into the folder."""
    page = findings.page
    parts = [f"# {page.title}", page.intro, page.paper_reference]
    parts += [part for section in page.sections for part in section_markdown(section, folder)]
    made_with = ", ".join(f"{name} {value}" for name, value in page.versions.items() if value)
    settings = ", ".join(f"{name} {_short(value)}" for name, value in page.config.items())
    parts += ["## Settings", settings, made_with]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _short(value: object) -> object:
    """A long list as its ends and its length: `config.json` has the rest."""
    if not isinstance(value, list | tuple) or len(value) <= LONG:
        return value
    return f"[{value[0]}, {value[1]}, …, {value[-1]}] ({len(value)} values)"


def section_markdown(section: Section, folder: Path) -> list[str]:
    """Heading, text, pictures and tables of one section."""
    images = [figure if isinstance(figure, Image) else Image(figure) for figure in section.figures]
    folder.mkdir(parents=True, exist_ok=True)
    for image in images:
        shutil.copyfile(image.path, folder / Path(image.path).name)
    pictures = [f"![{image.caption or section.heading}]({Path(image.path).name})" for image in images]
    return [f"## {section.heading}", section.text, *pictures, *(table.to_markdown() for table in section.tables)]


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with replacing(path) as file:
        file.write(text.encode())
