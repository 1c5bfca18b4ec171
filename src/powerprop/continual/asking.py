"""Which tasks a learner can be asked about, and what it answers where no task is given and every task has a head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from powerprop.continual.now import TaskId
from powerprop.continual.objective import Classification

if TYPE_CHECKING:
    from powerprop.continual.strategy import Strategy

__all__ = ["over_heads", "place_of"]


def place_of(learner: Strategy, task: TaskId | None, known: bool = True) -> int | None:
    """The place of a task in the order of learning, by what it is called; None is no task.

    known: whether a task that comes later is an error where it cannot be answered for.
    """
    ids = learner.ids + ([learner.now.id] if learner.now is not None and learner.now.task == len(learner.ids) else [])
    if isinstance(task, bool) or not (task is None or isinstance(task, (int, str))):
        raise TypeError(f"task must be the number or the name of a task, or None, got {task!r}")
    if not ids or (task is None and not learner.tasks):
        if not known:
            return 0
        raise ValueError(f"task must be learned first: none is yet, got {task!r}")
    if task is None or task in ids:
        return None if task is None else ids.index(task)
    counted = ids == list(range(len(ids)))
    later = (learner.heads is None and learner.objective.shared_outputs) or not known
    limit = math.inf if later else len(ids)
    if counted and isinstance(task, int) and 0 <= task < limit:
        return task
    which = f"in 0..{len(ids) - 1}" if counted else f"one of {', '.join(map(repr, ids))}"
    raise ValueError(f"task must be {which} (the tasks learned so far), got {task!r}")


def over_heads(learner: Strategy, x: Any) -> Any:
    """All heads are asked, and the class with the largest output wins."""
    if not isinstance(learner.objective, Classification):
        kind = type(learner.objective).__name__
        raise ValueError(f"predict with {kind} needs the task: every task has an output layer of its own")
    return learner.objective.likeliest([learner.logits(x, each) for each in learner.ids])
