"""What commands print: long work as live bars or a few plain lines, tables that are never cut, in any encoding."""

from __future__ import annotations

import codecs
import io
import sys
import time
import unicodedata
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from powerprop.files import naming


class Display(Protocol):
    """Hears about jobs as they run; `with` switches it on."""

    def __enter__(self) -> Display: ...

    def __exit__(self, *error: object) -> None: ...

    def update(self, key: str, done: float, values: dict[str, float]) -> None:
        """Job `key` has done this fraction of its work and last measured these values."""

    def finish(self, key: str, error: str | None) -> None:
        """Job `key` has ended, with the last line of its error or None."""


def display_for(console: Console, title: str, jobs: int) -> Display:
    """Bars if the console is a terminal, lines if it is a file or a pipe."""
    return Bars(console, title, jobs) if console.is_terminal else Lines(console, title, jobs)


class Bars:
    """One bar per running job and one for the whole."""

    def __init__(self, console: Console, title: str, jobs: int) -> None:
        texts = [TextColumn(f"{{task.{field}}}") for field in ("description", "fields[note]")]
        columns = (texts[0], BarColumn(bar_width=24), texts[1], TimeElapsedColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=console, transient=True)
        self.total = self.progress.add_task(f"[bold]{escape(title)}", total=float(jobs), note=f"0/{jobs} jobs")
        self.jobs, self.ended = jobs, 0
        self.running: dict[str, tuple[TaskID, float]] = {}

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def update(self, key: str, done: float, values: dict[str, float]) -> None:
        if key not in self.running:
            self.running[key] = (self.progress.add_task(escape(key), total=1.0, note=""), 0.0)
        task = self.running[key][0]
        self.running[key] = (task, done)
        self.progress.update(task, completed=done, note=note(values))
        self._update_total()

    def finish(self, key: str, error: str | None) -> None:
        if key in self.running:
            self.progress.remove_task(self.running.pop(key)[0])
        self.ended += 1
        self._update_total()
        if error is not None:
            self.progress.console.print(f"[red]{escape(key)} failed:[/] {escape(error)}", highlight=False)

    def _update_total(self) -> None:
        done = self.ended + sum(part for _, part in self.running.values())
        self.progress.update(self.total, completed=done, note=f"{self.ended}/{self.jobs} jobs")


class Lines:
    """A line when a job ends, and one for each running job every `every` seconds."""

    def __init__(self, console: Console, title: str, jobs: int, every: float = 30.0) -> None:
        self.console, self.title, self.jobs, self.every = console, title, jobs, every
        self.ended = 0
        self.shown: dict[str, float] = {}
        self.latest: dict[str, dict[str, float]] = {}

    def __enter__(self) -> Lines:
        self._line(f"{self.title}: {self.jobs} jobs")
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, key: str, done: float, values: dict[str, float]) -> None:
        self.latest[key] = values
        now = time.monotonic()
        if now - self.shown.setdefault(key, now) >= self.every:
            self.shown[key] = now
            self._line(f"  {key}: {done:.0%} {note(values)}")

    def finish(self, key: str, error: str | None) -> None:
        self.ended += 1
        what = f"failed: {error}" if error is not None else f"done {note(self.latest.get(key, {}))}"
        self._line(f"  [{self.ended}/{self.jobs}] {key}: {what}".rstrip())

    def _line(self, text: str) -> None:
        with naming("standard output"):
            say(self.console, text)


def note(values: dict[str, float]) -> str:
    """`step 300, loss 0.1234, accuracy 97.10%`: steps whole, accuracies in per cent."""
    return ", ".join(f"{name} {_number(name, value)}" for name, value in values.items())


def _number(name: str, value: float) -> str:
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4f}"


# What is printed once.

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
