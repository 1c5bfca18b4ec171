"""What an experiment is: named presets, jobs, and a report. One file per figure or table of the paper has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerprop.experiments.harness.parallel import Progress
from powerprop.report import Page, Table

Results = Mapping[str, dict[str, Any]]
"""What the finished jobs found, by key."""


class RunError(ValueError):
    """A run that cannot be done as asked; the message says why and what to do."""


@dataclass(frozen=True)
class Job:
    """One training that can run on its own; `key` names its folder."""

    key: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Findings:
    """What a finished run says: the page, the table shown on the terminal, and the numbers as plain data."""

    page: Page
    table: Table
    summary: dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """One figure or table of the paper.

    Args:
        name: as typed on the command line.
        title: one line for people.
        paper: where the paper shows it.
        presets: literal configurations by name: `smoke` (seconds), `cpu` (minutes), `paper` (its own values), …
        prepare: called once before anything is written, to find (or download) the data; a `ValueError` refuses settings
            that it does not fit.
        jobs: the jobs known so far, given the results so far; asked again until nothing new comes (tuning first).
        run_job: `run_job(config, job, folder, progress)` trains and returns plain data; resumes if called again.
        report: `report(config, results, out)` draws into `out/figures` and returns the findings.
        in_turn: None if jobs run side by side, a process each. Else jobs may also run in turn, the ranks that
            torchrun started training each of them together, and `in_turn(config)` says whether to do so without
            torchrun too, because one job fills the machine.
    """

    name: str
    title: str
    paper: str
    presets: dict[str, Any]
    prepare: Callable[[Any], None]
    jobs: Callable[[Any, Results], list[Job]]
    run_job: Callable[[Any, Job, Path, Progress], dict[str, Any]]
    report: Callable[[Any, Results, Path], Findings]
    in_turn: Callable[[Any], bool] | None = None

    @property
    def config(self) -> type[Any]:
        """What the presets are made of: a frozen dataclass of plain numbers, strings and tuples.

        Its fields are the options of the command line, what its docstring's `Args` say of them is their help.
        """
        return type(next(iter(self.presets.values())))
