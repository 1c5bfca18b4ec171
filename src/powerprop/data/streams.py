"""Sequences of tasks made from one image set, each task only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import overload

import numpy as np
import torch
from torch import Tensor

from powerprop.data.images import Images, Part, Splits, to_float


@dataclass(frozen=True, repr=False)
class Task:
    """One task of a stream. It keeps no images: every call of train(), validation() or test() makes them.

    Labels are local, 0..k-1; `classes` gives each its number in the whole stream, where no two tasks share one.
    """

    index: int
    name: str
    classes: tuple[int, ...] | None
    splits: Splits
    view: Callable[[Part], Part]

    def train(self) -> Part:
        return self.view(self.splits.train)

    def validation(self) -> Part:
        return self.view(self.splits.validation)

    def test(self) -> Part:
        return self.view(self.splits.test)

    def global_labels(self, y: Tensor) -> Tensor:
        """Labels numbered over the whole stream, as class-incremental learning needs them."""
        if self.classes is None:
            raise ValueError(f"{self.name}: its targets are not labels, so that it has no classes")
        return torch.tensor(self.classes, device=y.device)[y]

    def __repr__(self) -> str:
        return f"Task({self.index}, {self.name!r})"


class Stream(Sequence[Task]):
    """A sequence of tasks that are made when they are asked for, in any order."""

    def __init__(self, length: int, make: Callable[[int], Task]) -> None:
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        places = range(self._length)[index]
        return self._make(places) if isinstance(places, int) else [self._make(place) for place in places]


def permuted(
    images: Images,
    tasks: int,
    seed: int,
    *,
    validation: int = 5000,
    identity_first: bool = False,
    transform: Callable[[Tensor], Tensor] = to_float,
) -> Stream:
    """Permuted images: task t sees every image with its pixels in a fixed random order of its own.

    The order is drawn from (seed, t) alone, so that task 250 needs none of the 249 before it. Task t has the
    local labels of the data and the stream's classes kt..kt+k-1.

    Args:
        validation: how many of the last training images are for validation.
        identity_first: leave the images of task 0 as they are.
        transform: from bytes to what the network sees, applied after the permutation.
    """
    if tasks < 1:
        raise ValueError(f"tasks must be at least 1, got {tasks}")
    splits, k = images.split_validation(validation), images.classes

    def make(t: int) -> Task:
        order = None if identity_first and t == 0 else pixel_order(images.shape[1] * images.shape[2], seed, t)
        classes = tuple(range(k * t, k * (t + 1)))
        view = partial(permuted_part, order=order, transform=transform)
        return Task(t, f"permutation {t}", classes, splits, view)

    return Stream(tasks, make)


def pixel_order(pixels: int, seed: int, task: int) -> Tensor:
    """The permutation of one task, from a generator whose streams numpy has frozen for good."""
    bits = np.random.MT19937(np.random.SeedSequence([seed, task]))
    return torch.from_numpy(np.random.RandomState(bits).permutation(pixels))


def permuted_part(part: Part, order: Tensor | None, transform: Callable[[Tensor], Tensor]) -> Part:
    """The images with their pixels in the given order, in all channels alike; None leaves them as they are."""
    x = part.x if order is None else part.x.flatten(2)[:, :, order.to(part.x.device)].view_as(part.x)
    return Part(transform(x), part.y)


def split(
    images: Images,
    classes_per_task: int,
    *,
    validation: int = 5000,
    transform: Callable[[Tensor], Tensor] = to_float,
) -> Stream:
    """Split images: the classes in their order, `classes_per_task` of them in each task.

    Split-MNIST is split(mnist, 2): five tasks of two digits; Split-CIFAR100 is split(cifar100, 10).

    Args:
        validation: how many of the last training images, of all classes together, are for validation.
        transform: from bytes to what the network sees.
    """
    if classes_per_task < 1 or images.classes % classes_per_task:
        raise ValueError(
            f"classes_per_task must divide the {images.classes} classes of {images.name}, got {classes_per_task}"
        )
    splits = images.split_validation(validation)

    def make(t: int) -> Task:
        classes = tuple(range(t * classes_per_task, (t + 1) * classes_per_task))
        name = f"classes {classes[0]}-{classes[-1]}"
        return Task(t, name, classes, splits, partial(part_of_classes, classes=classes, transform=transform))

    return Stream(images.classes // classes_per_task, make)


def part_of_classes(part: Part, classes: tuple[int, ...], transform: Callable[[Tensor], Tensor]) -> Part:
    """The images of consecutive classes, labels counted from the first of them."""
    chosen = ((part.y >= classes[0]) & (part.y <= classes[-1])).nonzero().squeeze(1)
    return Part(transform(part.x.index_select(0, chosen)), part.y.index_select(0, chosen) - classes[0])
