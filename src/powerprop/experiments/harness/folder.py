"""The folder of a run: its configuration, the versions it was made with, and one folder per job."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch

import powerprop
from powerprop.experiments.harness.experiment import Experiment, Results, RunError
from powerprop.files import read_json, write_json


def prepare(out: Path, experiment: Experiment, preset: str, config: Any) -> None:
    """Make the folder of a run, or check that the one there is of the same run."""
    file = out / "config.json"
    wanted = describe(experiment, preset, config)
    if not file.exists():
        if out.exists() and any(path.name != ".lock" for path in out.iterdir()):
            raise RunError(f"{out} is not empty and not a run (it has no config.json); choose another --out")
        write_json(out / "versions.json", versions())
        write_json(file, wanted)
        return
    # Through the dataclass, so that a setting that is newer than the folder counts with its default.
    found = describe(*open_run(out, {experiment.name: experiment}))
    if found != wanted:
        raise RunError(f"{out} holds another run: {difference(found, wanted)}; choose another --out or delete it")


def describe(experiment: Experiment, preset: str, config: Any) -> dict[str, Any]:
    """What config.json says."""
    return {"experiment": experiment.name, "preset": preset, "config": plain(asdict(config))}


def open_run(out: Path, experiments: dict[str, Experiment]) -> tuple[Experiment, str, Any]:
    """The experiment, preset and configuration that a folder was made with."""
    if not (out / "config.json").is_file():
        raise RunError(f"{out} is not the folder of a run: it has no config.json")
    saved = read_json(out / "config.json")
    if not isinstance(saved, dict) or saved.get("experiment") not in experiments:
        known = ", ".join(experiments)
        raise RunError(f"{out / 'config.json'} is not of a run of {known}; choose another --out")
    experiment = experiments[saved["experiment"]]
    try:
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in saved["config"].items()}
        return experiment, saved["preset"], experiment.config(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{out / 'config.json'} does not fit {experiment.name}: {error}") from None


def results_so_far(out: Path, keys: list[str]) -> dict[str, dict[str, Any]]:
    """The results of those of the jobs that are done."""
    files = {key: out / "jobs" / key / "result.json" for key in keys}
    return {key: read_json(file) for key, file in files.items() if file.exists()}


def all_results(out: Path, experiment: Experiment, config: Any) -> Results:
    """The results of a finished run; one that is not finished is an error that says how far it is."""
    results: dict[str, dict[str, Any]] = {}
    while True:
        keys = [job.key for job in experiment.jobs(config, results)]
        found = results_so_far(out, keys)
        if len(found) < len(keys):
            raise RunError(f"{out} is not finished: {len(found)} of {len(keys)} jobs are done; run it again to go on")
        if found.keys() == results.keys():
            return results
        results = found


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep a second process out of the same folder (where the system has advisory locks)."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "wb") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        except OSError:
            raise RunError(f"{out} is in use by another process") from None
        yield


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


def versions() -> dict[str, str]:
    """What a result depends on besides its configuration."""
    return {
        "powerprop": powerprop.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
    }


def _commit() -> str:
    """The commit of the source tree, with + if files differ from it; empty for an installed package."""
    command = ["git", "-C", str(Path(powerprop.__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    """The processor's name, where the system tells."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
