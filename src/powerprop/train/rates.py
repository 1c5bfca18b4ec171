"""Learning rates that follow a schedule, and come back to what they were given as."""

from __future__ import annotations

from torch.optim import Optimizer

__all__ = ["Rates"]


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
