"""What a learner knows of its tasks: those learned, by the names that the user gave them, and the one in hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from powerprop.continual.task import Task

__all__ = ["Learned", "Now", "Rehearsal", "TaskId", "next_task", "place_of"]

TaskId = int | str
"""What a user calls a task."""


class Learned(NamedTuple):
    """A task that was learned; its classes are numbers in the stream, if it has any."""

    name: str
    classes: tuple[int, ...] | None
    id: TaskId


class Rehearsal(NamedTuple):
    """A batch to train on beside the current one, and its weight in the loss; the current batch has what is left of 1.

    task: that of the batch; or a tensor with the task of each example, if the objective `mixes_tasks`.
    loss: of (model, batch, task); by default the objective's.
    """

    batch: Any
    task: int | Tensor
    weight: float
    loss: Callable[[Any, Any, Any], Tensor] | None = None


@dataclass
class Now:
    """Where a task that is being learned stands; every hook can see it."""

    task: int
    """Its place in the order of learning."""
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
    ids, id = [each.id for each in learned], task
    if isinstance(task, Task):
        id, name, classes = task.index, task.name, task.classes
    elif task is None and not again:
        id = next(number for number in count(len(ids)) if number not in ids)
    if isinstance(id, bool) or not isinstance(id, (int, str)) or (isinstance(id, int) and id < 0):
        raise TypeError(f"a task is a number from 0 on, a name or a Task, got {id!r}")
    name, own = name or f"task {id}", None if classes is None else tuple(classes)
    if (id in ids) != again:
        known = f"{name}: {id!r} was learned already" if not again else f"{name}: {id!r} was not learned yet"
        raise ValueError(f"{known} ({', '.join(map(repr, ids)) or 'nothing'} was): expected again={not again} for it")
    if not again:
        return Now(len(ids), id, name, own, steps)
    before = learned[ids.index(id)].classes
    if own not in (None, before):
        raise ValueError(f"{name}: expected the classes {before} that it had before, got {own}")
    return Now(ids.index(id), id, name, before, steps)


def place_of(ids: Sequence[TaskId], task: TaskId | None, later: bool, known: bool) -> int | None:
    """The place of a task in the order of learning, by what it is called; None is no task.

    later: whether a task that comes later can be answered for.
    known: whether one that cannot is an error.
    """
    if isinstance(task, bool) or not (task is None or isinstance(task, (int, str))):
        raise TypeError(f"task must be the number or the name of a task, or None, got {task!r}")
    if not ids and not known:
        return 0
    if not ids:
        raise ValueError(f"task must be learned first: none is yet, got {task!r}")
    if task is None or task in ids:
        return None if task is None else ids.index(task)
    counted = list(ids) == list(range(len(ids)))
    if counted and isinstance(task, int) and task >= 0 and (later or not known):
        return task
    which = f"in 0..{len(ids) - 1}" if counted else f"one of {', '.join(map(repr, ids))}"
    raise ValueError(f"task must be {which} (the tasks learned so far), got {task!r}")
