"""A part of the benchmark page: a table of measured numbers with its picture, and the limits that some of them have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from powerprop_paper.report.charts import Bars, bars
from powerprop_paper.report.curve import Curve
from powerprop_paper.report.figures import lines
from powerprop_paper.report.style import Image
from powerprop_paper.report.table import Mean

SERIES = (2.0, 1.0, 3.0, 5.0, 1.25, 4.0)
"""Reports tell α apart by colours; here these tell other series apart as well."""


@dataclass(frozen=True)
class Part:
    """One table.

    name: of its picture.
    title, text: what stands above it.
    columns: what is compared.
    rows: a label and a number for each column; None where there is none.
    unit: "x" for ratios, or what the numbers are.
    limits: by "row | column", the largest that the project allows itself.
    pictured: how many of the columns the picture shows, the first ones; 0 is all.
    positions: where these columns lie on an axis, if the picture is one of lines.
    axis: what the picture shows; by default times the plain step, or the unit.
    drawn: False for numbers of several kinds, which no picture can show side by side.
    zoom: the picture has dots on an axis that does not begin at zero, for numbers that lie close together.
    """

    name: str
    title: str
    text: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float | None]]]
    unit: str = "x"
    limits: dict[str, float] = field(default_factory=dict)
    pictured: int = 0
    positions: Sequence[int] = ()
    axis: str = ""
    drawn: bool = True
    zoom: bool = False

    def limited(self) -> Iterator[tuple[str, str, float, float]]:
        """Row, column, number and limit of every number that has one."""
        for label, values in self.rows:
            for column, value in zip(self.columns, values, strict=True):
                limit = self.limits.get(f"{label} | {column}")
                if limit is not None and value is not None:
                    yield label, column, value, limit

    def exceeded(self) -> list[str]:
        """Which limits are, in words."""
        return [
            f"{self.title}, {label}, {column}: {self.shown(value)}, limit {self.shown(limit)}"
            for label, column, value, limit in self.limited()
            if value > limit
        ]

    def closest(self) -> str:
        """A row of the overview: the number that is nearest to its limit."""
        found = max(self.limited(), key=lambda each: each[2] / each[3], default=None)
        if found is None:
            return ""
        label, column, value, limit = found
        return (
            f"| [{self.title}](#{anchor(self.title)}) | {label}, {column} | {self.shown(value)} | {self.shown(limit)} |"
        )

    def markdown(self, folder: Path) -> str:
        """The section of the page, its picture written beside it."""
        columns = [*self.columns, *(["limit"] if self.limits else [])]
        head = f"| | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}"
        lines_ = [self._row(label, values) for label, values in self.rows]
        return "\n".join([f"## {self.title}", self.text, "", *self._picture(folder), head, *lines_])

    def _picture(self, folder: Path) -> list[str]:
        if not self.drawn:
            return []
        image = self._curves(folder) if self.positions else self._bars(folder)
        return [f"![{image.alt}]({image.path.name})", ""]

    def _row(self, label: str, values: Sequence[float | None]) -> str:
        cells = [self._cell(label, c, v) for c, v in zip(self.columns, values, strict=True)]
        if self.limits:
            own = {limit for row, _, _, limit in self.limited() if row == label}
            cells.append(", ".join(map(self.shown, sorted(own))))
        return f"| {label} | {' | '.join(cells)} |"

    def _cell(self, label: str, column: str, value: float | None) -> str:
        """Bold if it is above its limit."""
        text = self.shown(value)
        return f"**{text}**" if value is not None and value > self.limits.get(f"{label} | {column}", value) else text

    def shown(self, value: float | None) -> str:
        """A number of the table."""
        if value is None:
            return ""
        if self.unit == "x":
            return f"{value:.3f}x" if self.zoom else f"{value:.2f}x"
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

    def _bars(self, folder: Path) -> Image:
        count = self.pictured or len(self.columns)
        series = [
            Bars(column, _colour(column, i), [None if v[i] is None else Mean.of([float(v[i])]) for _, v in self.rows])  # type: ignore[arg-type]
            for i, column in enumerate(self.columns[:count])
        ]
        axis = self.axis or ("times the plain step" if self.unit == "x" else self.unit)
        labels, path = [label for label, _ in self.rows], folder / f"{self.name}.svg"
        return bars(labels, series, path, self.title, axis, zoom=self.zoom)

    def _curves(self, folder: Path) -> Image:
        count = len(self.positions)
        drawn = [Curve(label, None, self.positions, list(values[:count]), method=label) for label, values in self.rows]
        path = folder / f"{self.name}.svg"
        return lines(drawn, path, self.title, self.axis, self.unit, logx=True, logy=True, wide=True)

    def data(self) -> dict[str, Any]:
        """For the summary file; `Part(**data)` is the part again."""
        return asdict(self)


def anchor(title: str) -> str:
    """What a page calls the place of a heading."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


def _colour(column: str, number: int) -> float:
    """The α that a column is of, else one of the series'."""
    try:
        return float(column.removeprefix("α = ").removesuffix(", s"))
    except ValueError:
        return SERIES[number % len(SERIES)]
