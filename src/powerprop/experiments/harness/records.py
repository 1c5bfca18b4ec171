"""The record of a job, `job.json`: the versions it was made with, and checksums by which damage is found out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from powerprop.experiments.harness.experiment import Job
from powerprop.experiments.harness.versions import Versions
from powerprop.files import (
    FileError,
    json_bytes,
    read_json,
    read_sealed_json,
    sha256,
    write_atomically,
    write_sealed_json,
)

RECORD, RESULT = "job.json", "result.json"
FOR_RESUMING = {"checkpoint.pt", "learner.safetensors"}
"""Files that only an unfinished job reads, and that have checksums of their own."""


def begin_job(folder: Path, now: Versions) -> None:
    """Note the versions under which a job is worked on; one that is taken up under others has several."""
    known = made_with(folder)
    if not known or known[-1] != now:
        write_sealed_json(folder / RECORD, {"versions": [*known, now]})


def finish_job(folder: Path, result: dict[str, Any]) -> None:
    """Write the result; it comes last, because it says that the job is done."""
    content = json_bytes(result)
    others = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    sums = {p.name: sha256(p.read_bytes()) for p in others if p.name not in {*FOR_RESUMING, RECORD, RESULT}}
    record = {"versions": made_with(folder), "sha256": {RESULT: sha256(content), **sums}}
    write_sealed_json(folder / RECORD, record)
    write_atomically(folder / RESULT, content)


def read_result(folder: Path, job: Job) -> dict[str, Any]:
    """The result of a finished job whose files are as the job left them; others are an error that names the file."""
    for name, expected in _checksums(folder).items():
        path = folder / name
        if not path.is_file():
            raise FileError(f"{path} is missing; {advice(folder)}")
        if sha256(path.read_bytes()) != expected:
            raise FileError(f"{path} is damaged or edited: it is not what the job wrote; {advice(folder)}")
    try:
        result = read_json(folder / RESULT)
    except FileError as error:
        raise FileError(f"{error}; {advice(folder)}") from None
    if not isinstance(result, dict) or not job.settings.keys() <= result.keys():
        raise FileError(f"{folder / RESULT} is not the result of {job.settings}; {advice(folder)}")
    return result


def _checksums(folder: Path) -> dict[str, str]:
    """Those of the files of a finished job, by name."""
    if not (folder / RECORD).exists():
        raise FileError(f"{folder / RECORD} is missing; {advice(folder)}")
    sums: dict[str, str] = _record(folder).get("sha256", {})
    if RESULT not in sums:
        raise FileError(f"{folder / RECORD} has no checksum of {RESULT}; {advice(folder)}")
    return sums


def made_with(folder: Path) -> list[Versions]:
    """The versions that a job was worked on with; none for a job that has not begun."""
    known: list[Versions] = _record(folder).get("versions", [])
    return known


def advice(folder: Path) -> str:
    """What helps if a file of a job is damaged."""
    return f"delete {folder} and the same command does this job again"


def _record(folder: Path) -> dict[str, Any]:
    """What job.json says; nothing for a job that has not begun."""
    try:
        return read_sealed_json(folder / RECORD) if (folder / RECORD).exists() else {}
    except FileError as error:
        raise FileError(f"{error}; {advice(folder)}") from None
