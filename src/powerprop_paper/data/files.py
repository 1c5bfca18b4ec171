"""Where data is looked for, the check that it is the published data, and downloads."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Sequence
from http.client import HTTPException
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

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


def kind_of(checksum: str) -> str:
    """Which checksum this is: md5 has 32 hexadecimal digits, sha256 has 64."""
    return "md5" if len(checksum) == 32 else "sha256"


def digest(data: bytes | bytearray | Bytes, like: str) -> str:
    """The checksum of the data, of the same kind as `like`."""
    content = data.data if isinstance(data, np.ndarray) else data
    return hashlib.new(kind_of(like), content, usedforsecurity=False).hexdigest()


def file_digest(path: Path, like: str) -> str:
    """The same of a file, of which only a little is in memory at a time."""
    total = hashlib.new(kind_of(like), usedforsecurity=False)
    with open(path, "rb") as file:
        while part := file.read(CHUNK_BYTES):
            total.update(part)
    return total.hexdigest()


def check(actual: str, expected: str, path: Path, what: str) -> None:
    """Raise DataCorrupt unless the checksum of `what`, which came from `path`, is the published one."""
    if actual != expected:
        raise corrupt(path, f"{what} has the {kind_of(expected)} {actual}, expected {expected}")


def read_checked(path: Path, expected: str) -> bytes:
    """The bytes of a file that must be the published one: that is known before more of the file is in memory."""
    check(file_digest(path, expected), expected, path, "the file")
    return path.read_bytes()


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


def fetch(urls: Sequence[str], target: Path, sha256: str) -> list[str]:
    """Save the first of `urls` whose content has this sha256, unless `target` is there and has it.

    What has another sha256 never gets the name of the target. Returns what went wrong with each, and an empty list on
    success.
    """
    if target.is_file() and file_digest(target, sha256) == sha256:
        return []
    target.parent.mkdir(parents=True, exist_ok=True)
    failures = []
    for url in urls:
        try:
            torch.hub.download_url_to_file(url, str(target), hash_prefix=sha256, progress=sys.stderr.isatty())
        except RuntimeError as error:
            failures.append(f"{url}: the download does not have the published sha256: {error}")
        except (OSError, HTTPException, ValueError) as error:
            failures.append(f"{url}: {error}")
        else:
            return []
    return failures
