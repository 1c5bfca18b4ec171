"""PackNet and EfficientPackNet: every task gets a sub-network of its own, and nothing learned is ever lost."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from powerprop.continual.packing import search as searches
from powerprop.continual.packing.infer import check_how, infer
from powerprop.continual.packing.subnets import Subnetworks, Weights
from powerprop.continual.packing.taylor import loss_increase, removal_costs
from powerprop.continual.strategy import DRAWN_LABELS, REVIVED, WEIGHTS, OptimizerFactory, Progress, Strategy
from powerprop.continual.task import Prediction, Task, entropy, no_answers
from powerprop.data.batches import Batches
from powerprop.masks import Masks
from powerprop.modes import evaluating, in_parts
from powerprop.sparsify.prune import top_k, top_k_masks

__all__ = ["EfficientPackNet", "PackNet"]

Score = Callable[[Tensor, Tensor], float]
"""Performance from (outputs, targets), higher is better."""

NEARLY_FULL = 0.01
"""With fewer weights than this fraction free, a task can hardly learn."""
TAYLOR_BATCHES = 8
"""Batches of training data for the Taylor estimate."""


class PackNet(Strategy):
    """Every task gets the same share of the weights (Mallya & Lazebnik, 2018).

    Of each layer, 1/T of the weights: the largest among those that no earlier task uses. The sub-network of a task has
    these and the weights of all tasks before it. The rest is pruned and the share trained again. Where T does not
    divide the n weights of a layer, ⌊(t + 1)n/T⌋ of them are in use after task t, so that none is left over.

    tasks: the number of tasks T, which must be known; every layer needs as many weights.
    retrain_steps: after pruning; by default half of the training steps.
    Further arguments are those of `Strategy`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        tasks: int,
        *,
        retrain_steps: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, **options)
        if tasks < 1:
            raise ValueError(f"tasks must be at least 1, got {tasks}")
        self.share, self.retrain_steps = tasks, _steps(retrain_steps, self.steps)
        self.nets = Subnetworks(model, self.optimizer, self.heads)
        self.parts["masks"] = self.nets
        for name, master in self.nets.masters.items():
            if tasks > (weights := master.param.numel()):
                raise ValueError(f"tasks must be at most {weights}, the number of weights of {name!r}, got {tasks}")

    def begin_task(self, task: Task) -> None:
        """All weights are used, the free ones are trained."""
        if self.current >= self.share:
            raise ValueError(f"PackNet was made for tasks={self.share}, got one more: no weights are left for it")
        self.nets.open(self.current, self.generator(REVIVED))

    def after_backward(self) -> None:
        self.nets.drop_gradients()

    def after_step(self) -> None:
        self.nets.keep_buffers()

    def end_task(self, task: Task, batches: Batches, progress: Progress | None = None) -> None:
        """Take the share, retrain it, protect it, and initialise the free weights again."""
        settle(self, self._share(), batches, progress)

    def predict(self, x: Tensor, task: int | None = None, **how: Any) -> Prediction:
        return answer(self, x, task, **how)

    def check_how(self, **how: Any) -> None:
        check_answer(**how)

    def logits(self, x: Tensor, task: int | None) -> Tensor:
        return subnetwork_logits(self, x, task)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "total_tasks": self.share}

    def _share(self) -> Masks:
        free = self.nets.masks.free()
        theta = {n: m.theta().abs() for n, m in self.nets.masters.items()}
        return ~free | Masks({n: top_k(t.masked_fill(~free[n], -1.0), self._count(t)) for n, t in theta.items()})

    def _count(self, weight: Tensor) -> int:
        """What the current task gets of a weight: the shares of all tasks add up to the whole."""
        before, after = (t * weight.numel() // self.share for t in (self.current, self.current + 1))
        return after - before


class EfficientPackNet(Strategy):
    """Every task gets as few weights as it needs, and may use those of any task before it (paper, Algorithm 1).

    After training with all weights, the largest of *all* weights are kept: as few as keep γ of the validation
    performance. They are trained again where no earlier task uses them, then protected for good; the weights that no
    task uses are initialised again. The number of tasks need not be known.

    gamma: the fraction of the dense network's validation performance that the sub-network must exceed; one below zero
        may fall by the same fraction of its size.
    search: "linear" (the paper), "binary" (a fixed number of evaluations) or "taylor" (from a second-order estimate).
    grid: kept fractions to choose from, dense first.
    distribution: "global" ranks the weights of all layers together, "uniform" keeps the same fraction of each.
    retrain_steps: after pruning; by default half of the training steps.
    score: validation performance from (outputs, targets); by default the accuracy.
    Further arguments are those of `Strategy`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        *,
        gamma: float = 0.99,
        search: Literal["linear", "binary", "taylor"] = "binary",
        grid: Sequence[float] = searches.GRID,
        distribution: Literal["global", "uniform"] = "global",
        retrain_steps: int | None = None,
        score: Score | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, **options)
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma must be in (0, 1], got {gamma}")
        if search not in ("linear", "binary", "taylor"):
            raise ValueError(f"search must be 'linear', 'binary' or 'taylor', got {search!r}")
        if distribution not in ("global", "uniform"):
            raise ValueError(f"distribution must be 'global' or 'uniform', got {distribution!r}")
        self.gamma, self.search, self.distribution, self.score = gamma, search, distribution, score or accuracy
        self.grid, self.retrain_steps = searches.check_grid(grid), _steps(retrain_steps, self.steps)
        self.evaluations = 0
        self.nets = Subnetworks(model, self.optimizer, self.heads)
        self.parts["masks"] = self.nets

    def begin_task(self, task: Task) -> None:
        """All weights are used, the free ones are trained."""
        self.nets.open(self.current, self.generator(REVIVED))

    def after_backward(self) -> None:
        self.nets.drop_gradients()

    def after_step(self) -> None:
        self.nets.keep_buffers()

    def end_task(self, task: Task, batches: Batches, progress: Progress | None = None) -> None:
        """Find the sub-network, retrain it, protect it, and initialise the free weights again."""
        before = self.nets.masks.free().density()
        settle(self, self.find_masks(task, batches), batches, progress)
        if (free := self.nets.masks.free().density()) < NEARLY_FULL <= before:
            warnings.warn(f"{task.name}: only {free:.1%} of the weights are free for the tasks to come", stacklevel=2)

    def predict(self, x: Tensor, task: int | None = None, **how: Any) -> Prediction:
        return answer(self, x, task, **how)

    def check_how(self, **how: Any) -> None:
        check_answer(**how)

    def logits(self, x: Tensor, task: int | None) -> Tensor:
        return subnetwork_logits(self, x, task)

    def find_masks(self, task: Task, batches: Batches) -> Masks:
        """The sparsest masks of the grid that keep γ of the validation performance, by the chosen search."""
        scores = {n: m.theta().abs() for n, m in self.nets.masters.items()}
        x, y = task.validation()
        dense = self._performance(self.nets.theta(), x, y)
        least = dense * (self.gamma if dense >= 0 else 2 - self.gamma)
        self.evaluations = 0

        def passes(i: int) -> bool:
            self.evaluations += 1
            found = self._performance(self.nets.masked(self._kept(scores, i)), x, y)
            return found > least or found >= dense

        count = len(self.grid)
        if self.search == "taylor":
            found = searches.around(passes, count, self._guess(scores, batches, dense))
        else:
            found = (searches.linear if self.search == "linear" else searches.binary)(passes, count)
        if found < 0:
            short = f"{task.name}: no sub-network of {self.grid[0]:.0%} of the weights or fewer keeps {self.gamma:g} of"
            warnings.warn(f"{short} the performance {dense:.4f}; the densest is taken", stacklevel=2)
        return self._kept(scores, max(found, 0))

    def _kept(self, scores: Weights, i: int) -> Masks:
        masks = top_k_masks(scores, 1 - self.grid[i], self.distribution)
        return self.nets.masks.complete(masks)

    def _performance(self, weights: Weights, x: Tensor, y: Tensor) -> float:
        logits = in_parts(self.model, lambda part: self.nets.outputs(part, weights, self.current), x)
        return self.score(logits, self.targets(y.to(logits.device)))

    def _guess(self, scores: Weights, batches: Batches, dense: float) -> int:
        """The sparsest fraction whose estimated loss stays below what the lost performance is worth."""
        generator = self.generator(DRAWN_LABELS)
        some = ((x.to(self.device), self.targets(y.to(self.device))) for x, y in islice(batches, TAYLOR_BATCHES))
        weights = {n: m.param for n, m in self.nets.masters.items()}
        with evaluating(self.model):
            costs = removal_costs(weights, lambda x: self.outputs(x, self.current), some, generator)
        increase = loss_increase(costs, scores, self.grid, self.distribution != "global")
        allowed = (1 - self.gamma) * abs(dense) * math.log(max(2, len(self._classes)))
        return sum(1 for value in increase if value <= allowed) - 1


def settle(
    learner: PackNet | EfficientPackNet, masks: Masks, batches: Batches, progress: Progress | None = None
) -> None:
    """Retrain a sub-network, protect it, and initialise again the weights that no task uses."""
    learner.nets.restrict(masks)
    if learner.retrain_steps:
        learner.train(batches, learner.retrain_steps, progress, "retraining")
    learner.nets.pack(masks, batches.x, learner.generator(WEIGHTS))


def subnetwork_logits(learner: PackNet | EfficientPackNet, x: Tensor, task: int | None) -> Tensor:
    """The outputs of a task's sub-network."""
    if task is None:
        raise ValueError("logits need a task; predict(x) finds it out")
    nets, weights = learner.nets, learner.nets.weights(task)
    return in_parts(learner.model, lambda part: nets.outputs(part, weights, task), x)


def answer(
    learner: PackNet | EfficientPackNet, x: Tensor, task: int | None = None, *, method: str = "shortlist",
    group: int | None = None, candidates: int = 4, unknown: float | None = None,
) -> Prediction:  # fmt: skip
    """The class of every input, in the task given or in the one inferred.

    method, group, candidates: how the task is inferred, see `infer`.
    unknown: inputs (groups of them) whose entropy exceeds this fraction of its maximum are of task -1.
    """
    check_answer(method, group, candidates, unknown)
    learner.nets.masks.check(0 if task is None else task)
    if not len(x):
        return no_answers(learner.device)
    if task is not None:
        return in_task(learner, x, task)
    whole = in_tasks(learner, x, infer(learner.nets, x, learner.own_classes, method, group, candidates))
    return whole if unknown is None else flag_unknown(whole, unknown, group)


def check_answer(
    method: str = "shortlist", group: int | None = None, candidates: int = 4, unknown: float | None = None
) -> None:
    """Arguments of `answer` that make no sense are an error."""
    check_how(method, group, candidates)
    if unknown is not None and not 0 < unknown <= 1:
        raise ValueError(f"unknown must be in (0, 1], a fraction of the largest entropy, got {unknown}")


def in_tasks(learner: PackNet | EfficientPackNet, x: Tensor, tasks: Tensor) -> Prediction:
    """The class of every input within its task, in the order of the inputs; one pass for each task."""
    rows = {t: (tasks == t).nonzero()[:, 0] for t in sorted(set(tasks.tolist()))}
    found = [in_task(learner, x[of_task.to(x.device)], t) for t, of_task in rows.items()]
    order = torch.cat(list(rows.values())).argsort()
    return Prediction(*(torch.cat(column)[order.to(column[0].device)] for column in zip(*found, strict=True)))


def in_task(learner: PackNet | EfficientPackNet, x: Tensor, task: int) -> Prediction:
    """The class of every input within a task."""
    logits = learner.own_classes(learner.logits(x, task), task)
    label = logits.argmax(1)
    return Prediction(torch.full_like(label, task), label, entropy(logits))


def flag_unknown(prediction: Prediction, threshold: float, group: int | None) -> Prediction:
    """Task -1 where the mean entropy of a group of inputs is above the threshold."""
    size = group or max(1, len(prediction.entropy))
    mean = torch.cat([part.mean().expand(len(part)) for part in torch.split(prediction.entropy, size)])
    return prediction._replace(task=prediction.task.masked_fill(mean > threshold, -1))


def accuracy(logits: Tensor, y: Tensor) -> float:
    """The fraction classified correctly."""
    return float((logits.argmax(1) == y).double().mean())


def _steps(retrain_steps: int | None, steps: int) -> int:
    if retrain_steps is not None and retrain_steps < 0:
        raise ValueError(f"retrain_steps must not be negative, got {retrain_steps}")
    return steps // 2 if retrain_steps is None else retrain_steps
