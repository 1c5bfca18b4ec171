"""What the inputs of each task look like on average: enough to name the few tasks that an input may belong to."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["Signatures"]

SAMPLED = 5000
"""Inputs of a task that its signature is made of."""


class Signatures:
    """The mean input of every task, and the variance within tasks; as many numbers per task as an input has.

    The distance of some inputs to a task is that of their mean to the task's, coordinate by coordinate in units of the
    standard deviation within tasks. It costs no pass through the network, whatever the number of tasks. Inputs of
    another size, such as larger images, are infinitely far away.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.means: dict[int, Tensor] = {}
        self.variance: dict[int, Tensor] = {}

    def add(self, x: Tensor | None) -> None:
        """Take some of the next task's training inputs; None if they have no fixed number of values each."""
        if x is None:
            self.sizes.append(0)
            return
        variance, mean = (t.cpu() for t in torch.var_mean(_rows(x), 0, correction=0))
        size, means = len(mean), mean[None]
        if (known := self.sizes.count(size)) > 0:
            means = torch.cat([self.means[size], means])
            variance = self.variance[size].lerp(variance, 1 / (known + 1))
        self.sizes.append(size)
        self.means[size], self.variance[size] = means, variance

    def distance(self, x: Tensor) -> Tensor:
        """The distance of these inputs, taken as one group, to every task; all alike if no task has such inputs."""
        mean = _rows(x).mean(0).cpu()
        size = len(mean)
        if size not in self.means:
            return torch.zeros(len(self.sizes))
        variance = self.variance[size]
        spread = variance + variance.mean() / 100 + torch.finfo(torch.float32).tiny
        found = torch.full((len(self.sizes),), torch.inf, dtype=torch.float32)
        found[torch.tensor(self.sizes) == size] = ((mean - self.means[size]).square() / spread).mean(1)
        return found

    def state(self) -> dict[str, Tensor]:
        means = {f"signature.means.{size}": mean for size, mean in self.means.items()}
        variance = {f"signature.variance.{size}": tensor for size, tensor in self.variance.items()}
        return {"signature.sizes": torch.tensor(self.sizes, dtype=torch.long), **means, **variance}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self.sizes = tensors["signature.sizes"].tolist()
        self.means = {size: tensors[f"signature.means.{size}"] for size in sorted(set(self.sizes) - {0})}
        self.variance = {size: tensors[f"signature.variance.{size}"] for size in self.means}


def _rows(x: Tensor) -> Tensor:
    """One row of numbers per input, whatever its shape."""
    return (x.flatten(1) if x.ndim > 1 else x[:, None]).float()
