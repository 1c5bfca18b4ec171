"""Rotated images: a stream whose tasks see every image turned by an angle of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from powerprop.data.images import Images, Part, to_float
from powerprop.data.streams import Stream, Task

CHUNK_ROWS = 4096
"""Images that are turned at a time: their float copies take little memory."""


def rotated(
    images: Images,
    tasks: int,
    seed: int,
    *,
    degrees: float = 180.0,
    validation: int = 5000,
    identity_first: bool = False,
    transform: Callable[[Tensor], Tensor] = to_float,
) -> Stream:
    """Rotated images: task t sees every image turned by a fixed angle of its own (Lopez-Paz & Ranzato, 2017).

    The angle is drawn evenly from [0, degrees), from (seed, t) alone, so that task 250 needs none of the 249 before it.
    Task t has the local labels of the data and the stream's classes kt..kt+k-1.

    Args:
        degrees: the angles' upper end; they turn counter-clockwise.
        validation: how many of the last training images are for validation.
        identity_first: leave the images of task 0 as they are.
        transform: from bytes to what the network sees, applied after the rotation.
    """
    if tasks < 1:
        raise ValueError(f"tasks must be at least 1, got {tasks}")
    if not 0 < degrees <= 360:
        raise ValueError(f"degrees must be in (0, 360], got {degrees}")
    splits, k = images.split_validation(validation), images.classes

    def make(t: int) -> Task:
        angle = 0.0 if identity_first and t == 0 else degrees * task_fraction(seed, t)
        classes = tuple(range(k * t, k * (t + 1)))
        view = partial(rotated_part, angle=angle, transform=transform)
        return Task(t, f"rotation {angle:.1f}°", classes, splits, view)

    return Stream(tasks, make)


def task_fraction(seed: int, task: int) -> float:
    """A number in [0, 1) for one task, from a generator whose streams numpy has frozen for good."""
    bits = np.random.MT19937(np.random.SeedSequence([seed, task]))
    return float(np.random.RandomState(bits).random_sample())


def rotated_part(part: Part, angle: float, transform: Callable[[Tensor], Tensor]) -> Part:
    """The images turned by the angle, in degrees; 0 leaves them as they are."""
    return Part(transform(rotate(part.x, angle) if angle else part.x), part.y)


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
