"""How a sparsity budget is spread over layers: uniform, ERK (Erdős-Rényi-Kernel), global; counts are exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from numbers import Real

import torch

__all__ = [
    "DISTRIBUTIONS", "Layers", "apportion", "at_most", "check_sparsity", "erk", "half", "layer_counts", "overrides",
    "settled_counts", "uniform",
]  # fmt: skip

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
    """Half the asked sparsity: the paper's rule for the output layer on MNIST and CIFAR-10 (table 4).

    Examples:
        >>> pp.half(0.9)
        0.45
    """
    return sparsity / 2


def at_most(limit: float) -> Callable[[float], float]:
    """The asked sparsity, but no more than limit: 0.8 is the rule for ResNet-50's last layer (appendix C).

    Examples:
        >>> pp.at_most(0.8)(0.95), pp.at_most(0.8)(0.5)
        (0.8, 0.5)
    """
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


def layer_counts(
    shapes: Shapes, sparsity: float, distribution: str = "uniform", layers: Layers | None = None
) -> dict[str, int]:
    """Kept weights per layer. The asked sparsity is that of the layers that have no rule of their own in `layers`."""
    spread = {"uniform": uniform, "erk": erk}
    if distribution not in tuple(spread):
        raise ValueError(f"distribution must be one of {', '.join(spread)} here, got {distribution!r}")
    sparsity = check_sparsity(sparsity)
    fixed = overrides(shapes, sparsity, layers)
    counts = spread[distribution]({n: s for n, s in shapes.items() if n not in fixed}, sparsity)
    return {n: fixed.get(n, counts.get(n, 0)) for n in shapes}


def settled_counts(shapes: Shapes, sparsity: float, distribution: str, layers: Layers | None) -> dict[str, int]:
    """Kept weights of the layers for which they are settled: with "global" only those that have a rule of their own."""
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution must be one of {', '.join(DISTRIBUTIONS)}, got {distribution!r}")
    if distribution == "global":
        return overrides(shapes, check_sparsity(sparsity), layers)
    return layer_counts(shapes, sparsity, distribution, layers)


def uniform(shapes: Shapes, sparsity: float) -> dict[str, int]:
    """Every layer keeps the same fraction of its weights."""
    return {n: kept(math.prod(s), sparsity) for n, s in shapes.items()}


def erk(shapes: Shapes, sparsity: float) -> dict[str, int]:
    """Erdős-Rényi-Kernel: density_l = ε·Σdims/Πdims, ε such that the asked sparsity is met exactly.

    Layers that would exceed density 1 become dense and ε is solved again for the rest (Evci et al. 2020, section 3).
    A layer without any weight (a size of 0) has none to keep.
    """
    sizes = {n: math.prod(s) for n, s in shapes.items()}
    weights = {n: float(sum(s)) if sizes[n] else 0.0 for n, s in shapes.items()}
    return apportion(kept(sum(sizes.values()), sparsity), weights, sizes)


def apportion(total: int, weights: Mapping[str, float], room: Mapping[str, int]) -> dict[str, int]:
    """Whole numbers that sum to total, in proportion to the weights as far as there is room, by largest remainders.

    What a full layer cannot take goes to the others, in proportion again; weights that are all zero mean the room.
    """
    if total > sum(room.values()):
        raise ValueError(f"{total} weights to place, but there is room for {sum(room.values())}")
    if not math.isfinite(sum(weights.values())):
        raise FloatingPointError(f"shares must be finite numbers, got {dict(weights)}")
    exact = _proportional(total, weights, room)
    counts = {n: min(room[n], int(x + 1e-9)) for n, x in exact.items()}
    missing = total - sum(counts.values())
    for name in sorted(counts, key=lambda n: counts[n] - exact[n]):
        more = min(room[name] - counts[name], 1, missing)
        counts[name] += more
        missing -= more
    return counts


def _proportional(total: int, weights: Mapping[str, float], room: Mapping[str, int]) -> dict[str, float]:
    full: set[str] = set()
    while True:
        free = total - sum(room[n] for n in full)
        rest = {n: w for n, w in weights.items() if n not in full}
        rest = rest if sum(rest.values()) > 0 else {n: float(room[n]) for n in rest}
        scale = sum(rest.values()) or 1.0
        exact = {n: free * w / scale for n, w in rest.items()}
        over = {n for n in rest if exact[n] > room[n]}
        if not over:
            return {n: exact.get(n, float(room[n])) for n in weights}
        full |= over
