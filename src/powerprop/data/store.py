"""Where data is looked for, and the check that it is the published data."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


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
    algorithm = "md5" if len(like) == 32 else "sha256"
    return hashlib.new(algorithm, data if isinstance(data, bytes) else data.data, usedforsecurity=False).hexdigest()


def check(data: bytes | Bytes, expected: str, path: Path, what: str = "the file") -> None:
    """Raise DataCorrupt unless the md5 (or sha256) of `data`, which came from `path`, is the published one."""
    actual = digest(data, expected)
    if actual != expected:
        raise corrupt(path, f"{what} has the md5 {actual}, expected {expected}")


def corrupt(path: Path, reason: str) -> DataCorrupt:
    """The error for a file that is not the published one."""
    size = f"{path.stat().st_size:,} bytes" if path.is_file() else "a folder"
    return DataCorrupt(
        f"{path} ({size}) is not as published: {reason}. "
        "Delete it and load again to have it downloaded, or put an intact copy in its place."
    )


def not_found(name: str, looked: Iterable[str], advice: str) -> DataNotFound:
    """The error that lists every place and the way to get the data."""
    places = "\n".join(f"  - {place}" for place in looked)
    return DataNotFound(f"data set {name!r} was not found. Looked in:\n{places}\nTo get it: {advice}")
