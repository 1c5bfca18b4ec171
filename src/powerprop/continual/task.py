"""Tasks from a user's own tensors, the three scenarios of continual learning, and what a strategy answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from powerprop.data.images import Part, Splits
from powerprop.data.streams import Task

__all__ = ["SCENARIOS", "Prediction", "Scenario", "Task", "make_task"]

Scenario = Literal["task-incremental", "domain-incremental", "class-incremental"]
"""What is known and asked when a network that learned several tasks is evaluated (van de Ven & Tolias, 2019).

task-incremental: the task is given, which of its classes?
domain-incremental: the task is not given, which class, of a list that all tasks share?
class-incremental: the task is not given, which class of all tasks together? The task must be found out too.
"""

SCENARIOS: tuple[Scenario, ...] = get_args(Scenario)


class Prediction(NamedTuple):
    """For every input the task it was taken to belong to (-1 is unknown), the class within that task, and how unsure.

    The entropy of the answer is a fraction of its maximum, the logarithm of the number of classes.
    """

    task: Tensor
    label: Tensor
    entropy: Tensor


def entropy(logits: Tensor) -> Tensor:
    """H(softmax) of every row, as a fraction of its maximum, the logarithm of the number of classes."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1) / math.log(max(2, logits.shape[1]))


def make_task(
    train: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor] | None = None,
    test: tuple[Tensor, Tensor] | None = None,
    *,
    name: str = "",
    index: int = 0,
    classes: Sequence[int] | None = None,
) -> Task:
    """A task from tensors (inputs, labels from 0); without validation data the last tenth of the training data serves.

    classes: the number of each class in the whole stream; by default the task's own labels. Class-incremental
        evaluation needs numbers that no two tasks share.
    """
    parts = [Part(*pair) for pair in (train, validation, test) if pair is not None]
    for part in parts:
        if len(part.x) != len(part.y) or not len(part.x):
            raise ValueError(f"task {name!r}: expected as many labels as inputs, got {len(part.x)} and {len(part.y)}")
    first = parts[0]
    if validation is None:
        cut = len(first.x) - max(1, len(first.x) // 10)
        first, held = Part(first.x[:cut], first.y[:cut]), Part(first.x[cut:], first.y[cut:])
    else:
        held = parts[1]
    numbers = range(1 + max(int(part.y.max()) for part in parts)) if classes is None else classes
    splits = Splits(first, held, held if test is None else parts[-1])
    return Task(index, name or f"task {index}", tuple(numbers), splits, _as_it_is)


def _as_it_is(part: Part) -> Part:
    return part


def check_scenario(scenario: str) -> None:
    """An unknown scenario is an error that lists the known ones."""
    if scenario not in SCENARIOS:
        raise ValueError(f"scenario must be one of {', '.join(SCENARIOS)}, got {scenario!r}")


def derived_seed(seed: int, *parts: int) -> int:
    """A seed for one purpose, such as the batches of task 17, so that it needs nothing that was drawn before it."""
    return int(np.random.SeedSequence([seed, *parts]).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Let layers that know torch's global generator only (dropout) draw from this seed, and put its state back."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield
