"""`powerprop run` and `powerprop results`: experiments, from their settings to their reports."""

from __future__ import annotations

import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from powerprop.commands.options import PRESET, find, find_preset
from powerprop.commands.output import print_table, say
from powerprop.experiments import EXPERIMENTS, Experiment
from powerprop.experiments.harness.docs import write_docs
from powerprop.experiments.harness.experiment import Findings, RunError
from powerprop.experiments.harness.folder import own_folder
from powerprop.experiments.harness.parallel import default_workers
from powerprop.experiments.harness.resume import progress_of
from powerprop.experiments.harness.runner import run as run_experiment
from powerprop.report.style import matplotlib
from powerprop.train.distributed import is_main
from powerprop.train.log import TENSORBOARD


def run(options: Any) -> None:
    """Run an experiment and write its report. Stopped at any moment, the same command goes on where it was."""
    if options.tensorboard:
        os.environ[TENSORBOARD] = "1"
    experiment: Experiment = options.experiment
    config = configured(experiment, asdict(options.settings))
    out = options.out or own_folder(Path("runs"), experiment.name, options.preset)
    console = Console()
    findings = run_one(experiment, options.preset, config, out, options.workers, console, options.fresh)
    if findings is None:
        return
    print_table(console, findings.table.to_rich())
    say(console, f"Report: {out / 'report.html'}")


def results(
    names: tyro.conf.Positional[tuple[str, ...]] = (),
    preset: str = PRESET,
    out: Path = Path("runs"),
    docs: Path = Path("docs/results"),
    workers: int | None = None,
) -> None:
    """Run experiments and put their figures and tables into the documentation.

    Args:
        names: of the experiments; all of them by default.
        preset: of all experiments.
        out: folder that has, or gets, the folder NAME-PRESET of every experiment, as `powerprop run` makes it.
        docs: folder for the Markdown pages and their pictures.
        workers: processes side by side, one thread each; all cores by default.
    """
    console, found = Console(), {}
    configs = {name: find_preset(find(name), preset) for name in names or EXPERIMENTS}
    for name, config in configs.items():
        findings = run_one(EXPERIMENTS[name], preset, config, own_folder(out, name, preset), workers, console)
        if findings is not None:
            found[name] = findings
            print_table(console, findings.table.to_rich())
    index = write_docs(found, EXPERIMENTS, preset, docs, out)
    say(console, f"Results: {index}")


def run_one(
    experiment: Experiment, preset: str, config: Any, out: Path, workers: int | None, console: Console,
    fresh: bool = False,
) -> Findings | None:  # fmt: skip
    """Run with checked arguments; what is missing is said before the work. Of several ranks, one has findings."""
    matplotlib()
    if workers is not None and workers < 1:
        raise RunError(f"workers must be at least 1, got {workers}")
    if not fresh and (out / "jobs").is_dir() and is_main():
        done, known = progress_of(out, experiment, config)
        say(console, f"{experiment.name}: {done} of {known} jobs are done")
    return run_experiment(experiment, preset, config, out, workers or default_workers(), console, fresh)


def configured(experiment: Experiment, settings: dict[str, Any]) -> Any:
    """The experiment's `Config`, whose checks are the user's to put right."""
    try:
        return experiment.config(**{each.name: settings[each.name] for each in fields(experiment.config)})
    except ValueError as error:
        raise RunError(str(error)) from None
