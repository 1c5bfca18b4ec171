"""What commands print: no table is cut, and every encoding can show it."""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

SPELLED = {
    "α": "alpha", "γ": "gamma", "φ": "phi", "θ": "theta", "η": "eta", "π": "pi", "Δ": "delta", "Ψ": "psi",
    "±": "+-", "–": "-", "—": "-", "−": "-", "…": "...", "·": "*", "×": "x", "√": "sqrt", "•": "*", "→": "->",
}  # fmt: skip
"""Signs that plain ASCII spells out."""


def spell_out(error: UnicodeError) -> tuple[str, int]:
    """What stands for the characters that an encoding lacks: `alpha`, `+-`, the lines of a box as `-` and `|`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_spelled(sign) for sign in error.object[error.start : error.end]), error.end


def _spelled(sign: str) -> str:
    if sign in SPELLED:
        return SPELLED[sign]
    name = unicodedata.name(sign, "")
    if name.startswith("BOX DRAWINGS"):
        return "|" if name.endswith("VERTICAL") else "-" if name.endswith("HORIZONTAL") else "+"
    return unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode() or "?"


codecs.register_error("spell_out", spell_out)


def accept_every_character() -> None:
    """Let a terminal or pipe of another encoding than UTF-8 spell out what it lacks instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="spell_out")


def say(console: Console, text: str, style: str | None = None) -> None:
    """One line, however long: paths stay whole."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_table(console: Console, table: RichTable) -> None:
    """Print a table whole: as it is where it fits, at its full width into a file or pipe, else stacked."""
    if not console.is_terminal:
        needed = console.measure(table, options=console.options.update(width=10_000)).maximum
        Console(file=console.file, width=max(console.width, needed), color_system=None).print(table)
    elif fits(table, console.width):
        console.print(table)
    else:
        print_stacked(console, table)


def fits(table: RichTable, width: int) -> bool:
    """True if no word of the table is broken or cut at this width."""
    trial = Console(file=io.StringIO(), width=width, color_system=None)
    trial.print(table, crop=False)
    shown = trial.file.getvalue()  # type: ignore[attr-defined]
    texts = [_plain(part) for column in table.columns for part in (column.header, *column.cells)]
    whole = max(map(len, shown.splitlines()), default=0) <= width
    return whole and all(word in shown for text in texts for word in text.split())


def print_stacked(console: Console, table: RichTable) -> None:
    """One block per row: its first value, and below it a line for each other value that is not empty."""
    headers = [_plain(column.header) for column in table.columns]
    if table.title:
        say(console, f"{_plain(table.title)}\n")
    for first, *rest in zip(*(column.cells for column in table.columns), strict=True):
        say(console, _plain(first))
        for header, value in zip(headers[1:], rest, strict=True):
            if text := _plain(value):
                say(console, f"  {header}: {text}")
    if table.caption:
        say(console, f"\n{_plain(table.caption)}")


def _plain(value: object) -> str:
    return value.plain if isinstance(value, Text) else str(value)
