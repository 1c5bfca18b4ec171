"""Runs an experiment: jobs side by side, finished ones skipped, then the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from powerprop.experiments.base import Experiment, Findings, Job
from powerprop.experiments.folder import all_results, locked, prepare, results_so_far
from powerprop.report import write_page
from powerprop.train.display import display_for
from powerprop.train.files import write_json
from powerprop.train.parallel import Report, Task, run_tasks


class JobsFailedError(RuntimeError):
    """Some jobs failed; `tracebacks` has the reason by key."""

    def __init__(self, tracebacks: dict[str, str]) -> None:
        super().__init__(f"{len(tracebacks)} jobs failed: {', '.join(tracebacks)}")
        self.tracebacks = tracebacks


def run(experiment: Experiment, preset: str, config: Any, out: Path, workers: int, console: Console) -> Findings:
    """Run all jobs that are not done yet, write the report, and return what was found."""
    with locked(out):
        prepare(out, experiment, preset, config)
        experiment.prepare(config)
        run_jobs(experiment, config, out, workers, console)
        return write_report(experiment, preset, config, out)


def run_jobs(experiment: Experiment, config: Any, out: Path, workers: int, console: Console) -> None:
    """Ask for jobs and run them until there are no new ones."""
    results: dict[str, dict[str, Any]] = {}
    while True:
        jobs = experiment.jobs(config, results)
        results = results_so_far(out, [job.key for job in jobs])
        waiting = [job for job in jobs if job.key not in results]
        if not waiting:
            if len(experiment.jobs(config, results)) == len(jobs):
                return
            continue
        tasks = [_task(experiment, config, job, out) for job in waiting]
        outcome = run_tasks(tasks, workers, display_for(console, experiment.name, len(tasks)))
        if outcome.errors:
            raise JobsFailedError(outcome.errors)


def write_report(experiment: Experiment, preset: str, config: Any, out: Path) -> Findings:
    """Draw the figures and write `report.html` and `summary.json` of a finished run."""
    findings = experiment.report(config, all_results(out, experiment, config), out)
    write_json(out / "summary.json", {"experiment": experiment.name, "preset": preset, **findings.summary})
    write_page(findings.page, out)
    return findings


def _task(experiment: Experiment, config: Any, job: Job, out: Path) -> Task:
    return Task(job.key, run_and_save, (experiment.run_job, config, job, out / "jobs" / job.key))


def run_and_save(
    run_job: Callable[[Any, Job, Path, Report], dict[str, Any]], config: Any, job: Job, folder: Path, report: Report
) -> None:
    """Run one job; its result.json says that it is done."""
    folder.mkdir(parents=True, exist_ok=True)
    result = run_job(config, job, folder, report)
    write_json(folder / "result.json", {**job.settings, **result})
