"""How a sparsity budget is spread over layers: uniform, ERK (Erdős-Rényi-Kernel), global; counts are exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from numbers import Real

import torch

__all__ = ["DISTRIBUTIONS", "Layers", "at_most", "check_sparsity", "erk", "half", "overrides", "uniform"]

Layers = Mapping[str, float | Callable[[float], float]]
"""Exceptions by name pattern: a layer's own sparsity, or a function of the asked one."""

Shapes = Mapping[str, torch.Size | tuple[int, ...]]

DISTRIBUTIONS = ("uniform", "erk", "global")


def check_sparsity(sparsity: float, name: str = "") -> float:
    """The sparsity as a float in [0, 1), or an error that repeats it."""
    where = f" for {name!r}" if name else ""
    if isinstance(sparsity, bool) or not isinstance(sparsity, Real):
        raise TypeError(f"sparsity must be a number in [0, 1), got {sparsity!r}{where}")
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must be in [0, 1), got {sparsity!r}{where}")
    return float(sparsity)


def half(sparsity: float) -> float:
    """Half the asked sparsity: the paper's rule for the output layer on MNIST and CIFAR-10 (table 4)."""
    return sparsity / 2


def at_most(limit: float) -> Callable[[float], float]:
    """The asked sparsity, but no more than limit: 0.8 is the rule for ResNet-50's last layer (appendix C)."""
    check_sparsity(limit)
    return partial(min, limit)  # unlike a lambda, it can be pickled with its method


def kept(count: int, sparsity: float) -> int:
    """How many of count weights stay at this sparsity."""
    return count - round(count * sparsity)


def overrides(shapes: Shapes, sparsity: float, layers: Layers | None) -> dict[str, int]:
    """Kept counts of the layers that have a rule of their own; the last matching pattern wins."""
    fixed: dict[str, int] = {}
    if not isinstance(layers or {}, Mapping):
        raise TypeError(f"layers must map name patterns to sparsities, e.g. {{'fc.weight': 0.5}}, got {layers!r}")
    for pattern, rule in (layers or {}).items():
        names = [n for n in shapes if fnmatchcase(n, pattern)]
        if not names:
            raise ValueError(f"layers={pattern!r} matches no weight; there are {', '.join(shapes)}")
        for name in names:
            own = check_sparsity(rule(sparsity) if callable(rule) else rule, name)
            fixed[name] = kept(math.prod(shapes[name]), own)
    return fixed


def uniform(shapes: Shapes, sparsity: float) -> dict[str, int]:
    """Every layer keeps the same fraction of its weights."""
    return {n: kept(math.prod(s), sparsity) for n, s in shapes.items()}


def erk(shapes: Shapes, sparsity: float) -> dict[str, int]:
    """Erdős-Rényi-Kernel: density_l = ε·Σdims/Πdims, ε such that the asked sparsity is met exactly.

    Layers that would exceed density 1 become dense and ε is solved again for the rest (Evci et al. 2020, section 3).
    A layer without any weight (a size of 0) has none to keep.
    """
    sizes = {n: math.prod(s) for n, s in shapes.items()}
    score = {n: sum(s) / sizes[n] if sizes[n] else 0.0 for n, s in shapes.items()}
    budget = kept(sum(sizes.values()), sparsity)
    dense: set[str] = set()
    while True:
        rest = [n for n in shapes if n not in dense]
        free = budget - sum(sizes[n] for n in dense)
        epsilon = free / max(1e-30, sum(score[n] * sizes[n] for n in rest))
        top = max((score[n] for n in rest), default=0.0)
        full = {n for n in rest if score[n] == top and epsilon * score[n] > 1}
        if not full:
            return _round({n: 1.0 if n in dense else epsilon * score[n] for n in shapes}, sizes, budget)
        dense |= full


def _round(density: Mapping[str, float], sizes: Mapping[str, int], budget: int) -> dict[str, int]:
    """Whole numbers of weights that sum to the budget: floors, then the largest remainders."""
    exact = {n: density[n] * sizes[n] for n in sizes}
    counts = {n: min(sizes[n], math.floor(exact[n] + 1e-9)) for n in sizes}
    by_remainder = sorted(sizes, key=lambda n: counts[n] - exact[n])
    for name in by_remainder[: max(0, budget - sum(counts.values()))]:
        counts[name] += 1
    return counts
