"""Random numbers for one purpose: of a seed, a task and what they are for, whatever was drawn before them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["derived_seed", "drawing_from", "number_of"]

PURPOSES = ("batches", "layers", "weights", "labels", "revived", "layers at the end")
"""Purposes of a learner's random numbers that have kept their seeds; those of other names are derived from the name."""


def number_of(purpose: str) -> int:
    """Purposes as numbers: the known ones by their place, others by their name."""
    return PURPOSES.index(purpose) if purpose in PURPOSES else zlib.crc32(purpose.encode())


def derived_seed(seed: int, *parts: int) -> int:
    """A seed for one purpose, such as the batches of task 17, so that it needs nothing that was drawn before it."""
    return int(np.random.SeedSequence([seed, *parts]).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Let layers that know torch's global generator only (dropout) draw from this seed, and put its state back."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the other devices too, for good
        for each in devices:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield
