"""Masks that have nothing in common, one bit for each weight and task."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from powerprop.masks import Masks, pack, unpack

__all__ = ["BitMasks"]


class BitMasks:
    """Masks of any number of tasks, eight weights to the byte.

    shapes: name -> that of the weight.
    """

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.tasks, self.shapes = 0, dict(shapes)
        self.bits: dict[str, list[Tensor]] = {n: [] for n in shapes}

    def follow(self, devices: Mapping[str, torch.device]) -> None:
        """The device that masks are unpacked to."""
        self.devices = dict(devices)

    def check(self, task: int) -> None:
        """An error that names the tasks there are, for any other number."""
        if not 0 <= task < self.tasks:
            known = f"0..{self.tasks - 1} (the tasks learned so far)" if self.tasks else "learned first: none is yet"
            raise ValueError(f"task must be {'in ' if self.tasks else ''}{known}, got {task}")

    def add(self, masks: Mapping[str, Tensor]) -> None:
        """The mask of the next task."""
        for name, mask in masks.items():
            self.bits[name].append(pack(mask))
        self.tasks += 1

    def mask(self, task: int) -> Masks:
        """The weights that a task uses."""
        self.check(task)
        return Masks({name: self.unpacked(name, task) for name in self.bits})

    def unpacked(self, name: str, task: int) -> Tensor:
        """The mask of one weight, where the weight is."""
        return unpack(self.bits[name][task], self.shapes[name]).to(self.devices[name])

    def mixture(self, name: str, coefficients: Tensor) -> Tensor:
        """Σ_t π_t M^t of one weight."""
        total = torch.zeros(self.shapes[name], device=self.devices[name])
        for task, share in enumerate(coefficients.tolist()):
            if share:
                total += share * self.unpacked(name, task)
        return total

    def sums(self, name: str, values: Tensor) -> Tensor:
        """Σ_i values_i M^t_i for every task t."""
        found = [values.detach()[self.unpacked(name, task)].double().sum().cpu() for task in range(self.tasks)]
        return torch.stack(found)

    def state(self) -> dict[str, Tensor]:
        """A row of bits for every task, by weight."""
        return {name: torch.stack(rows) for name, rows in self.bits.items() if rows}

    def load_state(self, tensors: Mapping[str, Tensor], tasks: int) -> None:
        """Take up what `state` gave."""
        self.tasks = tasks
        self.bits = {name: list(tensors[name]) if tasks else [] for name in self.shapes}
