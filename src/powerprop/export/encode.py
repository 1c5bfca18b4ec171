"""Sparse tensors as bytes: the values that are not zero, and where they are, as a bitmask or as gaps.

    bits:  one bit per weight
    gaps:  one byte per value, the number of zeros before it; 255 means 255 zeros and no value yet

Gaps are smaller where less than one weight in eight is left.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from powerprop.masks import pack, unpack

__all__ = ["decode", "encode", "from_gaps", "to_gaps"]

STEP = 255
Places = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def encode(tensor: Tensor) -> dict[str, Tensor]:
    """The smallest of {"dense"}, {"bits", "values"} and {"gaps", "values"}. Zeros of either sign count as zero."""
    flat = tensor.detach().flatten()
    kept = flat != 0
    values = flat[kept]
    places = {"bits": pack(kept), "gaps": to_gaps(np.flatnonzero(kept.cpu().numpy()))}
    form = min(places, key=lambda name: places[name].numel())
    if flat.numel() * flat.element_size() <= places[form].numel() + values.numel() * flat.element_size():
        return {"dense": tensor.detach().contiguous()}
    return {form: places[form], "values": values}


def decode(parts: dict[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """The tensor that `encode` made these parts from; what does not fit is an error."""
    if "dense" in parts:
        return parts["dense"].reshape(shape)
    values, size = parts["values"], int(np.prod(shape, dtype=np.int64))
    places = np.flatnonzero(unpack(parts["bits"], (size,))) if "bits" in parts else from_gaps(parts["gaps"])
    if len(places) != len(values) or (len(places) and places[-1] >= size):
        raise ValueError(f"{len(values)} values for {len(places)} places in a tensor of shape {shape}")
    result = torch.zeros(size, dtype=values.dtype)
    result[torch.from_numpy(places)] = values
    return result.view(shape)


def to_gaps(places: Places) -> Tensor:
    """Rising places as gaps: 0 1 5 -> 0 0 3."""
    gaps = np.diff(places, prepend=-1) - 1
    code = np.full(len(gaps) + int((gaps // STEP).sum()), STEP, dtype=np.uint8)
    code[np.cumsum(gaps // STEP + 1) - 1] = gaps % STEP
    return torch.from_numpy(code)


def from_gaps(code: Tensor) -> Places:
    """The places that `to_gaps` made this code from."""
    steps = code.numpy().astype(np.int64)
    ends = steps != STEP
    places: Places = np.cumsum(steps + ends)[ends] - 1
    return places
