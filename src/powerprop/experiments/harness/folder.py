"""The folder of a run: its configuration, the versions it was made with, and one folder per job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from powerprop.experiments.harness.experiment import Experiment, Job, Results, RunError
from powerprop.experiments.harness.records import RESULT, made_with, read_result
from powerprop.experiments.harness.versions import Versions, merged, versions
from powerprop.files import TEMPORARY, FileError, read_sealed_json, sweep, write_sealed_json

CONFIG, VERSIONS, LOCK, JOBS = "config.json", "versions.json", ".lock", "jobs"
MOST_JOBS = 100_000


def prepare(out: Path, experiment: Experiment, preset: str, config: Any) -> None:
    """Make the folder of a run, or check that the one there is of the same run; sweep what killed writers left."""
    check_same_run(out, experiment, preset, config)
    sweep(out)
    restore_versions(out)
    if not (out / CONFIG).exists():
        write_sealed_json(out / CONFIG, describe(experiment, preset, config))


def check_same_run(out: Path, experiment: Experiment, preset: str, config: Any) -> None:
    """A folder with a run of other settings is an error that names the differences."""
    if not (out / CONFIG).exists():
        return
    # Through the dataclass, so that a setting that is newer than the folder counts with its default.
    found = describe(*open_run(out, {experiment.name: experiment}))
    if found != (wanted := describe(experiment, preset, config)):
        raise RunError(f"{out} holds another run: {difference(found, wanted)}; choose another --out or delete it")


def own_folder(out: Path, name: str, preset: str) -> Path:
    """Where a run lives unless one says otherwise: `powerprop results` finds what `powerprop run` did."""
    return out / f"{name}-{preset}"


def describe(experiment: Experiment, preset: str, config: Any) -> dict[str, Any]:
    """What config.json says."""
    return {"experiment": experiment.name, "preset": preset, "config": plain(asdict(config))}


def open_run(out: Path, experiments: dict[str, Experiment]) -> tuple[Experiment, str, Any]:
    """The experiment, preset and configuration that a folder was made with."""
    path = out / CONFIG
    if not path.is_file():
        raise RunError(f"{out} is not the folder of a run: it has no {CONFIG}")
    saved = _read_config(path)
    name = saved.get("experiment")
    if not isinstance(name, str) or name not in experiments:
        raise RunError(f"{path} is not of a run of {', '.join(experiments)}; choose another --out")
    experiment = experiments[name]
    try:
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in saved["config"].items()}
        return experiment, saved["preset"], experiment.config(**values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = f"{path} does not fit {experiment.name}: {error}"
        raise RunError(f"{text}; undo what was edited, or choose another --out") from None


def _read_config(path: Path) -> dict[str, Any]:
    """What config.json says, if it is as a run wrote it."""
    try:
        return read_sealed_json(path)
    except FileError as error:
        raise FileError(f"{error}; undo what was edited, or choose another --out") from None


def known_jobs(experiment: Experiment, config: Any, results: Results) -> list[Job]:
    """The jobs that are known, given these results; more than anybody can run are an error."""
    jobs = experiment.jobs(config, results)
    if len(jobs) > MOST_JOBS:
        raise RunError(f"a run has at most {MOST_JOBS} jobs, these settings give {len(jobs)}; ask for less")
    return jobs


def results_so_far(out: Path, jobs: Sequence[Job]) -> dict[str, dict[str, Any]]:
    """The results of those of the jobs that are done; a damaged one is an error that names the file."""
    folders = {job.key: job_folder(out, job) for job in jobs}
    return {job.key: read_result(folders[job.key], job) for job in jobs if (folders[job.key] / RESULT).exists()}


def job_folder(out: Path, job: Job) -> Path:
    """The place of a job."""
    return out / JOBS / job.key


def all_results(out: Path, experiment: Experiment, config: Any) -> Results:
    """The results of a finished run; one that is not finished is an error that says how far it is."""
    results: dict[str, dict[str, Any]] = {}
    while True:
        jobs = known_jobs(experiment, config, results)
        found = results_so_far(out, jobs)
        if len(found) < len(jobs):
            raise RunError(f"{out} is not finished: {len(found)} of {len(jobs)} jobs are done; run it again to go on")
        if found.keys() == results.keys():
            return results
        results = found


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep a second process out of the same folder (where the system has advisory locks).

    A folder with files of somebody else is refused before anything is written into it.
    """
    check_place(out)
    out.mkdir(parents=True, exist_ok=True)
    with open(out / LOCK, "wb") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        except BlockingIOError:
            raise RunError(f"{out} is in use by another process") from None
        yield


def check_place(out: Path) -> None:
    """A file, or a folder with files of somebody else, is no place for a run."""
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file; a run needs a folder: choose another --out")
    if not (out / CONFIG).exists() and foreign(out, (VERSIONS,)):
        raise RunError(f"{out} is not empty and not a run (it has no {CONFIG}); choose another --out")


def foreign(out: Path, own: Sequence[str]) -> list[Path]:
    """What is in the folder besides a run's own files."""
    found = sorted(out.iterdir()) if out.exists() else []
    return [path for path in found if path.name not in (LOCK, *own) and not TEMPORARY.fullmatch(path.name)]


def begun_with(out: Path) -> Versions:
    """The versions that a run was begun with."""
    path = out / VERSIONS
    try:
        return read_sealed_json(path)
    except FileError as error:
        raise FileError(f"{error}; delete {path} and the same command writes it anew") from None


def restore_versions(out: Path) -> None:
    """Write down the versions that a run is begun with; if the file was lost, those of its first job."""
    if not (out / VERSIONS).exists():
        folders = sorted((out / JOBS).iterdir()) if (out / JOBS).is_dir() else []
        first = next((made[0] for folder in folders if (made := made_with(folder))), None)
        write_sealed_json(out / VERSIONS, first or versions())


def made_with_all(out: Path, jobs: Sequence[Job]) -> Versions:
    """The versions that the jobs of a run were made with; where they differ, all of them."""
    return merged(made for job in jobs for made in made_with(job_folder(out, job)))


def difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """`steps is 50000 there and 20000 here`, for every setting that differs."""
    there, here = ({"preset": each["preset"], **each["config"]} for each in (found, wanted))
    names = [name for name in here if there[name] != here[name]]
    return ", ".join(f"{name} is {there[name]!r} there and {here[name]!r} here" for name in names)


def plain(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value
