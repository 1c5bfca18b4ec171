"""One-shot magnitude pruning, and the top-k masks that every other method builds on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from powerprop.allocate import Layers, kept, settled_counts
from powerprop.kernel import kth_smallest
from powerprop.mask_entries import above, count, places
from powerprop.masks import Masks
from powerprop.select import Where, select
from powerprop.sparsify.calibrated import CRITERIA, prune_by_inputs
from powerprop.sparsify.pattern import check_pattern, check_rankable, convolutions, pattern_masks, sparsity_of

__all__ = ["magnitude_masks", "prune", "sparsity", "top_k", "top_k_masks", "warn_of_empty_layers"]


def top_k(score: Tensor, k: int) -> Tensor:
    """A boolean mask of exactly k entries with the largest scores; among equals the first in memory stay."""
    flat = score.detach().flatten()
    if not 0 <= k <= flat.numel():
        raise ValueError(f"k must be in [0, {flat.numel()}], got {k}")
    if k in (0, flat.numel()):
        return torch.full_like(score, bool(k), dtype=torch.bool)
    threshold = _kth_smallest(flat, flat.numel() - k - 1)  # the largest of those that go
    mask = above(flat, threshold)
    if missing := k - count(mask):
        check_rankable(flat)
        mask[places(flat == threshold)[:missing]] = True
    return mask.view(score.shape)


def _kth_smallest(flat: Tensor, k: int) -> Tensor:
    """The value at position k of the sorted scores; on a CPU by counting the floats' bits, in three passes over them.

    Without the kernel numpy's partition does it, ten times faster than torch's. It is slow again where many of the
    lowest are equal, as zeros and masked weights are: these are set aside first.
    """
    if flat.device.type != "cpu" or flat.dtype not in (torch.float32, torch.float64):
        wide = flat if flat.dtype == torch.float64 else flat.float()
        return wide.kthvalue(k + 1).values
    if (found := kth_smallest(flat, k)) is not None:
        return torch.tensor(found, dtype=flat.dtype)
    scores = flat.numpy()
    lowest = scores.min()
    higher = scores > lowest
    equal = scores.size - int(np.count_nonzero(higher))
    if 8 * equal > scores.size:
        scores, k = scores[np.flatnonzero(higher)], k - equal
    return torch.as_tensor(lowest if k < 0 else np.partition(scores, k)[k], dtype=flat.dtype)


def warn_of_empty_layers(
    weights: Mapping[str, Tensor], sparsity: float, distribution: str, layers: Layers | None, stacklevel: int
) -> None:
    """Warn of layers that keep no weight at all; which ones a global ranking empties is not known before it."""
    counts = settled_counts({n: w.shape for n, w in weights.items()}, sparsity, distribution, layers)
    for name in (n for n, keeps in counts.items() if keeps == 0 < weights[n].numel()):
        warnings.warn(
            f"{name!r} keeps none of its {weights[name].numel()} weights at sparsity={sparsity:g}, and nothing passes "
            f"through it; leave it some by layers={{{name!r}: ...}}",
            stacklevel=stacklevel + 1,
        )


def top_k_masks(
    scores: Mapping[str, Tensor], sparsity: float, distribution: str = "uniform", layers: Layers | None = None
) -> Masks:
    """The highest scores stay: layer by layer to the distribution's counts, or ranked all together (`global`)."""
    counts = settled_counts({n: s.shape for n, s in scores.items()}, sparsity, distribution, layers)
    try:
        ranked = _global({n: s for n, s in scores.items() if n not in counts}, sparsity)
        return Masks({n: top_k(s, counts[n]) if n in counts else ranked[n] for n, s in scores.items()})
    except FloatingPointError as error:
        broken = [n for n, s in scores.items() if s.isnan().any()]
        raise FloatingPointError(f"{', '.join(map(repr, broken))}: {error}") from None


def _global(scores: Mapping[str, Tensor], sparsity: float) -> dict[str, Tensor]:
    if not scores:
        return {}
    flat = torch.cat([s.detach().flatten() for s in scores.values()])
    mask = top_k(flat, kept(flat.numel(), sparsity))
    parts = torch.split(mask, [s.numel() for s in scores.values()])
    return {n: part.view(s.shape) for (n, s), part in zip(scores.items(), parts, strict=True)}


