"""Where data is looked for, and the check that it is the published data."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
CHUNK_BYTES = 2**20


class DataNotFound(FileNotFoundError):  # noqa: N818 (reads as a sentence where it is raised)
    """A data set is nowhere to be found; says where it was looked for and how to get it."""


class DataCorrupt(ValueError):  # noqa: N818
    """A file is not the published one; says which, what was expected and what to do."""


def cache_dir() -> Path:
    """The user's cache: $XDG_CACHE_HOME/powerprop or ~/.cache/powerprop."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "powerprop"


def roots(root: str | Path | None = None) -> list[Path]:
    """Folders that may hold data, best first: `root` alone if given, else $POWERPROP_DATA and the user's cache."""
    if root is not None:
        return [Path(root)]
    given = os.environ.get("POWERPROP_DATA")
    return ([Path(given)] if given else []) + [cache_dir()]


def download_root(root: str | Path | None) -> Path:
    """Where downloads go: `root` if given, else the user's cache."""
    return Path(root) if root is not None else cache_dir()


def digest(data: bytes | Bytes, like: str) -> str:
    """The md5 or, if `like` is as long as one, the sha256 of the data."""
    total = _hash(like)
    total.update(data if isinstance(data, bytes) else data.data)
    return total.hexdigest()


def file_digest(path: Path, like: str) -> str:
    """The same of a file, of which only a little is in memory at a time."""
    total = _hash(like)
    with open(path, "rb") as file:
        while part := file.read(CHUNK_BYTES):
            total.update(part)
    return total.hexdigest()


def _hash(like: str) -> hashlib._Hash:
    return hashlib.new("md5" if len(like) == 32 else "sha256", usedforsecurity=False)


def check(data: bytes | Bytes, expected: str, path: Path, what: str) -> None:
    """Raise DataCorrupt unless the md5 (or sha256) of `data`, which came from `path`, is the published one."""
    _compare(digest(data, expected), expected, path, what)


def read_checked(path: Path, expected: str) -> bytes:
    """The bytes of a file whose md5 is the published one: it is known before any more of the file is in memory."""
    _compare(file_digest(path, expected), expected, path, "the file")
    return path.read_bytes()


def _compare(actual: str, expected: str, path: Path, what: str) -> None:
    if actual != expected:
        raise corrupt(path, f"{what} has the md5 {actual}, expected {expected}")


def corrupt(path: Path, reason: str) -> DataCorrupt:
    """The error for a file that is not the published one; only what we downloaded ourselves may be deleted."""
    ours = path.is_relative_to(cache_dir())
    remedy = "Delete it and load again to have it downloaded" if ours else "Put an intact copy in its place"
    return DataCorrupt(f"{path} ({_size(path)}) is not as published: {reason}. {remedy}.")


def damaged(path: Path, reason: str) -> DataCorrupt:
    """The error for a file of the user's own that cannot be used."""
    return DataCorrupt(f"{path} ({_size(path)}) cannot be used: {reason}. Put an intact copy in its place.")


def _size(path: Path) -> str:
    return f"{path.stat().st_size:,} bytes" if path.is_file() else "a folder"


def not_found(name: str, looked: Iterable[str], advice: str) -> DataNotFound:
    """The error that lists every place and the way to get the data."""
    places = "\n".join(f"  - {place}" for place in looked)
    return DataNotFound(f"data set {name!r} was not found. Looked in:\n{places}\nTo get it: {advice}")
