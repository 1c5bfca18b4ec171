"""A run whose folder is there already: how far it is, what it found, and removing what it left."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from powerprop.experiments.harness.experiment import Experiment, Findings, RunError
from powerprop.experiments.harness.folder import all_results, locked, results_so_far
from powerprop.files import read_json

OWN = ("jobs", "figures", "report.html", "summary.json", "versions.json", "config.json")
"""What a run writes; its config.json goes last, so that a removal that was interrupted can be repeated."""


class Progress(NamedTuple):
    """Jobs that are done, and those that are known so far: tuning comes first, and decides about the others."""

    done: int
    known: int


def progress_of(out: Path, experiment: Experiment, config: Any) -> Progress:
    """How far the run in this folder is."""
    found: dict[str, dict[str, Any]] = {}
    while True:
        jobs = [job.key for job in experiment.jobs(config, found)]
        done = results_so_far(out, jobs)
        if len(done) < len(jobs) or done.keys() == found.keys():
            return Progress(len(done), len(jobs))
        found = done


def remove_run(out: Path) -> None:
    """Remove the files of a run, and nothing else; a folder of something else is an error, none at all is fine."""
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not _is_run(out)):
        raise RunError(f"{out} is not the folder of a run (it has no config.json of one); nothing was removed")
    with locked(out):
        for name in OWN:
            if (out / name).is_dir() and not (out / name).is_symlink():
                shutil.rmtree(out / name)
            else:
                (out / name).unlink(missing_ok=True)


def _is_run(out: Path) -> bool:
    if not (out / "config.json").is_file():
        return False
    saved = read_json(out / "config.json")
    return isinstance(saved, dict) and {"experiment", "preset", "config"} <= saved.keys()


def findings_of(out: Path, experiment: Experiment, preset: str, config: Any) -> Findings:
    """What a finished run says; the pictures are drawn elsewhere and thrown away, so that the run stays as it is."""
    results = all_results(out, experiment, config)
    with TemporaryDirectory() as folder:
        for name in ("jobs", "config.json", "versions.json"):
            (Path(folder) / name).symlink_to((out / name).resolve())
        return experiment.report(config, results, Path(folder))
