"""Checkpoints: one file, written atomically, read without running anything in it, and only if it is undamaged."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from powerprop.files import FileError, write_atomically

FORMAT = "powerprop-checkpoint-1"


class CheckpointError(FileError):
    """A file that is not a whole checkpoint, or not one of this training."""


def save_checkpoint(path: str | Path, state: dict[str, Any]) -> None:
    """Write tensors, numbers, strings, lists and dicts to `path`; what was there stays until the new file is whole."""
    content = io.BytesIO()  # torch hides the error of a full disk behind one of its own
    with _checksums():
        torch.save({"format": FORMAT, "state": state}, content)
    write_atomically(path, content.getvalue())


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote, onto the CPU; anything else is a `CheckpointError` that names the file."""
    with open(path, "rb") as file:
        try:
            _check_archive(file)
            found = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a foreign file can make the parsers of torch and Python raise anything
            reason = str(error).partition("\n")[0]
            raise CheckpointError(f"{path} is damaged or not a checkpoint ({reason})") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("state"), dict):
        raise CheckpointError(f"{path} was not written by powerprop: expected the format {FORMAT!r}")
    state: dict[str, Any] = found["state"]
    return state


def _check_archive(file: IO[bytes]) -> None:
    """Every part of the archive has its CRC-32, which torch itself does not look at."""
    with zipfile.ZipFile(file) as archive:
        for part in archive.infolist():
            if part.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{part.filename} in it is compressed, which torch does not do")
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"the content of {damaged} in it does not have its checksum")
    file.seek(0)


@contextmanager
def _checksums() -> Iterator[None]:
    """Have torch.save write checksums, also where they are switched off for speed."""
    before = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(before)
