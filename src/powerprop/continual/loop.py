"""A whole stream of tasks: learn, evaluate, save, and go on after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from powerprop.continual.hat import HAT
from powerprop.continual.metrics import Accuracies, accuracy_on
from powerprop.continual.packing.inferring import Inferring
from powerprop.continual.strategy import Progress, Strategy
from powerprop.continual.task import Scenario, Task, check_distinct, check_scenario

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
    **options: Any,
) -> dict[Scenario, Accuracies]:
    """Learn all tasks of a stream and evaluate all that are known after each.

    stream: the place of a task in it is its index, whatever it was made with.
    checkpoint: file that the learner is saved to after every task; if it exists, the rest is learned bit for bit as if
        there had been no interruption.
    after_task: called with every task once it is learned and evaluated, before the learner is saved.
    future: evaluate tasks before they are learned too, as forward transfer needs it. Methods that mask have no
        sub-network for them yet: their forward transfer is domain-incremental, from the sub-network that is surest.
    options: further arguments of the learner's `predict`.
    """
    if checkpoint is not None and Path(checkpoint).exists():
        learner.load(checkpoint)
    if future:
        _check_future(learner, scenarios)
    learner.check_predict_options(**options)
    rows = _rows(learner, len(stream), scenarios)
    for index in range(learner.current, len(stream)):
        task = _numbered(stream, index)
        if "class-incremental" in scenarios:
            check_distinct([*(each.classes for each in learner.tasks), task.classes])
        learner.learn(task, progress)
        known = [_numbered(stream, j) for j in range(len(stream) if future else index + 1)]
        for scenario in scenarios:
            rows[scenario].append([accuracy_on(learner, each, scenario, **options) for each in known])
        if after_task is not None:
            after_task(task)
        if checkpoint is not None:
            learner.save(checkpoint)
    return {scenario: Accuracies(scenario, rows[scenario]) for scenario in scenarios}


def _numbered(stream: Sequence[Task], index: int) -> Task:
    task = stream[index]
    return task if task.index == index else replace(task, index=index)


def _rows(learner: Strategy, length: int, scenarios: Sequence[Scenario]) -> dict[str, list[list[float]]]:
    """The accuracies so far by scenario, kept in the learner's records."""
    for scenario in scenarios:
        check_scenario(scenario)
    if learner.current > length:
        raise ValueError(f"the learner knows {learner.current} tasks, the stream has {length}")
    rows: dict[str, list[list[float]]] = learner.records.get("accuracies", {s: [] for s in scenarios})
    _check_rows(rows, learner.current, scenarios)
    learner.records["accuracies"] = rows
    return rows


def _check_rows(rows: Mapping[str, Sequence[Sequence[float]]], learned: int, scenarios: Sequence[Scenario]) -> None:
    """One row for every task that was learned, in the scenarios asked for and no others."""
    if set(rows) != set(scenarios):
        asked, known = ", ".join(scenarios) or "none", ", ".join(rows) or "none"
        raise ValueError(f"scenarios must be {known}, in which the learner's tasks were evaluated, got {asked}")
    for scenario, found in rows.items():
        if len(found) != learned:
            text = f"the learner knows {learned} tasks and has {len(found)} rows of {scenario} accuracies"
            raise ValueError(f"{text}; expected a row for each, as a learner has that learned by learn_stream alone")


def _check_future(learner: Strategy, scenarios: Sequence[Scenario]) -> None:
    missing = None if learner.objective.shared_outputs else "classes among the outputs"
    missing = "sub-network" if isinstance(learner, (HAT, Inferring)) else missing
    if missing and "task-incremental" in scenarios:
        text = f"a task has no {missing} before it is learned, so that with future=True scenarios must be others than"
        raise ValueError(f"{text} task-incremental, got {', '.join(scenarios)}")
