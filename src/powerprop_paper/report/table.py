"""Means of repeated runs, and tables of them: the same content on pages, as Markdown and on the terminal."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from rich.table import Table as RichTable

MAX_DIGITS = 6


@dataclass(frozen=True)
class Mean:
    """Mean and sample standard deviation (n - 1 in the denominator) of ``n`` repetitions; ``std`` is NaN for n = 1."""

    mean: float
    std: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        """The mean of the repetitions ``values`` (at least one, all finite)."""
        numbers = [float(value) for value in values]
        if not numbers:
            raise ValueError("a mean needs at least one value, got none")
        if not all(math.isfinite(number) for number in numbers):
            raise ValueError(f"the values of a mean must be finite, got {numbers}")
        std = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
        return cls(statistics.fmean(numbers), std, len(numbers))

    def data(self) -> dict[str, float | None]:
        """As summary.json has it."""
        return {"mean": self.mean, "std": self.std if math.isfinite(self.std) else None, "n": self.n}

    @property
    def digits(self) -> int:
        """Decimals that show two significant digits of ``std`` (of one run: four significant digits of the mean)."""
        known = math.isfinite(self.std) and self.std > 0
        magnitude = self.std if known else abs(self.mean)
        if magnitude == 0:
            return 1
        significant = 2 if known else 4
        return min(max(significant - 1 - math.floor(math.log10(magnitude)), 0), MAX_DIGITS)

    def scaled(self, factor: float) -> Mean:
        """The mean of ``factor * values``."""
        return Mean(self.mean * factor, self.std * abs(factor), self.n)

    def format(self, digits: int | None = None) -> str:
        """``97.31 ± 0.12``, or ``97.31`` when there is one value only."""
        digits = self.digits if digits is None else digits
        error = f" ± {self.std:.{digits}f}" if math.isfinite(self.std) else ""
        return f"{fixed(self.mean, digits)}{error}"

    def __str__(self) -> str:
        return f"{self.format()} (n={self.n})"


def fixed(value: float, digits: int) -> str:
    """Fixed decimals, without the minus sign of a rounded zero."""
    text = f"{value:.{digits}f}"
    return text[1:] if text.startswith("-") and not text.strip("-0.") else text


Value: TypeAlias = Mean | float | int | str | None


@dataclass(frozen=True)
class Column:
    """A column and how its values are shown.

    name: the heading, with the unit if there is one.
    best: mark the largest (``"max"``) or smallest (``"min"``) mean; text never competes.
    digits: decimals; by default the middle of what the means ask for.
    percent: the values are fractions, show them times 100.
    paper: printed values of the paper, shown in a quieter voice and never marked as best.
    """

    name: str
    best: Literal["max", "min"] | None = None
    digits: int | None = None
    percent: bool = False
    paper: bool = False

    def __post_init__(self) -> None:
        if self.best not in (None, "max", "min"):
            raise ValueError(f"best must be 'max', 'min' or None, got {self.best!r} for column {self.name!r}")
        if self.digits is not None and not 0 <= self.digits <= 12:
            raise ValueError(f"digits must be in [0, 12], got {self.digits} for column {self.name!r}")


@dataclass(frozen=True)
class Shown:
    """One value as it appears: its text, whether it is a number and whether it is the best of its column."""

    text: str
    numeric: bool = False
    best: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of means, numbers, text or None (empty) under ``columns`` (names or :class:`Column`)."""

    title: str
    columns: Sequence[str | Column]
    rows: Sequence[Sequence[Value]]
    caption: str = ""
    _columns: tuple[Column, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        columns = tuple(Column(column) if isinstance(column, str) else column for column in self.columns)
        object.__setattr__(self, "_columns", columns)
        for number, row in enumerate(self.rows):
            if len(row) != len(columns):
                raise ValueError(
                    f"row {number} of table {self.title!r} has {len(row)} values, expected {len(columns)}: {list(row)}"
                )

    @property
    def note(self) -> str:
        """The caption, and the number of repetitions when all means share it."""
        counts = self._counts()
        if len(counts) != 1:
            return self.caption
        n = counts.pop()
        runs = "One run (n = 1)." if n == 1 else f"Mean ± standard deviation of n = {n} runs."
        return f"{self.caption} {runs}".strip()

    def unmarked(self) -> Table:
        """The same table without a best value: for runs that are too short to say which is."""
        return replace(self, columns=[replace(column, best=None) for column in self._columns])

    def data(self) -> dict[str, Any]:
        """As summary.json has it; `from_data` reads it back."""
        rows = [[value.data() if isinstance(value, Mean) else value for value in row] for row in self.rows]
        columns = [{each.name: getattr(column, each.name) for each in fields(Column)} for column in self._columns]
        return {"title": self.title, "caption": self.caption, "columns": columns, "rows": rows}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Table:
        """The table of summary.json."""
        rows = [[_value(each) for each in row] for row in data["rows"]]
        return cls(data["title"], [Column(**each) for each in data["columns"]], rows, data["caption"])

    def to_markdown(self) -> str:
        """A GitHub-flavoured table under a bold title."""
        lines = [f"**{_escape_markdown(self.title)}**", ""] if self.title else []
        lines.append(_markdown_row(_escape_markdown(column.name) for column in self._columns))
        lines.append(_markdown_row("---:" if right else "---" for right in self.numeric))
        for row in self.shown:
            texts = [(_escape_markdown(value.text), value.best) for value in row]
            lines.append(_markdown_row(f"**{text}**" if best and text else text for text, best in texts))
        lines += ["", _escape_markdown(self.note)] if self.note else []
        return "\n".join(lines) + "\n"

    def to_csv(self) -> str:
        """What is shown, as comma-separated values under the names of the columns."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(column.name for column in self._columns)
        writer.writerows([value.text for value in row] for row in self.shown)
        return out.getvalue()

    def to_rich(self) -> RichTable:
        """A table for ``rich.print``; headings may wrap, numbers never do."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        shown = self.shown
        table = RichTable(
            box=box.SIMPLE_HEAD, title=Text(self.title), caption=Text(self.note), title_style="bold", pad_edge=False,
            collapse_padding=True,
        )  # fmt: skip
        for index, (column, right) in enumerate(zip(self._columns, self.numeric, strict=True)):
            width = max((len(row[index].text) for row in shown), default=0) if right else None
            style = "dim" if column.paper else ""
            table.add_column(Text(column.name), justify="right" if right else "left", style=style, min_width=width)
        for row in shown:
            table.add_row(*(Text(value.text, style="bold green" if value.best else "") for value in row))
        return table

    def _counts(self) -> set[int]:
        return {value.n for row in self.rows for value in row if isinstance(value, Mean)}

    @property
    def shown(self) -> list[tuple[Shown, ...]]:
        """The values of each row as they appear."""
        count = len(self._counts()) > 1
        by_column = [
            _show_column(column, [row[index] for row in self.rows], count) for index, column in enumerate(self._columns)
        ]
        return list(zip(*by_column, strict=True))

    @property
    def numeric(self) -> list[bool]:
        """Which of the columns hold numbers."""
        shown = self.shown
        return [column.paper or any(row[index].numeric for row in shown) for index, column in enumerate(self._columns)]


def _value(data: Any) -> Value:
    if not isinstance(data, dict):
        return data  # type: ignore[no-any-return]
    return Mean(data["mean"], math.nan if data["std"] is None else data["std"], data["n"])


def _show_column(column: Column, values: Sequence[Value], count: bool) -> list[Shown]:
    factor = 100.0 if column.percent else 1.0
    scaled = [_scale(value, factor) for value in values]
    wanted = [value.digits for value in scaled if isinstance(value, Mean)]
    digits = statistics.median_low(wanted) if column.digits is None and wanted else column.digits
    texts = [_text(value, digits, count) for value in scaled]
    means = [_mean(value, digits) for value in scaled]
    numbers = [mean for mean in means if mean is not None]
    best = None
    if column.best and not column.paper and len(numbers) > 1:
        best = max(numbers) if column.best == "max" else min(numbers)
    return [
        Shown(text, mean is not None, mean is not None and mean == best)
        for text, mean in zip(texts, means, strict=True)
    ]


def _scale(value: Value, factor: float) -> Value:
    if isinstance(value, Mean):
        return value.scaled(factor)
    if value is None or isinstance(value, str) or factor == 1.0:
        return value
    return value * factor


def _mean(value: Value, digits: int | None) -> float | None:
    """The number that competes for best, rounded as shown so that equal-looking values are all marked."""
    if value is None or isinstance(value, str):
        return None
    mean = value.mean if isinstance(value, Mean) else float(value)
    if not math.isfinite(mean):
        return None
    return mean if digits is None else round(mean, digits)


def _text(value: Value, digits: int | None, count: bool) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Mean):
        return value.format(digits) + (f" (n={value.n})" if count else "")
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if digits is None else fixed(value, digits)


def _escape_markdown(text: str) -> str:
    escaped = re.sub(r"([\\`*_|<>\[\]#~])", r"\\\1", text)
    return " ".join(escaped.split())


def _markdown_row(values: Iterable[str]) -> str:
    return "| " + " | ".join(values) + " |"
