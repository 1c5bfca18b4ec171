"""What long work shows: live bars on a terminal, a few plain lines anywhere else."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

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
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
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
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def note(values: dict[str, float]) -> str:
    """`step 300, loss 0.1234, accuracy 97.10%`: steps whole, accuracies in per cent."""
    return ", ".join(f"{name} {_number(name, value)}" for name, value in values.items())


def _number(name: str, value: float) -> str:
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4f}"
