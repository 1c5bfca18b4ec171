"""PackNet: every task keeps the same share of the weights."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.continual.optimiser import OptimizerFactory
from powerprop.continual.packing.base import Packing
from powerprop.continual.source import Source
from powerprop.masks import Masks
from powerprop.sparsify.prune import top_k

__all__ = ["PackNet"]


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
