"""FLOPs of a whole training, relative to a dense one of the same length."""

from __future__ import annotations

from powerprop.flops import Density, Flops
from powerprop.sparsify.base import Method
from powerprop.sparsify.iterative import IterativePruning


def training_cost(flops: Flops, method: Method | None, density: Density, backward: Density | None = None) -> float:
    """The mean over all steps; a method that prunes gradually is dense at first.

    method: None is dense training, whatever is pruned after it.
    density: of the weights in use, at the end.
    backward: of those that get a gradient, where a method tells these apart.
    """
    if method is None:
        return 1.0
    if isinstance(method, IterativePruning):
        return flops.gradual(density)
    return flops.training(method, density, backward if method.explores else None)
