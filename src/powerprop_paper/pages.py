"""A page is data until it is written: sections of tables, figures and text.

`write` draws the figures, writes `summary.json` with the numbers of all tables and curves, and makes `report.html` of
that. `show`, `compare` and the documentation read `summary.json` alone.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from powerprop.files import write_atomically
from powerprop_paper.folder import merged, write_json
from powerprop_paper.report import Bars, Column, Curve, Grid, Headline, Image, Mean, Point, Stat, Table, Value
from powerprop_paper.report.page import SMOKE, html
from powerprop_paper.run import Run, plain

__all__ = [
    "Column", "Figure", "Headline", "Page", "Percent", "Section", "Stat", "Table", "Value", "command", "write",
    "write_page",
]  # fmt: skip

PROVES = (
    "This is the preset `smoke`, a run of seconds: it proves that it runs. Its numbers claim nothing about any method."
)
LARGE = 20_000
"""Arrays of more values are not repeated in summary.json."""
DRAWN = Curve | Bars | Point | Grid | Mean
"""What says itself what it is as plain data."""


@dataclass(frozen=True)
class Percent(Column):
    """A column of fractions, shown times 100."""

    digits: int | None = 1
    percent: bool = True


class Figure:
    """A figure that is drawn when its page is written.

        Figure("accuracy", pruning_curves, curves, title="Accuracy after pruning")

    name: of the file, without its ending.
    draw: a function of `powerprop_paper.report`, `draw(*data, path=…, **options) -> Image`.
    data: the numbers; they are also in summary.json.
    options: title, labels and what else `draw` takes.
    """

    def __init__(self, name: str, draw: Callable[..., Image], *data: Any, **options: Any) -> None:
        self.name, self.draw, self.data, self.options = name, draw, data, options


@dataclass(frozen=True)
class Section:
    """A heading, text (blank lines separate paragraphs, backticks mark code), figures and tables."""

    heading: str
    text: str = ""
    figures: Sequence[Figure | Image] = ()
    tables: Sequence[Table] = ()

    @classmethod
    def diverged(cls, lost: Sequence[str]) -> list[Section]:
        """Which runs came to no end, and why; nothing if all did."""
        return [cls("Diverged", "\n\n".join(lost))] if lost else []


@dataclass(frozen=True)
class Page:
    """What a run says.

    title: what was run.
    intro: the claim in a sentence or two.
    sections: the results.
    paper: where the paper reports the same.
    stats: the numbers at the top.
    headline: the one number that the index of all results shows; None if the run claims nothing.
    numbers: what summary.json has besides those of tables and figures.
    """

    title: str
    intro: str
    sections: Sequence[Section]
    paper: str = ""
    stats: Sequence[Stat] = ()
    headline: Headline | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)


def write(page: Page, run: Run) -> dict[str, Any]:
    """Draw the figures, write summary.json and report.html, and return what the former says."""
    rows = {f"{folder.parent.name}/{folder.name}": row for folder, row in run.rows.items()}
    lost = {why: {name: row[why] for name, row in rows.items() if why in row} for why in ("diverged", "failed")}
    about = {
        "experiment": run.experiment.name,
        "preset": run.preset,
        "command": command(run),
        "config": plain(asdict(run.config)),
        "versions": merged(made for row in run.rows.values() for made in row.versions),
        "jobs": {"done": len(run.rows) - len(run.failures), **lost},
    }
    page = _claiming_nothing(page) if run.preset == SMOKE else page
    return write_page(page, run.out, about)


def write_page(page: Page, out: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """The files of a page, and as plain data what it says, besides what is said `about` it."""
    sections = [
        {
            "heading": each.heading,
            "text": each.text,
            "figures": [_drawn(figure, out / "figures") for figure in each.figures],
            "tables": [table.data() for table in each.tables],
        }
        for each in page.sections
    ]
    summary = {
        **about,
        "title": page.title,
        "intro": page.intro,
        "paper": page.paper,
        "headline": page.headline._asdict() if page.headline else None,
        "stats": [stat._asdict() for stat in page.stats],
        "numbers": {name: numbers(value) for name, value in page.numbers.items()},
        "sections": sections,
    }
    write_json(out / "summary.json", summary)
    write_atomically(out / "report.html", html(summary, out / "figures").encode())
    return summary


def _claiming_nothing(page: Page) -> Page:
    """The page of a run of seconds: without a headline, and without a best value in any column."""
    sections = [replace(each, tables=[table.unmarked() for table in each.tables]) for each in page.sections]
    return replace(page, intro=f"{PROVES}\n\n{page.intro}", sections=sections, stats=(), headline=None)


def _drawn(figure: Figure | Image, folder: Path) -> dict[str, Any]:
    """Draw a figure, or take a picture (a clip) over; its words and numbers."""
    if isinstance(figure, Figure):
        image = figure.draw(*figure.data, path=folder / f"{figure.name}.svg", **figure.options)
        series = [data_of(each) for each in figure.data]
    else:
        image, series = figure, []
        write_atomically(folder / image.path.name, image.path.read_bytes())
    return {"file": image.path.name, "alt": image.alt, "caption": image.caption, "wide": image.wide, "series": series}


def command(run: Run) -> str:
    """What makes the run again: the preset and every setting that is not the preset's."""
    words = ["powerprop", "run", run.experiment.name, "--preset", run.preset]
    start = run.experiment.presets[run.preset]
    for each in fields(run.config):
        if (value := getattr(run.config, each.name)) != getattr(start, each.name):
            words += _typed(each.name.replace("_", "-"), value)
    return shlex.join(words)


def _typed(name: str, value: object) -> list[str]:
    """A setting as it is typed: `--retrain-steps 10`, `--alphas 1 2`, `--no-matrix`."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    values = value if isinstance(value, tuple) else (value,)
    return [f"--{name}", *(f"{each:g}" if isinstance(each, float) else str(each) for each in values)]


def data_of(value: Any) -> Any:
    """What is drawn as plain data."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, DRAWN):
        return value.data()
    if isinstance(value, Mapping):
        return {str(name): data_of(part) for name, part in value.items()}
    if isinstance(value, list | tuple) and any(isinstance(each, str | Mapping | DRAWN) for each in value):
        return [data_of(each) for each in value]
    return numbers(value)


def numbers(value: Any) -> Any:
    """Numbers of any shape as lists, None where there is none; the shape alone of what is too large to read."""
    array = np.asarray(value)
    if array.size > LARGE or array.dtype == bool:
        return {"shape": list(array.shape)}
    return _without_nan(array.tolist())


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
