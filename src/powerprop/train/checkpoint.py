"""Checkpoints: one file, written atomically, read without running anything in it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from powerprop.files import FileError, replacing

FORMAT = "powerprop-checkpoint-1"


class CheckpointError(FileError):
    """A file that is not a whole checkpoint, or not one of this training."""


def save_checkpoint(path: str | Path, state: dict[str, Any]) -> None:
    """Write tensors, numbers, strings, lists and dicts to `path`; what was there stays until the new file is whole."""
    with replacing(path) as file:
        torch.save({"format": FORMAT, "state": state}, file)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote, onto the CPU; anything else is a `CheckpointError` that names the file."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} is damaged or not a checkpoint ({reason}); delete it to start afresh") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by powerprop: expected the format {FORMAT!r}")
    state: dict[str, Any] = content["state"]
    return state
