"""Runs an experiment: jobs side by side, finished ones skipped, then the report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from powerprop.data import DataCorrupt
from powerprop.experiments.harness.display import Display, display_for
from powerprop.experiments.harness.experiment import Experiment, Findings, Job, RunError
from powerprop.experiments.harness.folder import (
    all_results,
    begun_with,
    check_place,
    check_same_run,
    job_folder,
    known_jobs,
    locked,
    made_with_all,
    prepare,
    restore_versions,
    results_so_far,
)
from powerprop.experiments.harness.parallel import Failure, Progress, Work, run_all
from powerprop.experiments.harness.records import advice, begin_job, finish_job
from powerprop.experiments.harness.resume import check_removable, progress_of, remove_run
from powerprop.experiments.harness.versions import Versions, changes, versions
from powerprop.files import FileError, write_json
from powerprop.report import write_page
from powerprop.train.checkpoint import CheckpointError
from powerprop.train.distributed import Ranks, current_ranks, process_group
from powerprop.train.log import tensorboard_wanted


class JobsFailedError(RuntimeError):
    """Some jobs failed; `failures` has the reason by key."""

    def __init__(self, failures: dict[str, Failure]) -> None:
        super().__init__(f"{len(failures)} jobs failed: {', '.join(failures)}")
        self.failures = failures


def run(
    experiment: Experiment, preset: str, config: Any, out: Path, workers: int, console: Console, fresh: bool = False
) -> Findings | None:
    """Run all jobs that are not done yet, write the report, and return what was found.

    Under torchrun all ranks train every job together; rank 0 alone writes, shows progress and returns findings.
    fresh: remove what an earlier run left in the folder. What is refused, is before anything is written or removed.
    """
    known_jobs(experiment, config, {})
    check_tensorboard()
    with process_group() as ranks:
        check_ranks(experiment, ranks)
        if ranks.main:
            check_folder(experiment, preset, config, out, fresh)
            _find_data(experiment, config)
            if fresh:
                remove_run(out)
        with locked(out) if ranks.main else nullcontext():
            if ranks.main:
                prepare(out, experiment, preset, config)
                warn_of_other_versions(experiment, config, out, console)
            ranks.barrier()
            run_jobs(experiment, config, out, workers, console if ranks.main else Console(quiet=True))
            return write_report(experiment, preset, config, out) if ranks.main else None


def check_ranks(experiment: Experiment, ranks: Ranks) -> None:
    """An experiment that cannot use several ranks is an error."""
    if ranks.world > 1 and experiment.in_turn is None:
        raise RunError(f"{experiment.name} trains on one process per job, got {ranks.world} ranks; leave torchrun out")


def check_folder(experiment: Experiment, preset: str, config: Any, out: Path, fresh: bool) -> None:
    """Whether the folder can take this run, or what is in it can be removed, without touching it."""
    if fresh:
        check_removable(out)
    else:
        check_place(out)
        check_same_run(out, experiment, preset, config)


def _find_data(experiment: Experiment, config: Any) -> None:
    """Have the data ready before the jobs ask for it; settings that it does not fit are an error of the run."""
    try:
        experiment.prepare(config)
    except DataCorrupt:
        raise
    except ValueError as error:
        raise RunError(str(error)) from None


def check_tensorboard() -> None:
    """Refuse a run that is to write for TensorBoard where it is not installed, before any work is done."""
    try:
        tensorboard_wanted()
    except ImportError as error:
        raise RunError(str(error)) from None


def warn_of_other_versions(experiment: Experiment, config: Any, out: Path, console: Console) -> None:
    """Say once that the jobs that are left will be made with other versions than the run was begun with."""
    changed = changes(begun_with(out), versions())
    finished = progress_of(out, experiment, config)
    if changed and finished.done < finished.known:
        text = f"warning: {out} was begun with other versions: {changed}"
        line = f"{text}; the jobs that are left may differ from what one version gives"
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)


def run_jobs(experiment: Experiment, config: Any, out: Path, workers: int, console: Console) -> None:
    """Ask for jobs and run them until there are no new ones."""
    ranks, now = current_ranks(), versions()
    in_turn = experiment.in_turn is not None and (ranks.world > 1 or experiment.in_turn(config))
    results: dict[str, dict[str, Any]] = {}
    while True:
        jobs = known_jobs(experiment, config, results)
        results = ranks.from_main(results_so_far(out, jobs))
        waiting = [job for job in jobs if job.key not in results]
        if not waiting:
            if len(known_jobs(experiment, config, results)) == len(jobs):
                return
            continue
        works = [
            Work(job.key, run_and_save, (experiment.run_job, config, job, job_folder(out, job), now)) for job in waiting
        ]
        display = display_for(console, experiment.name, len(works))
        if in_turn:
            run_in_turn(works, display, ranks)
        elif failures := run_all(works, workers, display).failures:
            raise JobsFailedError(failures)


def run_in_turn(works: list[Work], display: Display, ranks: Ranks) -> None:
    """Each work in this process, which all its threads and all ranks share; the first error ends everything."""
    with display:
        for work in works:
            display.update(work.key, 0.0, {})
            work.function(*work.arguments, partial(display.update, work.key))
            display.finish(work.key, None)
            ranks.barrier()


def write_report(experiment: Experiment, preset: str, config: Any, out: Path) -> Findings:
    """Draw the figures and write `report.html` and `summary.json` of a finished run."""
    results = all_results(out, experiment, config)
    restore_versions(out)
    made = made_with_all(out, known_jobs(experiment, config, results))
    try:
        findings = experiment.report(config, results, out)
    except FileError as error:
        raise FileError(f"{error}; delete its folder and the same command does the job again") from None
    findings = replace(findings, page=replace(findings.page, versions=made))
    write_json(out / "summary.json", {"experiment": experiment.name, "preset": preset, **findings.summary})
    write_page(findings.page, out)
    return findings


def run_and_save(
    run_job: Callable[[Any, Job, Path, Progress], dict[str, Any]],
    config: Any,
    job: Job,
    folder: Path,
    now: Versions,
    progress: Progress,
) -> None:
    """Run one job; its result.json says that it is done."""
    folder.mkdir(parents=True, exist_ok=True)
    main = current_ranks().main
    if main:
        begin_job(folder, now)
    try:
        result = run_job(config, job, folder, progress)
    except CheckpointError:
        raise
    except FileError as error:
        raise FileError(f"{error}; {advice(folder)}") from None
    if main:
        finish_job(folder, {**job.settings, **result})
