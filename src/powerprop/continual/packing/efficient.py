"""EfficientPackNet: every task keeps as few weights as it needs (paper, Algorithm 1), and two ways to need fewer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.continual.data import Source, count_rows
from powerprop.continual.packing.packnet import NEARLY_FULL, Packing
from powerprop.continual.packing.subnetworks import Weights
from powerprop.continual.packing.supermasks import FrozenSupermask
from powerprop.continual.strategy import OptimizerFactory, Progress, check_among, check_least
from powerprop.mask_entries import count
from powerprop.masks import Masks
from powerprop.sparsify.prune import top_k, top_k_masks

__all__ = [
    "FINE", "GRID", "SEARCHES", "EfficientPackNet", "Found", "around", "binary", "check_grid", "linear",
    "loss_increase", "removal_costs", "sparsest",
]  # fmt: skip

GRID: tuple[float, ...] = (
    0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15,
    0.14, 0.13, 0.12, 0.11, 0.1, 0.09, 0.08, 0.07, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01,
)  # fmt: skip
"""The kept fractions that the paper searches (appendix, hyper-parameters of Permuted- and Split-MNIST)."""

SEARCHES = ("linear", "binary", "taylor")
FINE: tuple[float, ...] = (*GRID, 0.008, 0.006, 0.005, 0.004, 0.003, 0.0025, 0.002, 0.0015, 0.001, 0.0007, 0.0005)
"""The paper's grid and beyond, for sub-networks of a fraction of a percent."""
Passes = Callable[[int], bool]


class Found(NamedTuple):
    """What a search found: the place of a fraction in the grid (-1 if none passes), and what it took."""

    place: int
    evaluations: int


def sparsest(
    performance: Callable[[float], float], dense: float, grid: Sequence[float], gamma: float, search: str = "binary",
    guess: int | None = None,
) -> Found:  # fmt: skip
    """The sparsest fraction of the grid that keeps γ of the dense performance (paper, Algorithm 1, lines 7-11).

        the last s on the way from dense to sparse with P_s > γP

    performance: P_s of the network with this fraction of its weights kept; higher is better.
    dense: P, with all of them. Where it is negative, as a log-likelihood is, γ = 0.95 means that it may fall by 5% of
        its size: P_s > (2 - γ)P.
    search: "linear" (the paper's), "binary", or "taylor", which looks around a guess.
    guess: a place in the grid.

    Examples:
        >>> found = continual.sparsest(lambda kept: 0.99 if kept >= 0.1 else 0.5, 0.99, continual.GRID, gamma=0.95)
    """
    check_among(search=(search, SEARCHES))
    asked = 0
    least = dense * (gamma if dense >= 0 else 2 - gamma)

    def passes(i: int) -> bool:
        nonlocal asked
        asked += 1
        found = performance(grid[i])
        return found > least or found >= dense

    if search == "taylor" and guess is not None:
        place = around(passes, len(grid), guess)
    else:
        place = (linear if search == "linear" else binary)(passes, len(grid))
    return Found(place, asked)


def check_grid(grid: Sequence[float]) -> tuple[float, ...]:
    """Kept fractions in (0, 1], dense first, or an error that repeats them."""
    values = tuple(float(kept) for kept in grid)
    falling = all(a > b for a, b in pairwise(values))
    if not values or not falling or not 0 < values[-1] <= values[0] <= 1:
        raise ValueError(f"grid must be falling fractions of weights kept in (0, 1], got {list(grid)}")
    return values


def linear(passes: Passes, count: int) -> int:
    """From dense to sparse until one fails (the paper's Algorithm 1)."""
    for i in range(count):
        if not passes(i):
            return i - 1
    return count - 1


def binary(passes: Passes, count: int) -> int:
    """Bisection: never more than ⌈log2(count + 1)⌉ evaluations."""
    return _between(passes, -1, count)


def around(passes: Passes, count: int, guess: int) -> int:
    """From a guess outwards in growing strides, then bisection: few evaluations if the guess is near."""
    guess = min(max(guess, 0), count - 1)
    stride = 1
    if passes(guess):
        low = guess
        while low + stride < count and passes(low + stride):
            low, stride = low + stride, 2 * stride
        return _between(passes, low, min(low + stride, count))
    high = guess
    while high - stride > -1 and not passes(high - stride):
        high, stride = high - stride, 2 * stride
    return _between(passes, max(high - stride, -1), high)