def magnitude_masks(
    model: nn.Module, sparsity: float, distribution: str = "uniform", layers: Layers | None = None,
    where: Where | None = None, pattern: str | None = None,
) -> Masks:  # fmt: skip
    """The masks that `prune` would apply: TopK(|θ|), nothing changed yet.

    Examples:
        >>> pp.magnitude_masks(model, 0.9)["0.weight"].float().mean()
        tensor(0.1000)
    """
    weights = select(model, where)
    if shapeless := [n for n, p in weights.items() if isinstance(p, UninitializedParameter)]:
        raise ValueError(f"{shapeless[0]!r} has no shape yet: run one forward pass first")
    scores = {n: p.detach().abs() for n, p in weights.items()}
    if pattern is not None:
        check_pattern(scores, pattern, layers, convolutions(model))
        return Masks(pattern_masks(scores, pattern, layers))
    return top_k_masks(scores, sparsity, distribution, layers)


def prune(
    model: nn.Module, sparsity: float | None = None, distribution: str = "uniform", layers: Layers | None = None,
    where: Where | None = None, pattern: str | None = None, criterion: str = "magnitude",
    data: Iterable[Any] | None = None,
) -> Masks:  # fmt: skip
    """One-shot pruning by magnitude (paper, section 3): θ ← θ ⊙ TopK(|θ|), in place; returns the masks.

    Whatever is refused (a wrong argument, a weight that is NaN, nothing chosen) leaves the model as it was.

    sparsity: fraction of the weights to remove, in [0, 1).
    distribution: "uniform" (every layer alike), "erk" (Erdős-Rényi-Kernel) or "global" (one ranking of all weights).
    layers: exceptions by name pattern, e.g. {"fc3.weight": half, "conv1.weight": 0.0, "fc.weight": at_most(0.8)}.
    where: which weights; by default all matrices and kernels that multiply inputs (see `powerprop.select`).
    pattern: "n:m", such as "2:4", instead of a sparsity: exactly n of every m weights along the inputs stay.
    criterion: "magnitude"; or of linear layers "wanda" (|W_ij|·‖X_j‖₂, each output by itself, Sun et al. 2023) or
        "sparsegpt" (by the inverse Hessian, which also moves the weights that stay, Frantar & Alistarh 2023), block by
        block with the inputs of the blocks already pruned. A layer keeps as many weights as magnitudes would leave it.
    data: for these two, a finite number of batches: inputs, (inputs, labels, …) or mappings of keywords, as Hugging
        Face's. Every position counts, padding too.

    Examples:
        >>> masks = pp.prune(model, 0.9, layers={"2.weight": pp.half})
        >>> round(pp.sparsity(model)["0.weight"], 2)
        0.9
    """
    if criterion != "magnitude" and criterion not in CRITERIA:
        raise ValueError(f"criterion must be one of magnitude, {', '.join(CRITERIA)}, got {criterion!r}")
    if (criterion in CRITERIA) != (data is not None):
        wants = "needs batches of data" if criterion in CRITERIA else "looks at no data"
        raise ValueError(f"criterion={criterion!r} {wants}, got data={data!r}")
    if (sparsity is None) == (pattern is None):
        raise ValueError(f"prune needs a sparsity or a pattern, one of them, got {sparsity!r} and {pattern!r}")
    if sparsity is None:
        sparsity = sparsity_of(str(pattern))
    masks = magnitude_masks(model, sparsity, distribution, layers, where, pattern)
    warn_of_empty_layers(masks, sparsity, distribution, layers, stacklevel=2)
    if data is not None:
        return prune_by_inputs(model, masks, criterion, data, pattern)
    masks.apply(model)
    return masks


class Sparsity(dict[str, float]):
    """Sparsity by layer, with that of all of them together as `total`; prints as a table."""

    total: float

    def __str__(self) -> str:
        width = max((len(n) for n in self), default=0)
        lines = [f"{n:<{width}}  {s:8.4%}" for n, s in self.items()]
        return "\n".join([*lines, f"{'all':<{width}}  {self.total:8.4%}"])


def sparsity(model: nn.Module, where: Where | None = None) -> Sparsity:
    """The fraction of weights that are exactly zero, per layer and in all (`.total`).

    Examples:
        >>> masks = pp.prune(model, 0.5)
        >>> pp.sparsity(model).total
        0.5
    """
    masks = Masks.nonzero(model, where)
    report = Sparsity({n: 1 - count(m) / max(1, math.prod(m.shape)) for n, m in masks.items()})
    report.total = masks.sparsity()
    return report
