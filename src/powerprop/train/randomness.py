"""Torch's global random state, which dropout and its like draw from, as a part of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["random_state", "set_random_state"]


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Where torch's generators of the CPU and of this device stand."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(states: Sequence[dict[str, Tensor]], rank: int, device: torch.device) -> None:
    """Set them to where those of this rank stood; a rank that was not there draws on as it does."""
    if rank >= len(states):
        return
    torch.set_rng_state(states[rank]["cpu"])
    if device.type == "cuda" and "cuda" in states[rank]:
        torch.cuda.set_rng_state(states[rank]["cuda"], device)
