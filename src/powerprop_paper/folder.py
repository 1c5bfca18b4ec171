"""The folder of a run: what it was begun with, one row for each job that is done, and nobody else's files.

runs/mnist-oneshot-cpu/
    config.json                                what the run was begun with
    jobs/train/alpha=2,lr=0.5,seed=0/row.json  the settings and results of a job that is done, sealed by a checksum
    summary.json  report.html  figures/        what the page says
    times.jsonl                                the seconds that jobs took; nothing depends on the clock
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy
import torch

import powerprop
from powerprop.files import TEMPORARY, FileError, sha256, sweep, write_atomically

CONFIG, LOCK, JOBS, ROW, BEGUN, TIMES = "config.json", ".lock", "jobs", "row.json", "begun.json", "times.jsonl"
LAYOUT = 2
"""Of the folder of a run; runs of the first layout were never released."""
OWN = (JOBS, "figures", "report.html", "summary.json", TIMES, CONFIG)
"""What a run writes; its config.json goes last, so that a removal that was interrupted can be repeated."""
FOR_RESUMING = {"checkpoint.pt", "learner.safetensors"}
"""Files that only an unfinished job reads, and that have checksums of their own."""
Versions = dict[str, str]
DECISIVE = ("powerprop", "commit", "torch", "numpy", "cpu capability")
"""Versions that can change the digits of a result."""
LONGEST = 150
"""Longer names of folders end in a checksum."""


class RunError(ValueError):
    """A run that cannot be done as asked; the message says why and what to do."""


# JSON files, whole or not at all; some carry a checksum of the rest.

CHECKSUM = "checksum"


def json_bytes(value: Any) -> bytes:
    """Indented JSON; floats keep all their digits, NaN is refused."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all."""
    write_atomically(path, json_bytes(value))


def read_json(path: str | Path) -> Any:
    """Read a JSON file; one that does not parse is an error that names the file."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is not a JSON file: {error}") from None


def write_sealed_json(path: str | Path, value: dict[str, Any]) -> None:
    """Write a dictionary as JSON with a checksum of the rest in it."""
    write_json(path, {**value, CHECKSUM: sha256(json_bytes(value))})


def read_sealed_json(path: str | Path) -> dict[str, Any]:
    """Read what `write_sealed_json` wrote; a damaged or edited file is an error that names it."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise FileError(f"{path} is damaged or edited: it has {found!r:.40}")
    value = {name: part for name, part in found.items() if name != CHECKSUM}
    try:
        checksum = sha256(json_bytes(value))
    except ValueError:  # NaN, which we do not write, or half of a surrogate pair
        checksum = None
    if checksum is None or found.get(CHECKSUM) != checksum:
        raise FileError(f"{path} is damaged or edited: it does not have its checksum")
    return value


# Rows of jobs.


def folder_name(settings: Mapping[str, Any]) -> str:
    """`alpha=2,lr=0.5,seed=0`: the settings of a job as the name of its folder."""
    name = ",".join(f"{key}={_word(value)}" for key, value in settings.items() if value is not None) or "all"
    safe = "".join(sign if sign.isalnum() or sign in "-_.+=," else "_" for sign in name)
    if safe == name and len(name) <= LONGEST:
        return name
    return f"{safe[:LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return "+".join(map(_word, value)) if isinstance(value, list | tuple) else str(value).replace(" ", "_")


def begin_row(folder: Path, now: Versions) -> None:
    """Note the versions under which a job is worked on; one that is taken up under others has several."""
    folder.mkdir(parents=True, exist_ok=True)
    known = _versions_of(folder)
    if not known or known[-1] != now:
        write_sealed_json(folder / BEGUN, {"versions": [*known, now]})


def _versions_of(folder: Path) -> list[Versions]:
    try:
        return read_sealed_json(folder / BEGUN)["versions"] if (folder / BEGUN).exists() else []
    except FileError as error:
        raise FileError(f"{error}; {advice(folder)}") from None


def write_row(folder: Path, settings: dict[str, Any], result: dict[str, Any]) -> None:
    """Write what a job found; it comes last, because it says that the job is done."""
    if both := settings.keys() & result.keys():
        raise ValueError(f"{', '.join(sorted(both))} of the result is a setting of the job too")
    others = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    sums = {p.name: sha256(p.read_bytes()) for p in others if p.name not in {*FOR_RESUMING, BEGUN, ROW}}
    row = {"settings": settings, "result": result, "files": sums, "versions": _versions_of(folder)}
    write_sealed_json(folder / ROW, row)
    (folder / BEGUN).unlink()


