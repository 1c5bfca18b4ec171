"""The hot path: turn the base optimiser's move of a weight into one of φ, in place, and show Ψ(φ) ⊙ active.

    φ ← (φ + (target - w) · α|φ|^(α-1)) · shrink   where trainable,      w = Ψ(φ) ⊙ active

The pass works chunk by chunk on two buffers that are kept, φ and |φ|^(α-1): fresh large temporaries cost page faults, a
chunk stays in the cache from its first operation to its last, and |φ|^(α-1) is the slope of the next step as well as
the factor of this one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from powerprop.power import abs_power, flush

__all__ = ["Chunk", "absorb_linear", "absorb_power", "chunks", "confine", "is_dense", "keep", "laid_out_like", "masked"]

_CHUNK = 1 << 18
_CHUNK_ON_ACCELERATOR = 1 << 22
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Chunk(NamedTuple):
    """Views of the same stretch of memory in every buffer; *_bits are the same bytes as integers, for masking."""

    weight: Tensor
    weight_bits: Tensor
    phi: Tensor
    phi_bits: Tensor
    factor: Tensor
    active: Tensor | None
    trainable: Tensor | None


def chunks(
    weight: Tensor, phi: Tensor | None, factor: Tensor | None, active: Tensor | None, trainable: Tensor | None
) -> list[Chunk]:
    """Cut the buffers of one weight into chunks."""
    bits = _BITS[weight.element_size()]
    phi = weight if phi is None else phi
    factor = weight if factor is None else factor
    buffers = (weight, weight.view(bits), phi, phi.view(bits), factor, active, trainable)
    return [Chunk(*views) for views in _stretches(buffers)]


def keep(bits: Tensor, mask: Tensor) -> Tensor:
    """Clear all bits of the numbers that a mask leaves out, in place; the others stay as they are.

    `and` runs at about the speed of a copy, and lets no NaN through as 0·NaN would.
    """
    return bits.bitwise_and_(mask.view(torch.int8).neg())  # -1 has all bits set, and stays -1 in any width


def masked(tensor: Tensor, mask: Tensor) -> Tensor:
    """A copy that is zero where the mask is, whatever stood there."""
    bits = _BITS[tensor.element_size()]
    return torch.bitwise_and(tensor.view(bits), mask.view(torch.int8).neg()).view(tensor.dtype)


def confine(tensor: Tensor, chunks: list[Chunk]) -> None:
    """Zero a tensor of the weight's layout where the weight is not trained, in place."""
    for (part,), c in zip(_stretches((tensor,)), chunks, strict=True):
        if c.trainable is not None:
            keep(part.view(c.weight_bits.dtype), c.trainable)


def absorb_power(c: Chunk, alpha: float, decay: tuple[float, float], shrink: float) -> None:
    """α > 1. The weight's own memory holds the move, then serves as scratch, before it receives Ψ(φ)."""
    if c.active is None:
        c.weight.addcmul_(c.phi, c.factor, value=-1)  # fused: Ψ(φ)'s rounding counts as a move, see docs/decisions.md
    else:
        theta = torch.mul(c.phi, c.factor)
        _take_off(c.weight, theta, c.active, decay)
        c.weight.sub_(keep(theta.view(c.phi_bits.dtype), c.active).view(c.phi.dtype))
    if c.trainable is not None:
        keep(c.weight_bits, c.trainable)
    c.phi.addcmul_(c.factor, c.weight, value=alpha)
    if shrink != 1:
        torch.mul(c.phi, shrink - 1, out=c.weight)
        c.phi.add_(c.weight if c.trainable is None else keep(c.weight_bits, c.trainable).view(c.phi.dtype))
    flush(c.phi, alpha)
    abs_power(c.phi, alpha - 1, c.factor, c.weight)
    torch.mul(c.phi, c.factor, out=c.weight)
    if c.active is not None:
        keep(c.weight_bits, c.active)


def absorb_linear(c: Chunk, decay: tuple[float, float]) -> None:
    """α = 1: θ takes the target where active and trainable, and the move alone where trainable but not active."""
    if c.active is not None:
        _take_off(c.weight, c.phi, c.active, decay)
    if c.trainable is not None:
        keep(c.weight_bits, c.trainable)
    both = c.trainable if c.active is None else c.active if c.trainable is None else c.active & c.trainable
    if both is None:
        c.phi.copy_(c.weight)
    else:
        keep(c.phi_bits, ~both)
        c.phi.add_(c.weight)
    if c.active is None:
        c.weight.copy_(c.phi)
    else:
        keep(c.weight_bits.copy_(c.phi_bits), c.active)


def _take_off(weight: Tensor, theta: Tensor, active: Tensor, decay: tuple[float, float]) -> None:
    """Decay θ by these fractions where it is active and where it is not."""
    used, rest = decay
    if used or rest:
        weight.sub_(theta, alpha=rest)
        weight.sub_(masked(theta, active), alpha=used - rest)


def _stretches(buffers: tuple[Tensor | None, ...]) -> list[tuple[Any, ...]]:
    """The same stretches of every buffer; weights with gaps in memory are taken whole."""
    weight = buffers[0]
    assert weight is not None
    if not is_dense(weight):
        return [buffers]
    size = _CHUNK if weight.device.type == "cpu" else _CHUNK_ON_ACCELERATOR
    flat = [None if b is None else b.as_strided((b.numel(),), (1,), b.storage_offset()) for b in buffers]
    starts = range(0, weight.numel(), size)
    return [tuple(None if b is None else b[start : start + size] for b in flat) for start in starts]


def is_dense(tensor: Tensor) -> bool:
    """True if the elements fill a stretch of memory without gaps, in whatever order (channels-last weights do)."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def laid_out_like(tensor: Tensor, param: Tensor) -> Tensor:
    """The same values with the strides of the parameter, so that flat views of both line up."""
    if tensor.stride() == param.stride():
        return tensor
    return torch.empty_strided(param.shape, param.stride(), dtype=tensor.dtype, device=param.device).copy_(tensor)
