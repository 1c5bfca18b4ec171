"""FLOPs of the cells: what a training of each costs, relative to dense training of a single length."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from powerprop.experiments.imagenet.cells import Cell
from powerprop.experiments.sparse.costs import training_cost
from powerprop.experiments.sparse.rows import ROWS
from powerprop.flops import count_flops, layer_densities

STEPS = 32_000
"""Of a cycle; what a step costs does not depend on it."""


class Costs:
    """Of a network that sees `size` x `size` pictures."""

    def __init__(self, model: nn.Module, size: int) -> None:
        self.model, self.flops = model, count_flops(model, (3, size, size))

    def densities(self, this: Cell, sparsity: float) -> dict[str, float]:
        """The fraction kept of each layer at this sparsity, by the cell's distribution and exceptions."""
        return layer_densities(self.model, sparsity, this.distribution, this.rules)

    def inference(self, kept: Mapping[str, float]) -> float:
        """A forward pass with these fractions kept."""
        return self.flops.inference(kept)

    def training(self, this: Cell, kept: Mapping[str, float] | None = None, sparse_stem: bool = False) -> float:
        """The whole training of a cell.

        kept: the measured fractions; by default those that its distribution gives.
        sparse_stem: count the first convolution as if it were pruned like the others.
        """
        row = ROWS[this.row]
        density = dict(kept or self.densities(this, this.sparsity))
        if sparse_stem:
            density["conv1.weight"] = 1 - this.sparsity
        method = row.make(this.sparsity, this.distribution, STEPS, this.rules, seed=0)
        explores = method is not None and method.explores
        backward = self.densities(this, min(row.backward, this.sparsity)) if explores else None
        return this.times * training_cost(self.flops, method, density, backward)
