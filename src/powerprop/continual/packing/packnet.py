"""Packing: a sub-network for every task, chosen after training, then protected; PackNet gives each the same share."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from powerprop.continual.data import Source
from powerprop.continual.packing.subnetworks import Weights
from powerprop.continual.packing.task_inference import SubnetworkStrategy
from powerprop.continual.strategy import OptimizerFactory, Progress, TaskId, check_least
from powerprop.eval_mode import evaluating
from powerprop.mask_entries import count
from powerprop.masks import Masks
from powerprop.sparse.compute import sparse_compute
from powerprop.sparse.linear import densify
from powerprop.sparsify.prune import top_k

__all__ = ["PackNet", "Packing"]

NEARLY_FULL = 0.01
"""With fewer weights of a layer than this fraction free, a task can hardly learn."""
FAR_BELOW = 0.75
"""A task that keeps less than this of its performance has got too small a sub-network."""


class Packing(SubnetworkStrategy):
    """After training, `choose_masks` picks the weights of the task; they are trained again where no earlier task uses
    them, then protected for good; the weights that no task uses are drawn anew.

    In a loop of one's own, `prune()` after training chooses the weights, further steps retrain them, and `end()`
    protects them; without it, `end(data)` prunes and retrains by itself.

    retrain_steps: after pruning; by default half of the training steps.
    sparse: compute with the weights of the task alone (`sparse_compute`) while these are retrained.
    Further arguments are those of `Strategy`.
    """

    traits: ClassVar[tuple[str, ...]] = ("once", "keeps answers", "starts anew")
    task_state: ClassVar[tuple[str, ...]] = ("_chosen", "_dense")
    open_ended: ClassVar[bool] = True
    """There may always be another task, so that a layer which is nearly full is worth a warning."""

    tolerated: float = 1.0
    """The fraction of the performance that a sub-network may have before it is retrained."""

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, retrain_steps: int | None = None,
        sparse: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, optimizer, **options)
        if sparse and (others := [k.__name__ for k in getattr(self, "strategies", ()) if not issubclass(k, Packing)]):
            raise ValueError(
                f"sparse=True is for {self.name} alone: {', '.join(others)} would meet layers that hold some of their "
                "weights"
            )
        self.retrain_steps = self.steps // 2 if retrain_steps is None else retrain_steps
        check_least(retrain_steps=(self.retrain_steps, 0))
        self.sparse = sparse
        self._chosen: Masks | None = None
        self._dense: float | None = None

    @abstractmethod
    def choose_masks(self, data: Source, validation: Source) -> Masks:
        """The one hook in which packing methods differ: the weights that the current task keeps.

        Those of earlier tasks may be among them.
        """

    # --- the hooks ----------------------------------------------------------------------------------------------

    def begin_task(self) -> None:
        """All weights are used, the free ones are trained."""
        self._chosen = self._dense = None
        self.nets.open(self.current, self.generator("revived"), self.visible())

    def visible(self) -> Masks | None:
        """The weights that take part while a task is trained; None is all of them."""
        return None

    def prune(self, data: Any = None, validation: Any = None) -> None:
        """Choose the weights of the task in hand; from now on only they are used, and steps retrain them.

        Called again after some steps, it looks for fewer among them, against the same performance.
        """
        now = self._open("prune")
        source = data if isinstance(data, Source) else self.source(data)
        validating = source if validation is None else self.source(validation)
        with evaluating(self.model):
            if self._dense is None and not validating.missing:
                seen = self.visible()
                weights = self.nets.theta() if seen is None else self.nets.masked(seen)
                self._dense = self.performance(weights, validating)
            self._chosen = self.choose_masks(source, validating)
        self.nets.restrict(self._chosen)
        now.phase, now.step = "retraining", 0

    def end_task(self, data: Source, validation: Source, progress: Progress | None) -> None:
        """Find the sub-network, retrain it, protect it, and initialise the free weights again."""
        before = self.full_layers()
        if self._chosen is None:
            self.prune(data, validation)
            left = self.retrain_steps - self.prune_on(data, validation, progress)
            if left > 0:
                self.train(data, left, progress, "retraining")
                self.model.eval()
        assert self._chosen is not None
        self._warn_if_spoiled(validation)
        self.nets.pack(self._chosen, self._sample(data, validation), self.generator("weights"))
        if self.open_ended and (full := self.full_layers() - before):
            text = f"{self.name}: fewer than {NEARLY_FULL:.0%} of the weights of {', '.join(sorted(full))} are free"
            warnings.warn(f"{text} for the tasks to come", stacklevel=2)

    def train(self, source: Source, steps: int, progress: Progress | None = None, phase: str = "training") -> None:
        """Retraining touches the weights of the task alone, if that is asked for."""
        if not self.sparse or phase == "training":
            return super().train(source, steps, progress, phase)
        sparse_compute(self.model, self.optimizer, layers=["*"])
        try:
            super().train(source, steps, progress, phase)
        finally:
            densify(self.model)

    def prune_on(self, data: Source, validation: Source, progress: Progress | None) -> int:
        """Prune further while retraining; returns how many of the retraining steps that took."""
        return 0

    # --- what is packed -----------------------------------------------------------------------------------------

    def used(self) -> float:
        """The fraction of weights that some task uses."""
        return self.nets.masks.used()

    def show(self, task: TaskId) -> None:
        """Put the network of a task into the model, as a plain sparse network in evaluation mode."""
        if self.now is not None:
            raise RuntimeError(f"task {self.now.task} is still being learned: call end() before show()")
        self.nets.show(self._place(task) or 0)

    def performance(self, weights: Weights, validation: Source) -> float:
        """The score of the task in hand with other weights than the model holds."""
        with torch.no_grad(), evaluating(self.model), self.nets.viewing(weights, self.current) as model:
            return self.objective.score(model, validation.in_order(), self.current)

    def _warn_if_spoiled(self, validation: Source) -> None:
        if self._dense is None:
            return
        masked = self.nets.masked(self._chosen or {})
        kept, dense = self.performance(masked, validation), self._dense
        if kept < dense - (1 - FAR_BELOW * self.tolerated) * abs(dense):
            text = f"{self.name}: a performance of {dense:.4f} fell to {kept:.4f} in the task's sub-network"
            warnings.warn(f"{text}; it has too few weights of its own, or too few steps to retrain them", stacklevel=2)

    def full_layers(self, least: float = NEARLY_FULL) -> set[str]:
        """The weights of which less than this fraction is free."""
        free = self.nets.masks.free()
        return {name for name, mask in free.items() if count(mask) < least * mask.numel()}


class PackNet(Packing):
    """Every task gets the same share of the weights (Mallya & Lazebnik, 2018).

    Of each layer, 1/T of the weights: the largest among those that no earlier task uses. The sub-network of a task has
    these and the weights of all tasks before it. The rest is pruned and the share trained again. Where T does not
    divide the n weights of a layer, ⌊(t + 1)n/T⌋ of them are in use after task t, so that none is left over.

    total_tasks: the number of tasks T, which must be known; every layer needs as many weights.
    Further arguments are those of `Packing`.

    Examples:
        >>> learner = continual.PackNet(model, sgd, total_tasks=2, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    open_ended: ClassVar[bool] = False

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, total_tasks: int, **options: Any
    ) -> None:
        super().__init__(model, optimizer, **options)
        check_least(total_tasks=(total_tasks, 1))
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
        masks, free = {}, self.nets.masks.free()
        for name, master in self.nets.masters.items():
            before, after = (t * master.param.numel() // self.total_tasks for t in (self.current, self.current + 1))
            masks[name] = top_k(master.theta().abs().masked_fill(~free[name], -1.0), after - before) | ~free[name]
        return Masks(masks)
