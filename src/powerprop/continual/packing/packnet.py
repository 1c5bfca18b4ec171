"""PackNet and EfficientPackNet: which weights does a task keep?"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.continual.optimiser import OptimizerFactory
from powerprop.continual.packing.base import Packing
from powerprop.continual.packing.search import GRID, SEARCHES, check_grid, sparsest
from powerprop.continual.packing.subnets import Weights
from powerprop.continual.packing.taylor import loss_increase, removal_costs
from powerprop.continual.source import Source
from powerprop.masks import Masks
from powerprop.sparsify.prune import top_k, top_k_masks

__all__ = ["EfficientPackNet", "PackNet"]

TAYLOR_BATCHES = 16
"""Batches of training data for the Taylor estimate."""


class PackNet(Packing):
    """Every task gets the same share of the weights (Mallya & Lazebnik, 2018).

    Of each layer, 1/T of the weights: the largest among those that no earlier task uses. The sub-network of a task has
    these and the weights of all tasks before it. The rest is pruned and the share trained again. Where T does not
    divide the n weights of a layer, ⌊(t + 1)n/T⌋ of them are in use after task t, so that none is left over.

    total_tasks: the number of tasks T, which must be known; every layer needs as many weights.
    Further arguments are those of `Packing`.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("total_tasks",)
    FIXED: ClassVar[tuple[str, ...]] = ("total_tasks",)
    open_ended: ClassVar[bool] = False

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, total_tasks: int, **options: Any
    ) -> None:
        super().__init__(model, optimizer, **options)
        if total_tasks < 1:
            raise ValueError(f"total_tasks must be at least 1, got {total_tasks}")
        for name, master in self.nets.masters.items():
            if total_tasks > (weights := master.param.numel()):
                most = f"{weights}, the number of weights of {name!r}"
                raise ValueError(f"total_tasks must be at most {most}, got {total_tasks}")
        self.total_tasks = total_tasks

    def begin_task(self) -> None:
        """There is a share for every task that was announced, and for no other."""
        if self.current >= self.total_tasks:
            text = f"PackNet was made for total_tasks={self.total_tasks}, got one more"
            raise ValueError(f"{text}: no weights are left for it")
        super().begin_task()

    def choose_masks(self, data: Source, validation: Source) -> Masks:
        """The task's share of every layer, and all weights of earlier tasks."""
        free = self.nets.masks.free()
        theta = {n: m.theta().abs() for n, m in self.nets.masters.items()}
        return ~free | Masks({n: top_k(t.masked_fill(~free[n], -1.0), self._count(t)) for n, t in theta.items()})

    def _count(self, weight: Tensor) -> int:
        """What the current task gets of a weight: the shares of all tasks add up to the whole."""
        before, after = (t * weight.numel() // self.total_tasks for t in (self.current, self.current + 1))
        return after - before


class EfficientPackNet(Packing):
    """Every task gets as few weights as it needs, and may use those of any task before it (paper, Algorithm 1).

    After training with all weights, the largest of *all* weights are kept: as few as keep γ of the validation
    performance, which is the objective's score. They are trained again where no earlier task uses them, then protected
    for good; the weights that no task uses are drawn anew. Search, retraining and protection are those of the paper in
    the order mask → retrain → protect → re-initialise.

    gamma: fraction of the performance that a sub-network must keep before it is retrained; None takes the sparsest of
        the grid without looking.
    search: "linear" (the paper's), "binary" or "taylor", which estimates the loss first and then looks nearby.
    grid: kept fractions to choose from, dense first.
    distribution: "global" ranks all weights together, "uniform" keeps the same fraction of each layer.
    Further arguments are those of `Packing`.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("gamma", "search", "grid", "distribution")

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory | Optimizer,
        *,
        gamma: float | None = 0.95,
        search: Literal["linear", "binary", "taylor"] = "binary",
        grid: Sequence[float] = GRID,
        distribution: Literal["global", "uniform"] = "global",
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, **options)
        if gamma is not None and not 0 < gamma <= 1:
            raise ValueError(f"gamma must be in (0, 1], got {gamma}")
        if search not in SEARCHES:
            raise ValueError(f"search must be one of {', '.join(SEARCHES)}, got {search!r}")
        if distribution not in ("global", "uniform"):
            raise ValueError(f"distribution must be 'global' or 'uniform', got {distribution!r}")
        self.gamma, self.search, self.distribution, self.grid = gamma, search, distribution, check_grid(grid)
        self.tolerated, self.evaluations = gamma or 1.0, 0

    def choose_masks(self, data: Source, validation: Source) -> Masks:
        """The sparsest masks of the grid that keep γ of the validation performance, by the chosen search."""
        scores = {n: m.theta().abs() for n, m in self.nets.masters.items()}
        dense = self._dense
        if self.gamma is None:
            return self._kept(scores, self.grid[-1])
        if dense is None:
            raise ValueError("EfficientPackNet chooses by the performance on data: say end(loader), or gamma=None")

        def performance(kept: float) -> float:
            return self.performance(self.nets.masked(self._kept(scores, kept)), validation)

        guess = self._guess(scores, data, dense) if self.search == "taylor" else None
        found = sparsest(performance, dense, self.grid, self.gamma, self.search, guess)
        self.evaluations = found.evaluations
        if found.place < 0:
            short = f"{self.name}: no sub-network of {self.grid[0]:.0%} of the weights or fewer keeps"
            warnings.warn(f"{short} {self.gamma:g} of the performance {dense:.4f}; the densest is taken", stacklevel=2)
        return self._kept(scores, self.grid[max(found.place, 0)])

    def _kept(self, scores: Weights, kept: float) -> Masks:
        return self.nets.masks.complete(top_k_masks(scores, 1 - kept, self.distribution))

    def _guess(self, scores: Weights, data: Source, dense: float) -> int:
        """The sparsest fraction whose estimated loss stays below what the lost performance is worth.

        A performance that falls by a share of itself is taken for a loss that rises by the same share of its size at
        chance; the search around the guess makes up for what this leaves out.
        """
        assert self.gamma is not None
        weights = {n: m.param for n, m in self.nets.masters.items()}
        with torch.enable_grad():
            costs = removal_costs(weights, self._losses(islice(data, TAYLOR_BATCHES)))
        increase = loss_increase(costs, scores, self.grid, self.distribution != "global")
        allowed = (1 - self.gamma) * max(abs(dense), math.log(2))
        return sum(1 for value in increase if value <= allowed) - 1

    def _losses(self, batches: Iterator[Any]) -> Iterator[tuple[Tensor, int]]:
        for batch in batches:
            loss = self.objective.loss(self.bound(self.current), batch, self.current)
            yield loss, len(self.objective.inputs(batch))
