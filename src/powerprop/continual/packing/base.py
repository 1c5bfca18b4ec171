"""What PackNet and EfficientPackNet share: a sub-network for every task, chosen after training, then protected."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.continual.now import TaskId
from powerprop.continual.optimiser import OptimizerFactory
from powerprop.continual.packing.inferring import Inferring
from powerprop.continual.packing.signature import Signatures
from powerprop.continual.packing.subnets import Subnetworks, Weights
from powerprop.continual.source import Source
from powerprop.continual.strategy import Progress
from powerprop.eval_mode import evaluating
from powerprop.mask_entries import count
from powerprop.masks import Masks, pack, unpack

__all__ = ["Packing"]

NEARLY_FULL = 0.01
"""With fewer weights of a layer than this fraction free, a task can hardly learn."""
FAR_BELOW = 0.75
"""A task that keeps less than this of its performance has got too small a sub-network."""


class Packing(Inferring):
    """After training, `choose_masks` picks the weights of the task; they are trained again where no earlier task uses
    them, then protected for good; the weights that no task uses are drawn anew.

    In a loop of one's own, `prune()` after training chooses the weights, further steps retrain them, and `end()`
    protects them; without it, `end(data)` prunes and retrains by itself.

    retrain_steps: after pruning; by default half of the training steps.
    Further arguments are those of `Strategy`.
    """

    once: ClassVar[bool] = True
    keeps_answers: ClassVar[bool] = True
    OPTIONS: ClassVar[tuple[str, ...]] = ("retrain_steps",)
    carries: ClassVar[bool] = False
    open_ended: ClassVar[bool] = True
    """There may always be another task, so that a layer which is nearly full is worth a warning."""

    tolerated: float
    """The fraction of the performance that a sub-network may have before it is retrained."""

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, retrain_steps: int | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, optimizer, **options)
        if retrain_steps is not None and retrain_steps < 0:
            raise ValueError(f"retrain_steps must not be negative, got {retrain_steps}")
        self.retrain_steps = self.steps // 2 if retrain_steps is None else retrain_steps
        self.nets = Subnetworks(model, self.optimizer, self.head_of, self.bound)
        self.nets.signatures = Signatures(self.means)
        self.parts["masks"] = self.nets
        self.tolerated = 1.0
        self._chosen: Masks | None = None
        self._dense: float | None = None

    @abstractmethod
    def choose_masks(self, data: Source, validation: Source) -> Masks:
        """The one verb in which packing methods differ: the weights that the current task keeps.

        Those of earlier tasks may be among them.
        """

    # --- the verbs of a strategy --------------------------------------------------------------------------------

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
        held = source if validation is None else validation
        held = held if isinstance(held, Source) else self.source(held)
        with evaluating(self.model):
            if self._dense is None and not held.missing:
                seen = self.visible()
                self._dense = self.performance(self.nets.theta() if seen is None else self.nets.masked(seen), held)
            self._chosen = self.choose_masks(source, held)
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

    def ongoing(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The weights that were chosen already, and how well all of them did."""
        chosen = {} if self._chosen is None else {name: pack(mask) for name, mask in self._chosen.items()}
        return chosen, {"chosen": self._chosen is not None, "dense": self._dense}

    def go_on(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """The same choice."""
        shapes = {name: master.param for name, master in self.nets.masters.items()}
        found = {n: unpack(tensors[n], p.shape).to(p.device) for n, p in shapes.items() if n in tensors}
        self._chosen, self._dense = Masks(found) if data["chosen"] else None, data["dense"]

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
