"""What the inputs of each task look like on average: enough to name the few tasks that an input may belong to."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["Signatures"]

SAMPLED = 5000


class Signatures:
    """The mean input of every task, and the variance within tasks; as many numbers per task as an input has.

    The distance of some inputs to a task is that of their mean to the task's, coordinate by coordinate in units of the
    standard deviation within tasks. It costs no pass through the network, whatever the number of tasks.
    """

    def __init__(self) -> None:
        self.means = torch.zeros(0, 0)
        self.variance = torch.zeros(0)

    def add(self, x: Tensor) -> None:
        """Take the next task's training inputs, about 5,000 of them, evenly spaced."""
        some = x[:: max(1, len(x) // SAMPLED)].flatten(1).float().cpu()
        variance, mean = torch.var_mean(some, 0, correction=0)
        known = len(self.means)
        self.means = mean[None] if not known else torch.cat([self.means, mean[None]])
        self.variance = variance if not known else self.variance.lerp(variance, 1 / (known + 1))

    def distance(self, x: Tensor) -> Tensor:
        """The distance of these inputs, taken as one group, to every task."""
        spread = self.variance + self.variance.mean() / 100 + torch.finfo(torch.float32).tiny
        return ((x.flatten(1).float().cpu().mean(0) - self.means).square() / spread).mean(1)

    def state(self) -> dict[str, Tensor]:
        return {"signature.means": self.means, "signature.variance": self.variance}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self.means, self.variance = tensors["signature.means"], tensors["signature.variance"]
