"""What a learner trains: the parameters of its model, which may grow from task to task, and those of its method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from powerprop.optim import Powerprop
from powerprop.training import Rates

__all__ = ["Parameters"]


class Parameters:
    """The parameters that an optimiser trains, and the heads of tasks among them.

    model: may get further parameters while it learns.
    heads: the name of the submodule whose child "0", "1", … is the output layer of task 0, 1, …; None is a shared one.
    """

    def __init__(self, model: nn.Module, optimizer: Powerprop, heads: str | None) -> None:
        self.model, self.optimizer, self.heads = model, optimizer, heads
        self.rates = Rates(optimizer)
        self._known = set(model.parameters())

    def head_of(self, name: str) -> int | None:
        """The task whose head this name is inside of; None for everything that is shared."""
        if self.heads is None or not name.startswith(f"{self.heads}."):
            return None
        child = name[len(self.heads) + 1 :].partition(".")[0]
        return int(child) if child.isdigit() else None

    def add_heads(self, tasks: int, generator: Callable[[], torch.Generator], where: str = "") -> None:
        """Output layers for so many tasks, where the module that has them knows how to `add` one.

        generator: gives the random numbers of a head.
        where: what an error begins with.
        """
        if self.heads is None:
            return
        heads = self.model.get_submodule(self.heads)
        while len(known := [name for name, _ in heads.named_children() if name.isdigit()]) < tasks:
            if not hasattr(heads, "add"):
                text = f"{where}{self.heads!r} has no head '{tasks - 1}', it has {', '.join(known) or 'none'}"
                raise ValueError(f"{text}; add one before the task begins")
            heads.add(generator())  # type: ignore[operator]
        self.take_up_new()

    def take_up_new(self) -> None:
        """Parameters that the model has got since the last task go to the optimiser, at the rate of its first group."""
        new = [p for p in self.model.parameters() if p not in self._known]
        if new:
            self.add(new)
            self._known |= set(new)

    def add(self, parameters: list[nn.Parameter], **settings: Any) -> None:
        """Further parameters, of the model or of the method itself, for the optimiser to train."""
        group = {"params": parameters, "lr": self.rates.given[0], **settings}
        self.optimizer.add_param_group(group)
        self.rates.given.append(group["lr"])

    def trained_share(self, task: int) -> float:
        """The fraction of the weights that a task trains, after its gradients; heads of others are no part of it."""
        masters = {n: m for n, m in self.optimizer.masters.items() if self.head_of(n) in (None, task)}
        trained = {n: m for n, m in masters.items() if m.param.grad is not None}
        moving = sum(m.trained_count() for m in trained.values())
        return moving / max(1, sum(m.param.numel() for m in masters.values()))
