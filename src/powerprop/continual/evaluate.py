"""How well a sequence of tasks was learned: a whole stream of them, accuracies by scenario, measures made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from powerprop.batches import Part
from powerprop.continual.combine import having
from powerprop.continual.objective import Classification
from powerprop.continual.strategy import Progress, Strategy
from powerprop.continual.task import Prediction, Scenario, Task, check_distinct, check_scenario

__all__ = ["Accuracies", "accuracy_on", "correct", "learn_stream"]


def accuracy_on(learner: Strategy, task: Task, scenario: Scenario, part: Part | None = None, **options: Any) -> float:
    """The fraction of a task's test set (or another part of it) that is classified correctly in a scenario.

    For objectives without classes it is their score, which is task-incremental: the task is given.
    options: further arguments of the learner's `predict`, such as the size of the groups that share a task.

    Examples:
        >>> learner = continual.Naive(model, sgd, steps=20)
        >>> learner.learn(task := continual.make_task((x, y), test=(x, y)))
        >>> accuracy = continual.accuracy_on(learner, task, "task-incremental")
    """
    check_scenario(scenario)
    x, y = task.test() if part is None else part
    if not isinstance(learner.objective, Classification):
        if scenario != "task-incremental":
            kind = type(learner.objective).__name__
            raise ValueError(f"{kind} has no classes to tell apart: expected task-incremental, got {scenario}")
        return learner.score((x, y), task.index)
    if scenario == "class-incremental":
        check_distinct([each.classes for each in learner.tasks])
    given = task.index if scenario == "task-incremental" else None
    return correct(learner.predict(x, given, **options), task, y, scenario)


def correct(found: Prediction, task: Task, y: torch.Tensor, scenario: Scenario) -> float:
    """The fraction of a prediction that is right: the class within the task, or of all classes if that is asked."""
    y = y.to(found.label.device)
    right = found.number == task.global_labels(y) if scenario == "class-incremental" else found.label == y
    return float(right.double().mean())


@dataclass
class Accuracies:
    """R[i, j], the test accuracy on task j after learning task i, in one named scenario; NaN where not measured.

    rows: one list per task learned, of as many values as tasks were evaluated.

    Examples:
        >>> R = continual.Accuracies("task-incremental", [[0.9, float("nan")], [0.8, 0.9]])
        >>> round(R.average(), 2), round(R.forgetting(), 2)
        (0.85, 0.1)
    """

    scenario: Scenario
    rows: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_scenario(self.scenario)

    def matrix(self) -> list[list[float]]:
        """All rows at the same length."""
        width = max((len(row) for row in self.rows), default=0)
        return [row + [math.nan] * (width - len(row)) for row in self.rows]

    def average(self, after: int | None = None) -> float:
        """The mean over the tasks learned, after the last one (or after task number `after`)."""
        last = self._last() if after is None else after
        return fmean(self.rows[last][: last + 1])

    def backward_transfer(self) -> float:
        """Mean of R[T, j] - R[j, j] over the earlier tasks: below zero is forgetting (Lopez-Paz & Ranzato, 2017)."""
        last = self._last(2)
        return fmean(self.rows[last][j] - self.rows[j][j] for j in range(last))

    def forgetting(self) -> float:
        """Mean of max_i R[i, j] - R[T, j] over the earlier tasks: what was once known and is lost (Chaudhry, 2018)."""
        last = self._last(2)
        return fmean(max(self.rows[i][j] for i in range(j, last)) - self.rows[last][j] for j in range(last))

    def forward_transfer(self, untrained: Sequence[float]) -> float:
        """Mean of R[j - 1, j] minus the accuracy of an untrained network: what a task gains before it is learned.

        untrained: accuracies of the network with its first weights on every task.
        """
        last = self._last(2)
        if any(len(self.rows[j - 1]) <= j for j in range(1, last + 1)):
            raise ValueError("forward transfer needs every task evaluated before it is learned")
        return fmean(self.rows[j - 1][j] - untrained[j] for j in range(1, last + 1))

    def summary(self) -> dict[str, Any]:
        """The measures as plain data, with the scenario's name."""
        many = len(self.rows) > 1
        return {
            "scenario": self.scenario,
            "tasks": len(self.rows),
            "average": self.average(),
            "backward_transfer": self.backward_transfer() if many else None,
            "forgetting": self.forgetting() if many else None,
        }

    def _last(self, least: int = 1) -> int:
        if len(self.rows) < least:
            raise ValueError(f"this needs {least} or more learned tasks, got {len(self.rows)}")
        return len(self.rows) - 1


def learn_stream(
    learner: Strategy, stream: Sequence[Task], scenarios: Sequence[Scenario] = ("task-incremental",), *,
    checkpoint: str | Path | None = None, after_task: Callable[[Task], None] | None = None, future: bool = False,
    progress: Progress | None = None, **options: Any,
) -> dict[Scenario, Accuracies]:  # fmt: skip
    """Learn all tasks of a stream and evaluate all that are known after each.

    stream: the place of a task in it is its index, whatever it was made with.
    checkpoint: file that the learner is saved to after every task; if it exists, the rest is learned bit for bit as if
        there had been no interruption.
    after_task: called with every task once it is learned and evaluated, before the learner is saved.
    future: evaluate tasks before they are learned too, as forward transfer needs it. Methods that mask have no
        sub-network for them yet: their forward transfer is domain-incremental, from the sub-network that is surest.
    options: further arguments of the learner's `predict`.

    Examples:
        >>> stream = [continual.make_task((x, y), test=(x, y), index=t) for t in range(2)]
        >>> found = continual.learn_stream(continual.Naive(model, sgd, steps=20), stream)
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
    if set(rows) != set(scenarios):
        asked, known = ", ".join(scenarios) or "none", ", ".join(rows) or "none"
        raise ValueError(f"scenarios must be {known}, in which the learner's tasks were evaluated, got {asked}")
    for name, found in rows.items():
        if len(found) != learner.current:
            text = f"the learner knows {learner.current} tasks and has {len(found)} rows of {name} accuracies"
            raise ValueError(f"{text}; expected a row for each, as a learner has that learned by learn_stream alone")
    learner.records["accuracies"] = rows
    return rows


def _check_future(learner: Strategy, scenarios: Sequence[Scenario]) -> None:
    missing = None if learner.objective.shared_outputs else "classes among the outputs"
    missing = "sub-network" if having(type(learner), "keeps answers") else missing
    if missing and "task-incremental" in scenarios:
        text = f"a task has no {missing} before it is learned, so that with future=True scenarios must be others than"
        raise ValueError(f"{text} task-incremental, got {', '.join(scenarios)}")
