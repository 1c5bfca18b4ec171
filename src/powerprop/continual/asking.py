"""Which tasks a learner can be asked about, and what it answers where no task is given and every task has a head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from powerprop.continual.objective import Classification

if TYPE_CHECKING:
    from powerprop.continual.strategy import Strategy

__all__ = ["check_task", "over_heads"]


def check_task(learner: Strategy, task: int | None) -> None:
    """An error that names the tasks there are, if this one cannot be answered for."""
    known = learner.current + (learner.now is not None)
    if not learner.tasks and (task is None or not known):
        raise ValueError(f"task must be learned first: none is yet, got {task}")
    limit = known if learner.heads is not None or not learner.objective.shared_outputs else math.inf
    if task is not None and not 0 <= task < limit:
        raise ValueError(f"task must be in 0..{known - 1} (the tasks learned so far), got {task}")


def over_heads(learner: Strategy, x: Tensor) -> Any:
    """All heads are asked, and the class with the largest output wins."""
    if not isinstance(learner.objective, Classification):
        kind = type(learner.objective).__name__
        raise ValueError(f"predict with {kind} needs the task: every task has an output layer of its own")
    return learner.objective.likeliest([learner.logits(x, task) for task in range(learner.current)])
