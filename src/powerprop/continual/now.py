"""Where a learner stands: the task in hand, the tasks behind it, and what methods hand to the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from powerprop.continual.task import Task

__all__ = ["Learned", "Now", "Rehearsal", "Stateful", "next_task"]


class Stateful(Protocol):
    """A part of a method whose state is saved with the learner: masks, importances, a memory."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None: ...


class Learned(NamedTuple):
    """What is remembered of a task: its name and, if it has any, the numbers of its classes in the stream."""

    name: str
    classes: tuple[int, ...] | None


class Rehearsal(NamedTuple):
    """A batch to train on beside the current one, and its share of the loss; the current batch has what is left of 1.

    task: that of the batch; or a tensor with the task of each example, if the objective `mixes_tasks`.
    loss: of (model, batch, task); by default the objective's.
    """

    batch: Any
    task: int | Tensor
    share: float
    loss: Callable[[Any, Any, Any], Tensor] | None = None


@dataclass
class Now:
    """Where a task that is being learned stands; every verb can see it."""

    task: int
    name: str
    classes: tuple[int, ...] | None
    steps: int | None
    """How many steps the phase will have, if that is known."""
    phase: str = "training"
    step: int = 0
    """Steps of the phase that are done."""
    batch: Any = None
    """What the current step is about, if the loop says so."""
    generators: dict[str, torch.Generator] = field(default_factory=dict)

    @property
    def done(self) -> float:
        """The fraction of the phase that is done."""
        if self.steps is None:
            raise ValueError(f"task {self.task}: how many steps there will be is not known; say begin(…, steps=…)")
        return self.step / self.steps


def next_task(
    current: int, task: int | Task | None, classes: Sequence[int] | None, steps: int | None, name: str
) -> Now:
    """The beginning of the task with the number `current`, from what `Strategy.begin` was given of it."""
    index, name = (task.index, task.name) if isinstance(task, Task) else (task, name or f"task {current}")
    if index is not None and index != current:
        raise ValueError(f"{name}: expected the task with index {current}, got {index}")
    classes = task.classes if isinstance(task, Task) else classes
    return Now(current, name, None if classes is None else tuple(classes), steps)
