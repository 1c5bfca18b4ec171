"""Files that are either the old version or the new one, never half of it, and that tell when they are damaged."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

__all__ = [
    "FileError", "cause", "content_of", "header_of", "naming", "read_tensors", "replacing", "sha256", "shape_of",
    "sweep", "write_atomically", "write_tensors",
]  # fmt: skip

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


def sha256(content: bytes) -> str:
    """The checksum by which damaged and edited files are found out, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


# --- tensors and plain data in one safetensors file with a checksum of all its bytes ----------------------------------


KEY = "powerprop"
"""The one entry of the header: the order of several is not fixed, and equal content must give equal bytes."""
BLANK = "0" * 64
"""Stands where the checksum comes to stand while it is computed."""
PREFIX = 8
"""Bytes of a safetensors file that tell the length of its header."""
SHOWN = 1000
"""Characters of an error that are repeated: what is wrong with a file may be as long as the file."""
WRONG = (
    ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, SafetensorError, TypeError, ValueError,
)  # fmt: skip
"""What content of another kind than was expected leads to, sooner or later."""


def write_tensors(path: str | Path, format: str, tensors: Mapping[str, Tensor], data: Any = None) -> None:
    """Write tensors and plain data, whole or not at all; equal content gives equal bytes.

    format: names what the file is; `read_tensors` asks for it.
    """
    content = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    entry = {"checksum": BLANK, "format": format, "data": data}
    blank = to_safetensors(content, {KEY: json.dumps(entry, allow_nan=False)})
    write_atomically(path, blank.replace(BLANK.encode(), sha256(blank).encode(), 1))


def read_tensors(path: str | Path, format: str) -> tuple[dict[str, Tensor], Any]:
    """Read what `write_tensors` wrote, onto the CPU.

    A truncated, damaged or foreign file is a `FileError` that names it.
    """
    content = Path(path).read_bytes()
    entry = header_of(path, content)
    if entry.get("format") != format:
        raise FileError(f"{path}: expected a file of format {format!r}, got {entry.get('format')!r}")
    checksum = entry.get("checksum")
    blank = content.replace(str(checksum).encode(), BLANK.encode(), 1)
    if sha256(blank) != checksum:
        raise FileError(f"{path} is damaged: its content does not have the checksum in its header")
    try:
        return from_safetensors(content), entry["data"]
    except (SafetensorError, ValueError, KeyError) as error:
        raise FileError(f"{path}: not a complete safetensors file ({error})") from None


@contextmanager
def content_of(path: str | Path, expected: str = "a complete safetensors file of powerprop") -> Iterator[None]:
    """Whatever is wrong with the content of a file is an error of one line that names the file."""
    try:
        yield
    except WRONG as error:
        if isinstance(error, FileError) and str(error).startswith(str(path)):
            raise
        missing = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        text = " ".join(missing.split())[:SHOWN]
        raise FileError(f"{path}: not {expected} ({text})") from None


def shape_of(found: Any) -> tuple[int, ...]:
    """A shape as a file declares it: a list of sizes, small enough for a tensor to have it."""
    if not (isinstance(found, list) and all(type(size) is int and 0 <= size < 2**63 for size in found)):
        raise ValueError(f"a shape must be a list of sizes, got {found!s:.80}")
    if math.prod(max(1, size) for size in found) >= 2**63:
        raise ValueError(f"no tensor has the shape {found!s:.80}")
    return tuple(found)


def header_of(path: str | Path, content: bytes) -> dict[str, Any]:
    """What the header says of the file as a whole; empty if it is a safetensors file of somebody else."""
    size = int.from_bytes(content[:PREFIX], "little")
    try:
        if len(content) < PREFIX + size:
            raise ValueError(f"it has {len(content)} bytes, its header alone {size}")
        header = json.loads(content[PREFIX : PREFIX + size])
        entry = json.loads(header.get("__metadata__", {}).get(KEY, "{}"))
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise FileError(f"{path}: not a complete safetensors file ({error})") from None
    return entry if isinstance(entry, dict) else {}
