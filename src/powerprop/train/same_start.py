"""Whether ranks that are about to train together hold the same bits."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.train.distributed import Ranks

__all__ = ["check_alike"]

SHOWN = 4
"""How many differing entries an error names."""


def check_alike(model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
    """Raise unless the weights, φ, the masks and all else that the optimiser holds are the same on every rank.

    DDP sends rank 0's weights to the others, but φ and masks come from the weights that each rank had before.
    """
    if ranks.world == 1:
        return
    marks = dict(_marks("model", dict(model.named_parameters())))
    marks |= _marks("optimizer", optimizer.state_dict())
    found = ranks.gather(marks)
    names = dict.fromkeys(name for each in found for name in each)
    if differing := [name for name in names if len({each.get(name) for each in found}) > 1]:
        raise ValueError(
            f"the ranks must start alike, but {_listed(differing)} differ between them; "
            "seed every rank alike, or broadcast the weights before the optimiser is made"
        )


def _marks(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """A checksum of every tensor and the text of every number within, by the path to it."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _marks(f"{name}.{key}", part)
    elif isinstance(value, (list, tuple)):
        yield from _marks(name, dict(enumerate(value)))
    elif isinstance(value, Tensor):
        yield name, f"{tuple(value.shape)} {_checksum(value)}"
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield name, repr(value)


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
