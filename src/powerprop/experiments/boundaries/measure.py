"""How well boundaries were found, and what the learner that found them knows of the true tasks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powerprop.continual import EfficientPackNet
from powerprop.data import Stream


class Match(NamedTuple):
    """Which changes were found: delays of those found, those missed, and alarms where nothing changed."""

    delays: list[int]
    missed: list[int]
    false: list[int]


def match(true: Sequence[int], found: Sequence[int], delay: int) -> Match:
    """A change counts as found by the first alarm from its first batch to `delay` batches later."""
    left, delays, missed = list(found), [], []
    for change in true:
        hit = next((alarm for alarm in left if change <= alarm <= change + delay), None)
        if hit is None:
            missed.append(change)
        else:
            delays.append(hit - change)
            left.remove(hit)
    return Match(delays, missed, left)


def overlaps(lengths: Sequence[int], starts: Sequence[int]) -> Tensor:
    """(true tasks, found tasks): the number of batches that they share, for found tasks with these first batches."""
    ends = torch.tensor(list(accumulate(lengths)))
    begins, first = ends - torch.tensor(lengths), torch.tensor(starts)
    last = torch.cat([first[1:], ends[-1:]])
    return (torch.minimum(ends[:, None], last) - torch.maximum(begins[:, None], first)).clamp(min=0)


def measure(learner: EfficientPackNet, stream: Stream, shared: Tensor, test: int, group: int) -> dict[str, Any]:
    """Accuracy on every true task: with the found task that shares most batches with it, and with the task inferred.

    An inferred task is right if, of all true tasks, it shares most batches with the one the images are of.

    shared: (true tasks, found tasks), see `overlaps`.
    test: the first so many test images of a task are measured; 0 means all.
    group: so many of them have their task inferred together.
    """
    matched, owner = shared.argmax(1).tolist(), shared.argmax(0)
    given, inferred = [], []
    for task in stream:
        x, y = (part[: test or len(part)] for part in task.test())
        given.append(_mean(learner.predict(x, matched[task.index]).label == y))
        guess = learner.predict(x, group=group)
        inferred.append(_mean((owner.to(guess.task.device)[guess.task] == task.index) & (guess.label == y)))
    return {"matched": matched, "given": given, "inferred": inferred, "used": learner.nets.masks.used()}


def _mean(right: Tensor) -> float:
    return float(right.double().mean())
