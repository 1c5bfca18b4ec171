"""Inputs and labels in memory, and endless shuffled batches of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Augment = Callable[[Tensor, torch.Generator], Tensor]


class Part(NamedTuple):
    """Images and their labels, row by row."""

    x: Tensor
    y: Tensor


class Splits(NamedTuple):
    """What is trained on, what choices are made on, and what is reported."""

    train: Part
    validation: Part
    test: Part

    def map(self, f: Callable[[Tensor], Tensor]) -> Splits:
        """The same splits with f applied to the images of each."""
        return Splits(*(Part(f(part.x), part.y) for part in self))

    def to(self, device: torch.device | str) -> Splits:
        """The same splits with images and labels on a device."""
        return Splits(*(Part(part.x.to(device), part.y.to(device)) for part in self))


class Batches:
    """Endless batches (x, y): every epoch is a new permutation, and a batch may reach into the next epoch.

    All batches have the full size, and each image is seen once an epoch. The state is a few kilobytes whatever the
    size of the data, and after `load_state_dict` the next batch is bit for bit the one that would have come.

    Args:
        x, y: images and labels; batches are made on their device.
        generator: draws the permutations and the augmentation, on its own device.
        augment: changes a batch of images, drawing from the same generator.
    """

    def __init__(
        self, x: Tensor, y: Tensor, batch_size: int, generator: torch.Generator, augment: Augment | None = None
    ) -> None:
        if len(x) != len(y):
            raise ValueError(f"x and y must have the same length, got {len(x)} and {len(y)}")
        if x.device != y.device:
            raise ValueError(f"x and y must be on one device, got {x.device} and {y.device}")
        if not 1 <= batch_size <= len(x):
            raise ValueError(f"batch_size must be in 1..{len(x)} (the number of images), got {batch_size}")
        self.x, self.y, self.batch_size, self.generator, self.augment = x, y, batch_size, generator, augment
        self.epoch = 0
        self._start_epoch()

    def _start_epoch(self) -> None:
        self._state_before = self.generator.get_state()
        order = torch.randperm(len(self.x), generator=self.generator, device=self.generator.device)
        self._order = order.to(self.x.device)
        self._position = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        index = self._next_index()
        x, y = self.x.index_select(0, index), self.y.index_select(0, index)
        return (x if self.augment is None else self.augment(x, self.generator)), y

    def _next_index(self) -> Tensor:
        end = self._position + self.batch_size
        index = self._order[self._position : end]
        self._position = end
        if len(index) == self.batch_size:
            return index
        self.epoch += 1
        self._start_epoch()
        self._position = self.batch_size - len(index)
        return torch.cat([index, self._order[: self._position]])

    def state_dict(self) -> dict[str, Any]:
        """Where the stream of batches stands: epoch, position in it, and the generator's state then and now."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "size": len(self.x),
            "epoch_generator": self._state_before.clone(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken; the generator is set to its state then."""
        if state["size"] != len(self.x):
            raise ValueError(f"the state is of batches from {state['size']} images, these are {len(self.x)}")
        self.generator.set_state(state["epoch_generator"])
        self._start_epoch()
        self.generator.set_state(state["generator"])
        self.epoch, self._position = state["epoch"], state["position"]
