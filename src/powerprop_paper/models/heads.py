"""Output layers of networks that learn several tasks."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Heads(nn.Module):
    """One output layer for each task, called `<name>.0`, `<name>.1`, ... in the state dict."""

    def __init__(self, features: int, classes: int, tasks: int, bias: bool = True) -> None:
        super().__init__()
        self.features, self.classes, self.bias = features, classes, bias
        for task in range(tasks):
            self.add_module(str(task), nn.Linear(features, classes, bias=bias))

    def add(self, generator: torch.Generator | None = None) -> nn.Linear:
        """One more output layer, for the next task, on the device and in the precision of the others."""
        head = nn.Linear(self.features, self.classes, bias=self.bias)
        limit = self.features**-0.5
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.uniform_(-limit, limit, generator=generator)
        like = next(self.parameters(), None)
        self.add_module(str(len(self._modules)), head if like is None else head.to(like))
        return head

    def forward(self, x: Tensor, task: int | None) -> Tensor:
        if task is None or not 0 <= task < len(self._modules):
            raise ValueError(f"task must be in 0..{len(self._modules) - 1} (an output layer for each), got {task}")
        return self.get_submodule(str(task))(x)  # type: ignore[no-any-return]


def output_layer(features: int, classes: int, heads: int, bias: bool = True) -> nn.Linear | Heads:
    """`Heads` for that many tasks; an ordinary linear layer for 0."""
    if heads < 0:
        raise ValueError(f"heads must be 0 (one output layer) or the number of tasks, got {heads}")
    return Heads(features, classes, heads, bias) if heads else nn.Linear(features, classes, bias)


def answer(output: nn.Module, x: Tensor, task: int | None) -> Tensor:
    """The logits of an ordinary output layer, or of the head of `task`."""
    if isinstance(output, Heads):
        return output(x, task)  # type: ignore[no-any-return]
    if task is not None:
        raise ValueError(f"this network has one output layer for all tasks, got task={task}")
    return output(x)  # type: ignore[no-any-return]
