"""Runs an experiment: jobs side by side, finished ones skipped, then the report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from powerprop.experiments.harness.display import Display, display_for
from powerprop.experiments.harness.experiment import Experiment, Findings, Job, RunError
from powerprop.experiments.harness.folder import all_results, locked, prepare, results_so_far
from powerprop.experiments.harness.parallel import Report, Task, run_tasks
from powerprop.files import write_json
from powerprop.report import write_page
from powerprop.train.distributed import Ranks, current_ranks, process_group


class JobsFailedError(RuntimeError):
    """Some jobs failed; `tracebacks` has the reason by key."""

    def __init__(self, tracebacks: dict[str, str]) -> None:
        super().__init__(f"{len(tracebacks)} jobs failed: {', '.join(tracebacks)}")
        self.tracebacks = tracebacks


def run(experiment: Experiment, preset: str, config: Any, out: Path, workers: int, console: Console) -> Findings | None:
    """Run all jobs that are not done yet, write the report, and return what was found.

    Under torchrun all ranks train every job together; rank 0 alone writes, shows progress and returns findings.
    """
    with process_group() as ranks, _room(experiment, ranks, out):
        if ranks.main:
            prepare(out, experiment, preset, config)
            experiment.prepare(config)
        ranks.barrier()
        run_jobs(experiment, config, out, workers, console if ranks.main else Console(quiet=True))
        return write_report(experiment, preset, config, out) if ranks.main else None


def run_jobs(experiment: Experiment, config: Any, out: Path, workers: int, console: Console) -> None:
    """Ask for jobs and run them until there are no new ones."""
    ranks = current_ranks()
    together = experiment.together is not None and (ranks.world > 1 or experiment.together(config))
    results: dict[str, dict[str, Any]] = {}
    while True:
        jobs = experiment.jobs(config, results)
        results = ranks.from_main(results_so_far(out, [job.key for job in jobs]))
        waiting = [job for job in jobs if job.key not in results]
        if not waiting:
            if len(experiment.jobs(config, results)) == len(jobs):
                return
            continue
        tasks = [_task(experiment, config, job, out) for job in waiting]
        display = display_for(console, experiment.name, len(tasks))
        if together:
            run_in_turn(tasks, display, ranks)
        elif errors := run_tasks(tasks, workers, display).errors:
            raise JobsFailedError(errors)


def run_in_turn(tasks: list[Task], display: Display, ranks: Ranks) -> None:
    """Each task in this process, which all its threads and all ranks work on; the first error ends everything."""
    with display:
        for task in tasks:
            display.update(task.key, 0.0, {})
            task.function(*task.arguments, partial(display.update, task.key))
            display.finish(task.key, None)
            ranks.barrier()


def _room(experiment: Experiment, ranks: Ranks, out: Path) -> AbstractContextManager[None]:
    """The folder's lock, which rank 0 holds for all; an experiment that cannot use several ranks is an error."""
    if ranks.world > 1 and experiment.together is None:
        raise RunError(f"{experiment.name} trains on one process per job, got {ranks.world} ranks; leave torchrun out")
    return locked(out) if ranks.main else nullcontext()


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
    if current_ranks().main:
        write_json(folder / "result.json", {**job.settings, **result})
