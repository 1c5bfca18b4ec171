"""What loops of training share: the mean loss, learning rates on a schedule, and the error of one that diverged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["LossTally", "NonFiniteError", "Rates"]


class NonFiniteError(FloatingPointError):
    """Training has left the finite numbers."""


class LossTally:
    """The running mean of the loss, kept on its device so that no step waits for it; part of the checkpoint.

    average: over the processes that train together.
    """

    def __init__(self, device: torch.device, average: Callable[[Tensor], Tensor] = Tensor.clone) -> None:
        self.average = average
        self.total = torch.zeros((), device=device)
        self.count = 0

    def add(self, value: Tensor) -> None:
        self.total += value.detach()
        self.count += 1

    def mean(self, step: int) -> float:
        """The mean of the losses since the last `take`, on all ranks; NaN or infinity among them is an error."""
        self.total = self.average(self.total)
        mean = self.total.item() / max(self.count, 1)
        if not math.isfinite(mean):
            when = f"at step {step} (or up to {self.count - 1} steps before)"
            raise NonFiniteError(f"the loss is {mean} {when}; a lower learning rate may help")
        return mean

    def take(self, step: int) -> float:
        mean = self.mean(step)
        self.total.zero_()
        self.count = 0
        return mean

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total.copy_(state["total"])
        self.count = state["count"]


class Rates:
    """The learning rates of an optimiser's groups as they are now, to be set to multiples of them.

    Another training with the same optimiser would take fallen rates for those to begin with: `scale(1.0)` at the end.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.given = [group["lr"] for group in optimizer.param_groups]

    def scale(self, factor: float) -> None:
        """Every group learns at so many times its own rate."""
        for group, rate in zip(self.optimizer.param_groups, self.given, strict=True):
            group["lr"] = rate * factor