def _between(passes: Passes, low: int, high: int) -> int:
    """The last that passes, where `low` is known to pass (or -1) and `high` to fail (or to be the end)."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def removal_costs(weights: Mapping[str, nn.Parameter], losses: Iterable[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """The estimated increase of the loss if a weight is set to zero: c = -∂L/∂θ·θ + ½ F·θ² (LeCun et al., 1990).

    F, the diagonal of the Fisher information, is the variance of the gradient from input to input: that of the mean
    gradient from batch to batch, times the size of a batch. It needs nothing of the loss but its gradient.

    losses: the loss of some batches, and how many inputs each has.
    """
    names, parameters = list(weights), list(weights.values())
    total, square = ({n: torch.zeros_like(p) for n, p in weights.items()} for _ in range(2))
    count, size = 0, 0
    for loss, inputs in losses:
        for name, g in zip(names, torch.autograd.grad(loss, parameters, materialize_grads=True), strict=True):
            total[name] += g
            square[name].addcmul_(g, g)
        count, size = count + 1, size + inputs
    each, between = 1 / max(1, count), size / max(1, count) / max(1, count - 1)
    costs = {}
    for name, p in weights.items():
        fisher = (square[name] - total[name].square() * each).clamp_(min=0).mul_(between)
        costs[name] = 0.5 * fisher * p.detach() ** 2 - total[name] * each * p.detach()
    return costs


def loss_increase(
    costs: Mapping[str, Tensor], scores: Mapping[str, Tensor], kept: Sequence[float], layerwise: bool
) -> list[float]:
    """The estimated increase of the loss for each fraction kept: the costs of the weights of lowest score, summed."""
    names = [[n] for n in costs] if layerwise else [list(costs)]
    total = [0.0] * len(kept)
    for group in names:
        score = torch.cat([scores[n].detach().flatten() for n in group])
        cost = torch.cat([costs[n].flatten() for n in group])
        removed = cost[score.argsort()].double().cumsum(0)
        for i, fraction in enumerate(kept):
            dropped = len(removed) - math.ceil(fraction * len(removed))
            total[i] += float(removed[dropped - 1]) if dropped else 0.0
    return total


TAYLOR_BATCHES = 16
"""Batches of training data for the Taylor estimate."""
LEAST_FREE = {"all": NEARLY_FULL, "output": 0.1}
"""With less of a layer free, tasks came out spoiled: 784-64-64-10 at 10% of its second layer."""


class EfficientPackNet(Packing):
    """Every task gets as few weights as it needs, and may use those of any task before it (paper, Algorithm 1).

    After training with all weights, the largest of *all* weights are kept: as few as keep γ of the validation
    performance, which is the objective's score. They are trained again where no earlier task uses them, then protected
    for good; the weights that no task uses are drawn anew. Search, retraining and protection are those of the paper in
    the order mask → retrain → protect → re-initialise.

    gamma: fraction of the performance that a sub-network must keep before it is retrained; None takes the sparsest of
        the grid without looking.
    search: "linear" (the paper's), "binary" or "taylor", which estimates the loss first and then looks nearby.
    grid: kept fractions to choose from, dense first; by default the paper's, with `reuse="output"` a finer one.
    distribution: "global" ranks all weights together, "uniform" keeps the same fraction of each layer.
    prunings: how often a sub-network is pruned further inside the retraining budget, `pruning_steps` apart: fewer of
        its own weights against the same performance, until none passes. 0 prunes at once, as the paper does.
    reuse: which weights of earlier tasks take part while a new one is trained: "all", as in the paper, or those of the
        "output" layer alone. Then a task takes only free weights elsewhere, and far fewer of them if pruned gradually.
    output: name of the output layer's weight; by default the last one, if it is shared. Heads are no part of it.
    max_layer_fraction: of a layer's weights that one task may take for itself at most; with T tasks to come, 1/T.
    when_full: what a task does that begins when too little of a layer is free, the output layer apart. "masks" learns
        which of the frozen weights to use and trains none (`FrozenSupermask`), so that a sequence never has to end;
        such a task costs one bit for each weight. "train" goes on with what is free, as in the paper; "error" refuses.
    least_free: the fraction of a layer that must be free for a task to be trained; by default 1%, and 10% with
        `reuse="output"`, where the free weights alone must carry a task while it is trained.
    Further arguments are those of `Packing`.

    Examples:
        >>> learner = continual.EfficientPackNet(model, sgd, alpha=1.375, gamma=0.9, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    task_state: ClassVar[tuple[str, ...]] = ("_supermask",)

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, gamma: float | None = 0.95,
        search: Literal["linear", "binary", "taylor"] = "binary", grid: Sequence[float] | None = None,
        distribution: Literal["global", "uniform"] = "global", prunings: int = 0, pruning_steps: int = 100,
        reuse: Literal["all", "output"] = "all", output: str | None = None, max_layer_fraction: float = 1.0,
        when_full: Literal["masks", "train", "error"] = "masks", least_free: float | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, optimizer, **options)
        if gamma is not None and not 0 < gamma <= 1:
            raise ValueError(f"gamma must be in (0, 1], got {gamma}")
        check_among(
            search=(search, SEARCHES), distribution=(distribution, ("global", "uniform")),
            reuse=(reuse, tuple(LEAST_FREE)), when_full=(when_full, ("masks", "train", "error")),
        )  # fmt: skip
        if least_free is not None and not 0 <= least_free <= 1:
            raise ValueError(f"least_free must be in [0, 1], a fraction of a layer's weights, got {least_free}")
        if not 0 < max_layer_fraction <= 1:
            raise ValueError(f"max_layer_fraction must be in (0, 1], got {max_layer_fraction}")
        check_least(prunings=(prunings, 0), pruning_steps=(pruning_steps, 1))
        if prunings * pruning_steps > self.retrain_steps:
            text = f"{prunings} prunings {pruning_steps} steps apart"
            raise ValueError(f"{text} do not fit into retrain_steps={self.retrain_steps}")
        self.gamma, self.search, self.distribution = gamma, search, distribution
        self.max_layer_fraction = max_layer_fraction
        self.prunings, self.pruning_steps, self.reuse, self.when_full = prunings, pruning_steps, reuse, when_full
        self.least_free = LEAST_FREE[reuse] if least_free is None else least_free
        self.grid = check_grid(grid if grid is not None else GRID if reuse == "all" else FINE)
        if output is not None and output not in self.nets.masters:
            raise ValueError(f"output must be one of {', '.join(self.nets.masters)}, got {output!r}")
        self.output = output if output is not None or self.heads is not None else list(self.nets.masters)[-1]
        self.tolerated, self.evaluations = gamma or 1.0, 0

    # --- when no weight is free ---------------------------------------------------------------------------------

    def begin_task(self) -> None:
        """The free weights are trained; where a layer has none left, a mask over the frozen ones is."""
        full = sorted(self.full_layers(self.least_free) - ({self.output} if len(self.nets.masters) > 1 else set()))
        if not full or self.when_full == "train":
            super().begin_task()
            return
        text = f"{self.name}: fewer than {self.least_free:.0%} of the weights of {', '.join(full)} are free"
        if self.when_full == "error":
            raise RuntimeError(f"{text}; with when_full='masks' a task learns which of the frozen ones to use")
        if not self.nets.masks.chosen:
            warnings.warn(f"{text}; from now on a task learns a mask over the frozen ones, and no weight", stacklevel=2)
        self._chosen = self._dense = None
        self.nets.open_frozen(self.current)
        self._supermask = FrozenSupermask(self.nets, ~self.nets.masks.free(), self.generator("scores"))

    def prune(self, data: Any = None, validation: Any = None) -> None:
        """Choose the weights of the task in hand; a task that learns a mask does nothing else all the time."""
        if self._supermask is None:
            super().prune(data, validation)
        else:
            now = self._open("prune")
            now.phase, now.step = "retraining", 0

    def end_task(self, data: Source, validation: Source, progress: Progress | None) -> None:
        """Find the sub-network, retrain it, protect it; a mask is learned for as many steps."""
        if self._supermask is None:
            super().end_task(data, validation, progress)
            return
        if self.now is not None and self.now.phase == "training" and self.retrain_steps and not data.missing:
            self.train(data, self.retrain_steps, progress, "retraining")
            self.model.eval()
        masks = self._supermask.chosen()
        self._end_supermask()
        self.nets.pack_chosen(masks, self._sample(data, validation))

    # --- which weights take part --------------------------------------------------------------------------------

    def visible(self) -> Masks | None:
        """While a task is trained: all weights, or the free ones and the output layer."""
        if self.reuse == "all":
            return None
        free = self.nets.masks.free()
        return Masks({n: torch.ones_like(mask) if n == self.output else mask for n, mask in free.items()})

    def choose_masks(self, data: Source, validation: Source) -> Masks:
        """The sparsest masks of the grid that keep γ of the validation performance, by the chosen search."""
        scores = {n: m.theta().abs() for n, m in self.nets.masters.items()}
        if self.gamma is None:
            return self._kept(scores, self.grid[-1])
        dense = self._dense
        if dense is None:
            raise ValueError("EfficientPackNet chooses by the performance on data: say end(loader), or gamma=None")

        def performance(kept: float) -> float:
            return self.performance(self.nets.masked(self._kept(scores, kept)), validation)

        guess = self._guess(scores, data, dense) if self.search == "taylor" and self._chosen is None else None
        grid = self.grid if self._chosen is None else GRID
        found = sparsest(performance, dense, grid, self.gamma, self.search, guess)
        self.evaluations = found.evaluations
        if found.place >= 0:
            return self._kept(scores, grid[found.place])
        if self._chosen is not None:
            return self._chosen
        short = f"{self.name}: no sub-network of {grid[0]:.0%} of the weights or fewer keeps"
        warnings.warn(f"{short} {self.gamma:g} of the performance {dense:.4f}; the densest is taken", stacklevel=2)
        return self._kept(scores, grid[0])

    def prune_on(self, data: Source, validation: Source, progress: Progress | None) -> int:
        """Some steps, then fewer weights, again and again, until fewer do not keep the performance."""
        for done in range(1, self.prunings + 1):
            self.train(data, self.pruning_steps, progress, "pruning")
            before = self._chosen
            self.prune(data, validation)
            if self._chosen == before:
                return done * self.pruning_steps
        return self.prunings * self.pruning_steps

    def _kept(self, scores: Weights, kept: float) -> Masks:
        """The masks that keep a fraction: of all weights at first, of the task's own when it is pruned further."""
        free = self.nets.masks.free()
        if self._chosen is not None:
            own = self._chosen & free
            return self._capped(_largest(scores, own, math.ceil(kept * own.count())), scores) | (self._chosen - free)
        if self.reuse == "output":
            chosen = _largest(scores, free, min(free.count(), math.ceil(kept * free.numel())))
            used = Masks({n: ~mask if n == self.output else torch.zeros_like(mask) for n, mask in free.items()})
            return self._capped(chosen, scores) | used
        masks = self.nets.masks.complete(top_k_masks(scores, 1 - kept, self.distribution))
        return masks if self.max_layer_fraction == 1 else self._capped(masks & free, scores) | (masks - free)

    def _capped(self, own: Masks, scores: Weights) -> Masks:
        """No more weights of a layer than the share of one task; the largest stay."""
        most = {n: math.ceil(self.max_layer_fraction * mask.numel()) for n, mask in own.items()}
        over = {n for n, mask in own.items() if count(mask) > most[n]}
        return Masks({n: top_k(scores[n].masked_fill(~m, -1), most[n]) if n in over else m for n, m in own.items()})

    # --- the Taylor estimate ------------------------------------------------------------------------------------

    def _guess(self, scores: Weights, data: Source, dense: float) -> int:
        """The sparsest fraction whose estimated loss stays below what the lost performance is worth.

        A performance that falls by a share of itself is taken for a loss that rises by the same share of its size at
        chance; the search around the guess makes up for what this leaves out.
        """
        assert self.gamma is not None
        weights = {n: m.param for n, m in self.nets.masters.items()}
        model, task = self.bound(self.current), self.current
        losses = ((self.objective.loss(model, b, task), count_rows(b)) for b in islice(data, TAYLOR_BATCHES))
        with torch.enable_grad():
            costs = removal_costs(weights, losses)
        increase = loss_increase(costs, scores, self.grid, self.distribution != "global")
        allowed = (1 - self.gamma) * max(abs(dense), math.log(2))
        return sum(1 for value in increase if value <= allowed) - 1


def _largest(scores: Weights, among: Masks, k: int) -> Masks:
    """The k largest of some weights, all layers ranked together."""
    flat = torch.cat([scores[n].masked_fill(~mask, -1).flatten() for n, mask in among.items()])
    parts = torch.split(top_k(flat, k), [mask.numel() for mask in among.values()])
    return Masks({n: part.view_as(among[n]) for n, part in zip(among, parts, strict=True)})
