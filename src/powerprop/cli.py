"""The command line: one table of commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table as RichTable

from powerprop import commands
from powerprop.data import DataCorrupt, DataNotFound
from powerprop.experiments import EXPERIMENTS, Experiment
from powerprop.experiments.base import Findings, RunError
from powerprop.experiments.docs import write_docs
from powerprop.experiments.folder import open_run
from powerprop.experiments.runner import JobsFailedError, write_report
from powerprop.experiments.runner import run as run_experiment
from powerprop.files import FileError
from powerprop.report import MissingMatplotlibError, index_page
from powerprop.report.style import matplotlib
from powerprop.train.log import TENSORBOARD
from powerprop.train.parallel import default_workers

INPUT_ERRORS = (RunError, FileError, DataNotFound, DataCorrupt, MissingMatplotlibError, *commands.ERRORS)
"""What the user can put right: shown as one line."""


def list_experiments() -> None:
    """Show the experiments and their presets."""
    table = RichTable("name", "what", "in the paper", "presets", title="powerprop run NAME --preset PRESET")
    for experiment in EXPERIMENTS.values():
        table.add_row(experiment.name, experiment.title, experiment.paper, ", ".join(experiment.presets))
    Console().print(table)


def run(
    name: tyro.conf.Positional[str],
    preset: str = "cpu",
    alpha: tuple[float, ...] = (),
    seeds: int | None = None,
    only: tuple[str, ...] = (),
    workers: int | None = None,
    out: Path | None = None,
    tensorboard: bool = False,
) -> None:
    """Run an experiment and write its report. Stopped at any moment, the same command goes on where it was.

    Args:
        name: of the experiment, see `powerprop list`.
        preset: smoke (seconds), cpu (minutes on two cores) or paper (the paper's own values).
        alpha: powers to run instead of the preset's.
        seeds: number of seeds instead of the preset's.
        only: the trainings to run instead of all of the preset's, where * stands for anything: 'rigl * 0.9'.
        workers: processes side by side, one thread each; all cores by default.
        out: folder of the run, runs/NAME-PRESET by default.
        tensorboard: write the metrics of every training for TensorBoard too, into its folder.
    """
    if tensorboard:
        os.environ[TENSORBOARD] = "1"
    experiment = find(name)
    config = configured(experiment, preset, alpha, seeds, only)
    out = out or Path("runs") / f"{name}-{preset}"
    console = Console()
    findings = run_one(experiment, preset, config, out, workers, console)
    if findings is None:
        return
    console.print(findings.table.to_rich())
    console.print(f"Report: {out / 'report.html'}", highlight=False, soft_wrap=True)


def report(folders: tyro.conf.Positional[tuple[Path, ...]], combined: Path | None = None) -> None:
    """Draw the reports of finished runs anew.

    Args:
        folders: of the runs.
        combined: also write all of them as one page into this file.
    """
    if not folders:
        raise RunError("report needs the folder of at least one run, got none")
    console = Console()
    pages = []
    for folder in folders:
        experiment, preset, config = open_run(folder, EXPERIMENTS)
        pages.append(write_report(experiment, preset, config, folder).page)
        console.print(f"Report: {folder / 'report.html'}", highlight=False, soft_wrap=True)
    if combined is not None:
        index_page(pages, combined.parent, name=combined.name)
        console.print(f"All together: {combined}", highlight=False, soft_wrap=True)


def results(
    names: tyro.conf.Positional[tuple[str, ...]] = (),
    preset: str = "cpu",
    out: Path = Path("runs"),
    docs: Path = Path("docs/results"),
    workers: int | None = None,
) -> None:
    """Run experiments and put their figures and tables into the documentation.

    Args:
        names: of the experiments; all of them by default.
        preset: of all experiments.
        out: folder that gets one folder per experiment.
        docs: folder for the Markdown pages and their pictures.
        workers: processes side by side, one thread each; all cores by default.
    """
    console, found = Console(), {}
    configs = {name: configured(find(name), preset, (), None) for name in names or EXPERIMENTS}
    for name, config in configs.items():
        findings = run_one(EXPERIMENTS[name], preset, config, out / name, workers, console)
        if findings is not None:
            found[name] = findings
            console.print(findings.table.to_rich())
    index = write_docs(found, EXPERIMENTS, preset, docs, out)
    console.print(f"Results: {index}", highlight=False, soft_wrap=True)


COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_experiments,
    "run": run,
    "report": report,
    "results": results,
    **commands.COMMANDS,
}


def run_one(
    experiment: Experiment, preset: str, config: Any, out: Path, workers: int | None, console: Console
) -> Findings | None:
    """Run with checked arguments; what is missing is said before the work. Of several ranks, one has findings."""
    matplotlib()
    if workers is not None and workers < 1:
        raise RunError(f"workers must be at least 1, got {workers}")
    return run_experiment(experiment, preset, config, out, workers or default_workers(), console)


def find(name: str) -> Experiment:
    """The experiment of this name; an unknown one is an error that lists the known."""
    if name not in EXPERIMENTS:
        raise RunError(f"unknown experiment {name!r}; known are {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]


def configured(
    experiment: Experiment, preset: str, alpha: Sequence[float], seeds: int | None, only: Sequence[str] = ()
) -> Any:
    """The preset's configuration with what was asked for instead."""
    if preset not in experiment.presets:
        raise RunError(f"{experiment.name} has no preset {preset!r}; it has {', '.join(experiment.presets)}")
    wanted = {"alphas": tuple(alpha) or None, "seeds": seeds, "only": tuple(only) or None}
    changes = {name: value for name, value in wanted.items() if value is not None}
    unknown = changes.keys() - {field.name for field in fields(experiment.config)}
    if unknown:
        raise RunError(f"{experiment.name} has no setting {', '.join(sorted(unknown))}")
    try:
        return replace(experiment.presets[preset], **changes)
    except ValueError as error:
        raise RunError(str(error)) from None


def main(args: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 if jobs failed, 2 for bad input, 130 if interrupted."""
    errors = Console(stderr=True)
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="powerprop", args=args)
    except INPUT_ERRORS as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except JobsFailedError as error:
        for key, traceback in error.tracebacks.items():
            errors.print(f"--- {key}\n{traceback.strip()}", markup=False, highlight=False, soft_wrap=True)
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        errors.print("interrupted; the same command goes on from here", highlight=False)
        return 130
    return 0
