"""Sequences of tasks made from one image set, each task only when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import overload

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from powerprop.batches import Part
from powerprop.continual.task import Task
from powerprop_paper.data.images import Images, to_float

DEGREES = 180.0
"""Where the angles of rotated tasks end."""
CHUNK_ROWS = 4096
"""Images that are turned at a time: their float copies take little memory."""


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
    images: Images, tasks: int, seed: int, *, validation: int = 5000, transform: Callable[[Tensor], Tensor] = to_float
) -> Stream:
    """Permuted images: task t sees every image with its pixels in a fixed random order of its own.

    The order is drawn from (seed, t) alone, so that task 250 needs none of the 249 before it. Task t has the
    local labels of the data and the stream's classes kt..kt+k-1.

    validation: how many of the last training images are for validation.
    transform: from bytes to what the network sees, applied after the permutation.
    """

    def make(t: int) -> tuple[str, Callable[[Tensor], Tensor]]:
        order = pixel_order(images.shape[1] * images.shape[2], seed, t).to(images.train_x.device)
        return f"permutation {t}", lambda x: transform(x.flatten(2)[:, :, order].view_as(x))  # all channels alike

    return _all_classes(images, tasks, validation, make)


def rotated(
    images: Images, tasks: int, seed: int, *, validation: int = 5000, transform: Callable[[Tensor], Tensor] = to_float
) -> Stream:
    """Rotated images: task t sees every image turned by an angle of its own (Lopez-Paz & Ranzato, 2017).

    The angle is drawn evenly from [0°, 180°), from (seed, t) alone; they turn counter-clockwise. The rest is as in
    `permuted`.
    """

    def make(t: int) -> tuple[str, Callable[[Tensor], Tensor]]:
        angle = DEGREES * task_fraction(seed, t)
        return f"rotation {angle:.1f}°", lambda x: transform(rotate(x, angle))

    return _all_classes(images, tasks, validation, make)


def _all_classes(
    images: Images, tasks: int, validation: int, make: Callable[[int], tuple[str, Callable[[Tensor], Tensor]]]
) -> Stream:
    """Tasks of all classes, which differ in their name and in what becomes of images alone."""
    if tasks < 1:
        raise ValueError(f"tasks must be at least 1, got {tasks}")
    splits, k = images.split_validation(validation), images.classes

    def task(t: int) -> Task:
        name, seen = make(t)
        return Task(t, name, tuple(range(k * t, k * (t + 1))), splits, lambda part: Part(seen(part.x), part.y))

    return Stream(tasks, task)


def _random(seed: int, task: int) -> np.random.RandomState:
    """The generator of one task, whose streams numpy has frozen for good."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, task])))


def pixel_order(pixels: int, seed: int, task: int) -> Tensor:
    """The permutation of one task."""
    return torch.from_numpy(_random(seed, task).permutation(pixels))


def task_fraction(seed: int, task: int) -> float:
    """A number in [0, 1) for one task."""
    return float(_random(seed, task).random_sample())


def rotate(x: Tensor, angle: float) -> Tensor:
    """Byte images (N, C, H, W) turned counter-clockwise about their middle: bilinear, black from outside, rounded."""
    h, w = x.shape[2:]
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    # Where an output pixel comes from, in coordinates that run from -1 to 1 along either side.
    source = torch.tensor([[cos, -sin * h / w, 0.0], [sin * w / h, cos, 0.0]], device=x.device)
    grid = F.affine_grid(source.unsqueeze(0), [1, 1, h, w], align_corners=False)
    turned = torch.empty_like(x)
    for first in range(0, len(x), CHUNK_ROWS):
        rows = x[first : first + CHUNK_ROWS].float()
        sampled = F.grid_sample(rows, grid.expand(len(rows), -1, -1, -1), align_corners=False)
        turned[first : first + CHUNK_ROWS] = sampled.round_().clamp_(0, 255)
    return turned


def split(
    images: Images, classes_per_task: int, *, validation: int = 5000, transform: Callable[[Tensor], Tensor] = to_float
) -> Stream:
    """Split images: the classes in their order, `classes_per_task` of them in each task.

    Split-MNIST is split(mnist, 2): five tasks of two digits; Split-CIFAR100 is split(cifar100, 10).

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

        def view(part: Part) -> Part:
            """The images of the task's classes, labels counted from the first of them."""
            chosen = ((part.y >= classes[0]) & (part.y <= classes[-1])).nonzero().squeeze(1)
            return Part(transform(part.x.index_select(0, chosen)), part.y.index_select(0, chosen) - classes[0])

        return Task(t, name, classes, splits, view)

    return Stream(images.classes // classes_per_task, make)
