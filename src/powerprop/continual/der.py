"""Dark experience replay: what the network answered when an example went by is learned again with it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from powerprop.continual.distill import running_statistics_kept
from powerprop.continual.optimiser import OptimizerFactory
from powerprop.continual.replay import Replay
from powerprop.continual.rows import all_tensors
from powerprop.continual.source import Source, to_device
from powerprop.continual.strategy import Progress

__all__ = ["DER", "DERpp"]

BUZZEGA = "Buzzega et al., Dark Experience for General Continual Learning, 2020, and their code"


class DER(Replay):
    """Dark experience replay (Buzzega et al., NeurIPS 2020): the answers z of an example stay what they were.

        L(batch) + a E_(x, z)~memory ‖z - f(x)‖² / K,    K the number of outputs

    The memory is a reservoir that is filled with every step, from the batch that it shows: step(loss, batch); z is what
    the network answers to it before the step. No boundary of tasks plays a part. The mean over the outputs is that of
    the authors' code; in the paper it is a sum.

    strength: a.
    Further arguments are those of `Replay`.
    """

    fills_memory: ClassVar[bool] = True
    BESIDE: ClassVar[int] = 1
    OPTIONS: ClassVar[tuple[str, ...]] = ("strength",)
    PUBLISHED: ClassVar[dict[str, dict[str, Any]]] = {
        "permuted-mnist/domain-incremental": {"memory": 500, "strength": 1.0, "rehearsed": 128, "reference": BUZZEGA},
    }

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, strength: float = 0.5, **options: Any
    ) -> None:
        super().__init__(model, optimizer, **options)
        if not strength >= 0:
            raise ValueError(f"strength must not be negative, got {strength}")
        self.strength, self.buffer.trained = strength, True
        self._answered: Tensor | None = None

    def rehearse(self) -> None:
        """Nothing takes a share of the loss; but the batch must be there."""
        self.batch_shown()

    def penalty(self) -> Tensor | None:
        """The memory's answers; those to the batch in hand are noted."""
        batch = to_device(self.batch_shown(), self.device)
        with torch.no_grad(), running_statistics_kept(self.model):
            self._answered = self._answers(batch, self.current)
        return self.of_memory() if len(self.buffer) else None

    def of_memory(self) -> Tensor:
        """a E ‖z - f(x)‖² / K."""
        strength: float = self.option(DER, "strength")
        return strength * self.distance(self.drawn())

    def after_step(self) -> None:
        """The batch goes by, with the answers to it."""
        assert self._answered is not None
        self.remember(self._answered)
        self._answered = None

    def end_task(self, data: Source, validation: Source, progress: Progress | None) -> None:
        """All has gone by already."""

    def distance(self, rows: Tensor) -> Tensor:
        """The mean squared distance from the answers kept with some examples, each seen as its own task sees it."""
        terms = []
        for task in sorted(set(self.buffer.tasks[rows].tolist())):
            own = rows[self.buffer.tasks[rows] == task]
            (kept,) = self.buffer.beside(own)
            found = self._answers(to_device(self.buffer.batch(own), self.device), task)
            terms.append(len(own) / len(rows) * F.mse_loss(found[:, : kept.shape[1]], kept.to(found)))
        return torch.stack(terms).sum()

    def _answers(self, batch: Any, task: int) -> Tensor:
        """The outputs of the network, one row for every input."""
        with self.viewing(task) as model:
            found = [each.flatten(1) for each in all_tensors(self.objective.outputs(model, batch, task)) if each.ndim]
        if not found:
            kind = type(self.objective).__name__
            raise TypeError(f"{kind} does not call the model itself: say in its `outputs` what the network answers")
        return torch.cat(found, 1)


class DERpp(DER):
    """Dark experience replay with labels (Buzzega et al., NeurIPS 2020), called DER++ there.

        L(batch) + a E_(x, z)~memory ‖z - f(x)‖² / K + b E_(x, y)~memory L(x, y)

    Both means are over examples of their own.

    labels_strength: b.
    Further arguments are those of `DER`.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("labels_strength",)
    PUBLISHED: ClassVar[dict[str, dict[str, Any]]] = {
        "permuted-mnist/domain-incremental": {
            "memory": 500, "strength": 1.0, "labels_strength": 0.5, "rehearsed": 128, "reference": BUZZEGA,
        },
    }  # fmt: skip

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, labels_strength: float = 0.5, **options: Any
    ) -> None:
        super().__init__(model, optimizer, **options)
        if not labels_strength >= 0:
            raise ValueError(f"labels_strength must not be negative, got {labels_strength}")
        self.labels_strength = labels_strength

    def of_memory(self) -> Tensor:
        """Answers of some examples, labels of others."""
        return super().of_memory() + self.labels_strength * self.loss_again(self.drawn())
