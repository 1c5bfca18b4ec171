"""A part of the benchmark page: a table of measured numbers with its picture, and the limits that some of them have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from powerprop.report.bars import Bars, bars
from powerprop.report.mean import Mean

ALPHAS = (1.0, 2.0, 1.5, 3.0, 5.0, 4.0)
"""Colours of the series, by which reports tell α apart; here they only tell the series apart."""


@dataclass(frozen=True)
class Part:
    """One table.

    name: of its picture.
    title, text: what stands above it.
    columns: what is compared.
    rows: a label and a number for each column; None where there is none.
    unit: "x" for ratios to the first way, or what the numbers are.
    limits: by (row, column), the largest that the project allows itself.
    """

    name: str
    title: str
    text: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float | None]]]
    unit: str = "x"
    limits: dict[str, float] = field(default_factory=dict)

    def exceeded(self) -> list[str]:
        """Which limits are, in words."""
        found = []
        for label, values in self.rows:
            for column, value in zip(self.columns, values, strict=True):
                limit = self.limits.get(f"{label} | {column}")
                if limit is not None and value is not None and value > limit:
                    found.append(f"{self.title}, {label}, {column}: {value:.3f}{self.unit}, limit {limit:g}{self.unit}")
        return found

    def markdown(self, folder: Path) -> str:
        """The section of the page, its picture written beside it."""
        picture = self._picture(folder)
        head = f"| | {' | '.join(self.columns)} |\n|---|{'---:|' * len(self.columns)}"
        lines = [f"| {label} | {' | '.join(map(self._shown, values))} |" for label, values in self.rows]
        limits = ""
        if self.limits:
            limits = f"\n\n{len(self.exceeded())} of {len(self.limits)} limits exceeded."
        return f"## {self.title}\n{self.text}\n\n{picture}\n\n" + "\n".join([head, *lines]) + limits

    def _shown(self, value: float | None) -> str:
        if value is None:
            return ""
        return f"{value:.2f}x" if self.unit == "x" else f"{value:.3g}"

    def _picture(self, folder: Path) -> str:
        series = [
            Bars(
                column,
                ALPHAS[i % len(ALPHAS)],
                [None if v[i] is None else Mean.of([float(v[i])]) for _, v in self.rows],
            )  # type: ignore[arg-type]
            for i, column in enumerate(self.columns)
        ]
        unit = "times the plain step" if self.unit == "x" else self.unit
        image = bars([label for label, _ in self.rows], series, folder / f"{self.name}.svg", self.title, unit)
        return f"![{image.alt}]({image.path.name})"

    def data(self) -> dict[str, Any]:
        """For the summary file."""
        return asdict(self)
