"""What two reports of an experiment have in common, value by value."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from powerprop.report import Column, Image, Page, Table, palette, style


class Number(NamedTuple):
    """A value of a table: the mean of some runs and their standard deviation, NaN if that is not known."""

    mean: float
    std: float

    def text(self, digits: int, sign: str = "") -> str:
        """`97.31 ± 0.12`, or `97.31` without a spread."""
        spread = f" ± {self.std:.{digits}f}" if math.isfinite(self.std) else ""
        return f"{self.mean:{sign}.{digits}f}{spread}"


class Pair(NamedTuple):
    """A value that both reports have, or one of them (the other's is None)."""

    table: str
    row: str
    column: str
    percent: bool
    digits: int
    first: Number | None
    second: Number | None

    @property
    def difference(self) -> Number | None:
        """The second less the first; its spread is √(s₁² + s₂²)."""
        if self.first is None or self.second is None:
            return None
        return Number(self.second.mean - self.first.mean, math.hypot(self.first.std, self.second.std))

    def texts(self) -> list[str]:
        """Both values and their difference, as they are shown."""
        values = ((self.first, ""), (self.second, ""), (self.difference, "+"))
        return ["" if number is None else number.text(self.digits, sign) for number, sign in values]


def pairs_of(first: Page, second: Page) -> list[Pair]:
    """Every number of the tables of two pages, matched by table, row and column; the paper's are left out."""
    found = [{key: value for table in _tables(page) for key, value in _numbers(table)} for page in (first, second)]
    pairs = []
    for key in dict.fromkeys((*found[0], *found[1])):
        there, here = found[0].get(key), found[1].get(key)
        column = (there or here)[0]  # type: ignore[index]
        numbers = [None if each is None else each[1] for each in (there, here)]
        pairs.append(Pair(*key, column.percent, _digits(column, numbers), *numbers))
    return pairs


def _tables(page: Page) -> list[Table]:
    return [table for section in page.sections for table in section.tables]


def _numbers(table: Table) -> Iterator[tuple[tuple[str, str, str], tuple[Column, Number]]]:
    columns = [each if isinstance(each, Column) else Column(each) for each in table.columns]
    for label, row in zip(_row_labels(table), table.rows, strict=True):
        for column, value in zip(columns, row, strict=True):
            if value is not None and not isinstance(value, str) and not column.paper:
                yield (table.title, label, column.name), (column, _number(value, column))


def _number(value: Any, column: Column) -> Number:
    factor = 100.0 if column.percent else 1.0
    if isinstance(value, int | float):
        return Number(value * factor, math.nan)
    return Number(value.mean * factor, value.std * factor)


def _row_labels(table: Table) -> list[str]:
    """The first text of every row, with those that follow it where rows would be called the same."""
    texts = [[value for value in row if isinstance(value, str)] for row in table.rows]
    for count in range(1, len(table.columns) + 1):
        labels = [", ".join(part for part in row[:count] if part) for row in texts]
        if len(set(labels)) == len(labels):
            return labels
    return [f"row {number}" for number in range(len(table.rows))]


def _digits(column: Column, numbers: list[Number | None]) -> int:
    """Two digits of the smallest spread, or four of the largest value where there is none."""
    if column.digits is not None:
        return column.digits
    known = [number for number in numbers if number is not None]
    spreads = [number.std for number in known if number.std > 0]
    size = min(spreads) if spreads else max(abs(number.mean) for number in known)
    return min(max((1 if spreads else 3) - math.floor(math.log10(size)), 0), 6) if size else 1


def difference_figure(pairs: list[Pair], title: str, names: tuple[str, str], path: Path) -> Image:
    """Differences as dots with their spread, one line each; of percentages alone where there are any."""
    pairs = [pair for pair in pairs if pair.percent] or pairs
    points = ", percentage points" if pairs[0].percent else ""
    figure = style.figure(6.8, 1.3 + 0.28 * len(pairs))
    axes = style.dress(figure.add_subplot(), title, f"{names[1]} less {names[0]}{points}", "", grid="x")
    rows = range(len(pairs))
    found = [pair.difference or Number(0.0, math.nan) for pair in pairs]
    spreads = [number.std if math.isfinite(number.std) else 0.0 for number in found]
    axes.axvline(0, color=palette.MUTED, linewidth=1)
    axes.errorbar([number.mean for number in found], rows, xerr=spreads, fmt="o", capsize=2.5, color=palette.ACCENT)
    axes.set_yticks(rows, [f"{pair.row}, {pair.column}" for pair in pairs], fontsize=9, color=palette.INK)
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    words = "; ".join(f"{pair.row}, {pair.column}: {pair.texts()[2]}" for pair in pairs)
    return Image(style.save(figure, path), f"{title}, {names[1]} less {names[0]}{points}: {words}.")
