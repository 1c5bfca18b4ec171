"""Endless shuffled batches from tensors in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Augment = Callable[[Tensor, torch.Generator], Tensor]


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


def crop_and_flip(x: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """CIFAR's customary augmentation: each image moved by up to `padding` pixels and mirrored half of the time.

    Uncovered pixels are 0, the mean colour of a normalised image.
    """
    n, c, h, w = x.shape
    device = generator.device
    shift = torch.randint(0, 2 * padding + 1, (2, n, 1), generator=generator, device=device).to(x.device)
    mirror = torch.randint(0, 2, (n, 1), generator=generator, device=device).to(x.device)
    rows = torch.arange(h, device=x.device) + shift[0]
    cols = torch.arange(w, device=x.device)
    cols = torch.where(mirror == 1, cols.flip(0), cols) + shift[1]
    padded = F.pad(x, (padding, padding, padding, padding))
    pixels = (rows.unsqueeze(2) * padded.shape[3] + cols.unsqueeze(1)).view(n, 1, h * w)
    return padded.flatten(2).gather(2, pixels.expand(n, c, h * w)).view(n, c, h, w)
