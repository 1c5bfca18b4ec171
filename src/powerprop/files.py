"""Files that are either the old version or the new one, never half of it, and that tell when they are damaged."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

CHECKSUM = "checksum"
TEMPORARY = re.compile(r"\..+\.\d+\.tmp")
"""The names of the files that `replacing` writes to."""


class FileError(ValueError):
    """A file that is damaged or not what it should be; the message names it."""


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """Write to a temporary file beside `path` and put it in its place when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming(path):
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Let an `OSError` of the block that names no file (a write to a full disk does not) name this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise type(error)(error.errno, error.strerror, str(path)) from error
        raise


def cause(error: OSError, unnamed: str = "") -> str:
    """The path (or `unnamed`, for an error that has none) and the reason in one line."""
    reason = error.strerror or str(error) or type(error).__name__
    where = unnamed if error.filename is None else error.filename
    return f"{where}: {reason}" if where else reason


def sweep(folder: Path) -> list[Path]:
    """Remove the temporary files that killed writers left anywhere below the folder; returns them."""
    left = [path for path in folder.rglob(".*.tmp") if TEMPORARY.fullmatch(path.name) and path.is_file()]
    for path in left:
        path.unlink(missing_ok=True)
    return left


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write the whole file or nothing: a reader never sees half of it, and a kill loses nothing already saved."""
    with replacing(path) as file:
        file.write(content)


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


def sha256(content: bytes) -> str:
    """The checksum by which damaged and edited files are found out, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()
