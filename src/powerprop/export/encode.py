"""Sparse tensors as bytes: the values that are not zero, and where they are, as a bitmask or as gaps.

    bits:  one bit per weight
    gaps:  one byte per value, the number of zeros before it; 255 means 255 zeros and no value yet

Gaps are smaller where less than one weight in eight is left. The zeros after the last value have bytes too, so that a
few bytes cannot declare a tensor of any size.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from powerprop.masks import pack, unpack

__all__ = ["decode", "encode", "from_gaps", "to_gaps", "unstored"]

STEP = 255
Places = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def encode(tensor: Tensor) -> dict[str, Tensor]:
    """The smallest of {"dense"}, {"bits", "values"} and {"gaps", "values"}. Zeros of either sign count as zero."""
    flat = tensor.detach().flatten()
    kept = flat != 0
    values = flat[kept]
    places = {"bits": pack(kept), "gaps": to_gaps(np.flatnonzero(kept.cpu().numpy()), flat.numel())}
    form = min(places, key=lambda name: places[name].numel())
    if flat.numel() * flat.element_size() <= places[form].numel() + values.numel() * flat.element_size():
        return {"dense": tensor.detach().contiguous()}
    return {form: places[form], "values": values}


def decode(parts: dict[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """The tensor that `encode` made these parts from; what does not fit is an error before anything is allocated."""
    if "dense" in parts:
        if tuple(parts["dense"].shape) != shape:
            raise ValueError(f"a tensor of shape {tuple(parts['dense'].shape)} is declared as {shape}")
        return parts["dense"]
    values, size = parts["values"], math.prod(shape)
    places = np.flatnonzero(unpack(parts["bits"], (size,))) if "bits" in parts else from_gaps(parts["gaps"])
    if values.ndim != 1 or len(places) != len(values) or (len(places) and places[-1] >= size):
        raise ValueError(f"{tuple(values.shape)} values for {len(places)} places in a tensor of shape {shape}")
    result = torch.zeros(size, dtype=values.dtype)
    result[torch.from_numpy(places)] = values
    return result.view(shape)


def unstored(parts: dict[str, Tensor], shape: tuple[int, ...]) -> int:
    """How many of the declared entries no byte stands for: none, but where zeros come last in older files."""
    if "gaps" not in parts:
        return 0  # `decode` compares
    code = _bytes(parts["gaps"])
    stored = int(code.sum(dtype=np.int64)) + int(np.count_nonzero(code != STEP))
    return max(0, math.prod(shape) - stored - STEP + 1)


def to_gaps(places: Places, size: int) -> Tensor:
    """Rising places in a tensor of a size as gaps: 0 1 5 -> 0 0 3, and 255 for every 255 zeros after them."""
    gaps = np.diff(places, prepend=-1) - 1
    last = int(places[-1]) + 1 if len(places) else 0
    code = np.full(len(gaps) + int((gaps // STEP).sum()) + (size - last) // STEP, STEP, dtype=np.uint8)
    code[np.cumsum(gaps // STEP + 1) - 1] = gaps % STEP
    return torch.from_numpy(code)


def from_gaps(code: Tensor) -> Places:
    """The places that `to_gaps` made this code from."""
    steps = _bytes(code).astype(np.int64)
    ends = steps != STEP
    places: Places = np.cumsum(steps + ends)[ends] - 1
    return places


def _bytes(code: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    if code.dtype != torch.uint8 or code.ndim != 1:
        raise ValueError(f"expected gaps as a row of bytes, got {code.dtype} {tuple(code.shape)}")
    found: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = code.numpy()
    return found
