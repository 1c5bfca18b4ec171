"""Tables and bars in the terminal: 80 columns are enough, and ASCII pipes too."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

__all__ = ["bar", "grid", "size_of"]


def grid(title: str, columns: Sequence[str], numbers_from: int = 1) -> Table:
    """An empty table; the columns from `numbers_from` on hold numbers. Long names go on in the next line."""
    table = Table(title=title, title_justify="left", padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i >= numbers_from else "left", overflow="fold")
    return table


def size_of(count: int) -> str:
    """Bytes for people: 1.2 MB."""
    value, units = float(count), ["B", "kB", "MB", "GB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def bar(fraction: float, console: Console, width: int = 40) -> str:
    """A bar of up to `width` characters."""
    mark = "#" if console.options.ascii_only else "█"
    return mark * round(fraction * width)