def read_row(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What `write_row` wrote; a row that is damaged or edited is an error that names the file."""
    try:
        found = read_sealed_json(folder / ROW)
    except FileError as error:
        raise FileError(f"{error}; {advice(folder)}") from None
    if found["settings"] != settings:
        raise FileError(f"{folder / ROW} is of {found['settings']}, expected {settings}; {advice(folder)}")
    (folder / BEGUN).unlink(missing_ok=True)  # left by a kill right after the row was written
    return found


def advice(folder: Path) -> str:
    """What helps if a file of a job is damaged."""
    return f"delete {folder} and the same command does this job again"


# The folder as a whole.


def check_same(out: Path, wanted: dict[str, Any]) -> None:
    """A folder with a run of other settings is an error that names the difference; one of somebody else's files too."""
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file; a run needs a folder: choose another --out")
    if not (out / CONFIG).exists():
        if _foreign(out, ()):
            raise RunError(f"{out} is not empty and not a run (it has no {CONFIG}); choose another --out")
        return
    if (found := _read_config(out)) != wanted:
        raise RunError(f"{out} holds another run: {_difference(found, wanted)}; choose another --out or delete it")


def _read_config(out: Path) -> dict[str, Any]:
    try:
        found = read_sealed_json(out / CONFIG)
    except FileError as error:
        raise FileError(f"{error}; undo what was edited, or choose another --out") from None
    if found.get("layout") != LAYOUT:
        raise RunError(f"{out} holds a run of an older powerprop, which cannot go on; choose another --out")
    return found


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """`steps is 50000 there and 20000 here`, for all that differs."""
    there, here = ({**each, **each["config"], "config": None} for each in (found, wanted))
    names = [name for name in {**there, **here} if there.get(name, "missing") != here.get(name, "missing")]
    return ", ".join(
        f"{name} is {there.get(name, 'missing')!r} there and {here.get(name, 'missing')!r} here" for name in names
    )


def _foreign(out: Path, own: Sequence[str]) -> list[Path]:
    """What is in the folder besides a run's own files."""
    found = sorted(out.iterdir()) if out.exists() else []
    return [path for path in found if path.name not in (LOCK, *own) and not TEMPORARY.fullmatch(path.name)]


def locked(out: Path) -> ExitStack:
    """Keep a second process out of the same folder (where the system has advisory locks)."""
    out.mkdir(parents=True, exist_ok=True)
    stack = ExitStack()
    file = stack.enter_context((out / LOCK).open("wb"))
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass
    except BlockingIOError:
        stack.close()
        raise RunError(f"{out} is in use by another process") from None
    return stack


def check_removable(out: Path) -> None:
    """A folder that is not of a run, or has anything else in it, is an error."""
    if not out.exists() or (out.is_dir() and not _foreign(out, ())):
        return
    saved = read_json(out / CONFIG) if (out / CONFIG).is_file() else None
    if not isinstance(saved, dict) or not {"experiment", "preset", "config"} <= saved.keys():
        raise RunError(f"{out} is not the folder of a run: it has no {CONFIG} of one; nothing was removed")
    if others := _foreign(out, OWN):
        raise RunError(f"{others[0]} is not of the run in {out}; nothing was removed")


def remove_run(out: Path) -> None:
    """Remove all that a run made, so that it can begin anew."""
    check_removable(out)
    with locked(out):
        sweep(out)
        for name in OWN:
            path = out / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


# What a result depends on besides its configuration: the versions of programs, and the machine.


def versions() -> Versions:
    """Those of now."""
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


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """`torch 2.12.0 is now 2.13.0`, for all that can change the digits of a result; empty if nothing has changed."""
    names = [name for name in DECISIVE if before.get(name, "") != now.get(name, "")]
    return ", ".join(f"{name} {before.get(name) or 'unknown'} is now {now.get(name) or 'unknown'}" for name in names)


def merged(found: Iterable[Mapping[str, str]]) -> Versions:
    """One value for each name; where jobs differ, all of theirs with the number of jobs."""
    found = list(found)
    names = dict.fromkeys(name for each in found for name in each)
    return {name: _counted(Counter(each.get(name, "") or "unknown" for each in found)) for name in names}


def _counted(values: Counter[str]) -> str:
    if len(values) == 1:
        only = next(iter(values))
        return "" if only == "unknown" else only
    return ", ".join(f"{value} ({jobs} jobs)" for value, jobs in values.items())


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
