"""Where a learner stands: the task in hand, the tasks behind it, and what methods hand to the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from powerprop.continual.task import Task

__all__ = ["Learned", "Now", "Rehearsal", "Stateful", "next_task"]


TaskId = int | str
"""What a user calls a task."""


class Stateful(Protocol):
    """A part of a method whose state is saved with the learner: masks, importances, a memory."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None: ...


class Learned(NamedTuple):
    """What is remembered of a task: its name, the numbers of its classes in the stream if it has any, and what the user
    calls it: by default its place in the order of learning."""

    name: str
    classes: tuple[int, ...] | None
    id: TaskId


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
    id: TaskId
    name: str
    classes: tuple[int, ...] | None
    steps: int | None
    """How many steps the phase will have, if that is known."""
    phase: str = "training"
    step: int = 0
    """Steps of the phase that are done."""
    batch: Any = None
    """What the current step is about, if the loop says so."""
    batches: list[Any] = field(default_factory=list)
    """Those whose gradients have come together for the step in hand."""
    rehearsals: list[Rehearsal] | None = None
    """What the step in hand rehearses, as soon as it is drawn."""
    generators: dict[str, torch.Generator] = field(default_factory=dict)

    def forget_batches(self) -> None:
        """The next step begins."""
        self.batch, self.batches, self.rehearsals = None, [], None

    @property
    def done(self) -> float:
        """The fraction of the phase that is done."""
        if self.steps is None:
            raise ValueError(f"task {self.task}: how many steps there will be is not known; say begin(…, steps=…)")
        return self.step / self.steps


def next_task(
    learned: Sequence[Learned], task: TaskId | Task | None, classes: Sequence[int] | None, steps: int | None, name: str,
    again: bool,
) -> Now:  # fmt: skip
    """The beginning of a task, from what `Strategy.begin` was given of it; its number is its place in the order."""
    ids = [each.id for each in learned]
    given = task.index if isinstance(task, Task) else task
    found = (next_free(ids) if given is None else given) if not again else given
    if isinstance(found, bool) or not isinstance(found, (int, str)) or (isinstance(found, int) and found < 0):
        raise TypeError(f"a task is a number from 0 on, a name or a Task, got {found!r}")
    name = task.name if isinstance(task, Task) else name or f"task {found}"
    if (found in ids) != again:
        known = f"{name}: {found!r} was learned already" if not again else f"{name}: {found!r} was not learned yet"
        raise ValueError(f"{known} ({', '.join(map(repr, ids)) or 'nothing'} was): expected again={not again} for it")
    classes = task.classes if isinstance(task, Task) else classes
    own = None if classes is None else tuple(classes)
    if again and own is None:
        own = learned[ids.index(found)].classes
    return Now(ids.index(found) if again else len(ids), found, name, own, steps)


def next_free(ids: Sequence[TaskId]) -> int:
    """The number that a task has by default: its place, or the next that no other is called."""
    number = len(ids)
    while number in ids:
        number += 1
    return number
