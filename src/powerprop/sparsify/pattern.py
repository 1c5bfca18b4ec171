"""n:m patterns: exactly n of every m weights along the inputs stay, as sparse tensor cores want it (2:4)."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from powerprop.allocate import Layers, overrides
from powerprop.mask_entries import count

__all__ = ["check_pattern", "check_rankable", "convolutions", "fill", "pattern_masks", "pattern_of", "sparsity_of"]


def pattern_of(pattern: str) -> tuple[int, int]:
    """ "2:4" -> (2, 4); anything else than n:m with 0 < n < m is an error."""
    found = re.fullmatch(r"(\d+):(\d+)", pattern) if isinstance(pattern, str) else None
    n, m = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < n < m:
        raise ValueError(f"pattern must be n:m with 0 < n < m, such as '2:4', got {pattern!r}")
    return n, m


def sparsity_of(pattern: str) -> float:
    """The sparsity of a pattern: 2:4 is 0.5."""
    n, m = pattern_of(pattern)
    return 1 - n / m


def convolutions(model: nn.Module) -> set[str]:
    """The names of the weights of convolutions, whose inputs are dimension 1 of three or more."""
    layers = {f"{n}.weight".lstrip("."): m for n, m in model.named_modules() if isinstance(m, _ConvNd)}
    return {name for name, layer in layers.items() if not layer.transposed}


def check_pattern(
    weights: Mapping[str, Tensor], pattern: str, layers: Layers | None, kernels: Container[str] | None = None
) -> set[str]:
    """The weights that stay dense (`layers` says 0.0); an error that names a weight which no pattern fits.

    kernels: the names of convolutions' weights, if it is known; others of three dimensions (experts in one tensor, say)
        do not tell which of them the inputs are.
    """
    _, m = pattern_of(pattern)
    own = overrides({n: w.shape for n, w in weights.items()}, sparsity_of(pattern), layers)
    for name, kept in own.items():
        if kept != weights[name].numel():
            raise ValueError(f"with pattern={pattern!r} a layer follows it or is dense (0.0); layers asks for {name!r}")
    for name in (n for n in weights if n not in own):
        if kernels is not None and weights[name].dim() > 2 and name not in kernels:
            raise ValueError(
                f"pattern={pattern!r} groups weights along the inputs, and {name!r} of shape "
                f"{tuple(weights[name].shape)} is no convolution's, so that nothing says which dimension they are; "
                f"leave it dense by layers={{{name!r}: 0.0}}"
            )
        inputs = weights[name].shape[1] if weights[name].dim() > 1 else 0
        if inputs == 0 or inputs % m:
            raise ValueError(
                f"pattern={pattern!r} needs a multiple of {m} inputs, {name!r} has shape {tuple(weights[name].shape)}; "
                f"leave it dense by layers={{{name!r}: 0.0}}"
            )
    return set(own)


def pattern_masks(scores: Mapping[str, Tensor], pattern: str, layers: Layers | None = None) -> dict[str, Tensor]:
    """The n highest scores of every m inputs; layers with a rule of 0.0 stay dense."""
    dense = check_pattern(scores, pattern, layers)
    nothing = {n: torch.zeros_like(s, dtype=torch.bool) for n, s in scores.items()}
    return {n: ~nothing[n] if n in dense else fill(nothing[n], s, pattern) for n, s in scores.items()}


def fill(kept: Tensor, score: Tensor, pattern: str) -> Tensor:
    """Add the highest scores to a mask until n of every m inputs (along dimension 1) are kept; no more than n may be.

    Among equals the first stay, so that masks do not depend on the machine.
    """
    n, m = pattern_of(pattern)
    rank = _groups(score.detach(), m)
    check_rankable(rank)
    wide = rank.float() if rank.dtype in (torch.float16, torch.bfloat16) else rank
    ranked = wide.masked_fill(_groups(kept, m), float("inf")).argsort(dim=-1, descending=True, stable=True)
    mask = torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, ranked[..., :n], True)
    return mask.flatten(-2).movedim(-1, 1)


def check_rankable(scores: Tensor) -> None:
    """An error for scores that cannot be ranked."""
    if nans := count(scores != scores):  # isnan is slower
        raise FloatingPointError(f"scores must be finite numbers to rank them, got {nans} NaN")


def _groups(tensor: Tensor, m: int) -> Tensor:
    """(outputs, inputs, ...) -> (outputs, ..., inputs / m, m)"""
    last = tensor.movedim(1, -1)
    return last.reshape(*last.shape[:-1], -1, m)
