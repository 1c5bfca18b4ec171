"""A whole stream of tasks: learn, evaluate, save, and go on after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from powerprop.continual.metrics import Accuracies, accuracy_on
from powerprop.continual.strategy import Progress, Strategy
from powerprop.continual.task import Scenario, Task

__all__ = ["learn_stream"]


def learn_stream(
    learner: Strategy,
    stream: Sequence[Task],
    scenarios: Sequence[Scenario] = ("task-incremental",),
    *,
    checkpoint: str | Path | None = None,
    after_task: Callable[[Task], None] | None = None,
    future: bool = False,
    progress: Progress | None = None,
    **how: Any,
) -> dict[Scenario, Accuracies]:
    """Learn all tasks of a stream and evaluate all that are known after each.

    checkpoint: file that the learner is saved to after every task; if it exists, the rest is learned bit for bit as if
        there had been no interruption.
    after_task: called with every task once it is learned and evaluated, before the learner is saved.
    future: evaluate tasks before they are learned too, as forward transfer needs it (not for methods that mask).
    how: further arguments of the learner's `predict`.
    """
    if checkpoint is not None and Path(checkpoint).exists():
        learner.load(checkpoint)
    rows: dict[str, list[list[float]]] = learner.records.setdefault("accuracies", {s: [] for s in scenarios})
    for index in range(learner.current, len(stream)):
        task = stream[index]
        learner.learn(task, progress)
        known = [stream[j] for j in range(len(stream) if future else index + 1)]
        for scenario in scenarios:
            rows[scenario].append([accuracy_on(learner, each, scenario, **how) for each in known])
        if after_task is not None:
            after_task(task)
        if checkpoint is not None:
            learner.save(checkpoint)
    return {scenario: Accuracies(scenario, rows[scenario]) for scenario in scenarios}
