"""Files that are either the old version or the new one, never half of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


class FileError(ValueError):
    """A file that is damaged or not what it should be; the message names it."""


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """Write to a temporary file beside `path` and put it in its place when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write the whole file or nothing: a reader never sees half of it, and a kill loses nothing already saved."""
    with replacing(path) as file:
        file.write(content)


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON; floats keep all their digits, NaN is refused."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def read_json(path: str | Path) -> Any:
    """Read a JSON file; one that does not parse is an error that names the file."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise FileError(f"{path} is not a JSON file: {error}") from None
