"""A run whose folder is there already: how far it is, and removing what it left."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

from powerprop.experiments.harness.experiment import Experiment, RunError
from powerprop.experiments.harness.folder import CONFIG, JOBS, VERSIONS, foreign, known_jobs, locked, results_so_far
from powerprop.files import read_json, sweep

OWN = (JOBS, "figures", "report.html", "summary.json", VERSIONS, CONFIG)
"""What a run writes; its config.json goes last, so that a removal that was interrupted can be repeated."""


class Finished(NamedTuple):
    """Jobs that are done, and those that are known so far: tuning comes first, and decides about the others."""

    done: int
    known: int


def progress_of(out: Path, experiment: Experiment, config: Any) -> Finished:
    """How far the run in this folder is."""
    found: dict[str, dict[str, Any]] = {}
    while True:
        jobs = known_jobs(experiment, config, found)
        done = results_so_far(out, jobs)
        if len(done) < len(jobs) or done.keys() == found.keys():
            return Finished(len(done), len(jobs))
        found = done


def check_removable(out: Path) -> None:
    """A folder that is not of a run, or has anything else in it, is an error."""
    if not out.exists():
        return
    if not (out / CONFIG).is_file():
        raise RunError(f"{out} is not the folder of a run: it has no {CONFIG}; nothing was removed")
    saved = read_json(out / CONFIG)
    if not isinstance(saved, dict) or not {"experiment", "preset", "config"} <= saved.keys():
        raise RunError(f"{out} is not the folder of a run: its {CONFIG} is not of one; nothing was removed")
    if others := foreign(out, OWN):
        raise RunError(f"{others[0]} is not of the run in {out}; nothing was removed")


def remove_run(out: Path) -> None:
    """Remove all that a run made, so that it can begin anew; a folder with anything else in it is left as it is."""
    check_removable(out)
    if not out.exists():
        return
    with locked(out):
        sweep(out)
        for name in OWN:
            path = out / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
