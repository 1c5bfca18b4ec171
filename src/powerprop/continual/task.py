"""Tasks from a user's own tensors, the three scenarios of continual learning, and what a strategy answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from powerprop.batches import Part, Splits

__all__ = ["SCENARIOS", "Prediction", "Scenario", "Task", "are_labels", "make_task"]

Scenario = Literal["task-incremental", "domain-incremental", "class-incremental"]
"""What is known and asked when a network that learned several tasks is evaluated (van de Ven & Tolias, 2019).

task-incremental: the task is given, which of its classes?
domain-incremental: the task is not given, which class, of a list that all tasks share?
class-incremental: the task is not given, which class of all tasks together? The task must be found out too.
"""

SCENARIOS: tuple[Scenario, ...] = get_args(Scenario)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, repr=False)
class Task:
    """One task of a stream. It keeps no images: every call of train(), validation() or test() makes them.

    Labels are local, 0..k-1; `classes` gives each its number in the whole stream, where no two tasks share one.
    """

    index: int
    name: str
    classes: tuple[int, ...] | None
    splits: Splits
    view: Callable[[Part], Part]

    def train(self) -> Part:
        return self.view(self.splits.train)

    def validation(self) -> Part:
        return self.view(self.splits.validation)

    def test(self) -> Part:
        return self.view(self.splits.test)

    def global_labels(self, y: Tensor) -> Tensor:
        """Labels numbered over the whole stream, as class-incremental learning needs them."""
        if self.classes is None:
            raise ValueError(f"{self.name}: its targets are not labels, so that it has no classes")
        return torch.tensor(self.classes, device=y.device)[y]

    def __repr__(self) -> str:
        return f"Task({self.index}, {self.name!r})"


class Prediction(NamedTuple):
    """For every input the task it was taken to belong to (-1 is unknown), the class within that task, and how unsure.

    The entropy of the answer is a fraction of its maximum, the logarithm of the number of classes. number is the class
    in the whole stream, -1 where the task is unknown.
    """

    task: Tensor
    label: Tensor
    entropy: Tensor
    number: Tensor


def entropy(logits: Tensor) -> Tensor:
    """H(softmax) of every row, as a fraction of its maximum, the logarithm of the number of classes."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1) / math.log(max(2, logits.shape[1]))


def no_answers(device: torch.device) -> Prediction:
    """The answer to no inputs."""
    none = torch.zeros(0, dtype=torch.long, device=device)
    return Prediction(none, none, none.float(), none)


def make_task(
    train: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor] | None = None,
    test: tuple[Tensor, Tensor] | None = None,
    *,
    name: str = "",
    index: int = 0,
    classes: Sequence[int] | None = None,
    seed: int = 0,
) -> Task:
    """A task from tensors: inputs, and labels that are integers from 0, or targets of another kind.

    validation: by default a tenth of the training rows, drawn from the seed, is held back for it.
    test: by default the validation data.
    index: the place in the stream; a learner takes tasks in the order of their indices, from 0.
    classes: the number of each class in the whole stream; by default the task's own labels. Class-incremental
        evaluation needs numbers that no two tasks share. Targets other than integers (N,) have none.

    Examples:
        >>> task = continual.make_task((x, y), index=0)
    """
    name = name or f"task {index}"
    given = {"train": train, "validation": validation, "test": test}
    parts = {key: _part(name, key, *pair) for key, pair in given.items() if pair is not None}
    numbers = _numbers(name, parts, classes)
    if validation is None:
        parts["train"], parts["validation"] = _held_back(name, parts["train"], seed)
    splits = Splits(parts["train"], parts["validation"], parts.get("test", parts["validation"]))
    return Task(index, name, numbers, splits, lambda part: part)


def _part(name: str, key: str, x: Tensor, y: Tensor) -> Part:
    if len(x) != len(y):
        raise ValueError(f"task {name!r}: {key}: expected as many labels as inputs, got {len(x)} and {len(y)}")
    if not len(x):
        raise ValueError(f"task {name!r}: {key} has no inputs")
    return Part(x, y.long() if are_labels(y) else y)


def are_labels(y: Tensor) -> bool:
    """True for class labels, integers (N,); targets of regressions and of several labels are not."""
    return y.ndim == 1 and y.dtype in INTEGERS


def _numbers(name: str, parts: Mapping[str, Part], classes: Sequence[int] | None) -> tuple[int, ...] | None:
    """The classes of a task that has labels, in the numbers of the stream."""
    for key, part in parts.items():
        if not are_labels(part.y):
            if classes is None:
                return None
            found = f"{part.y.dtype} {tuple(part.y.shape)}"
            raise ValueError(f"task {name!r}: classes are of labels, integers (N,), but {key} has {found}")
    top = max(int(part.y.max()) for part in parts.values())
    numbers = tuple(range(1 + max(0, top)) if classes is None else classes)
    if len(set(numbers)) < len(numbers) or min(numbers, default=0) < 0:
        raise ValueError(f"task {name!r}: classes must be different numbers from 0 on, got {numbers}")
    for key, part in parts.items():
        low, high = (int(end) for end in torch.aminmax(part.y))
        if low < 0 or high >= len(numbers):
            expected = f"0..{len(numbers) - 1} (classes={numbers})"
            raise ValueError(f"task {name!r}: labels of {key} must be {expected}, got {low}..{high}")
    return numbers


def _held_back(name: str, part: Part, seed: int) -> tuple[Part, Part]:
    """Nine tenths of the rows and the rest, in their order: periodic rows may be of another kind than those between."""
    count = len(part.x)
    if count < 2:
        raise ValueError(f"task {name!r}: expected two or more inputs to hold some back for validation, got {count}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    held = torch.zeros(count, dtype=torch.bool)
    held[order[: max(1, count // 10)]] = True
    rest, tenth = (Part(*(each[rows.to(each.device)] for each in part)) for rows in (~held, held))
    return rest, tenth


def check_scenario(scenario: str) -> None:
    """An unknown scenario is an error that lists the known ones."""
    if scenario not in SCENARIOS:
        raise ValueError(f"scenario must be one of {', '.join(SCENARIOS)}, got {scenario!r}")


def check_distinct(classes: Sequence[tuple[int, ...] | None]) -> None:
    """Class-incremental evaluation asks which class of all tasks: an error if two tasks share one."""
    times = Counter(number for of_task in classes for number in of_task or ())
    if shared := sorted(number for number, count in times.items() if count > 1):
        text = f"class-incremental evaluation needs classes that no two tasks share, got {shared} more than once"
        raise ValueError(f"{text}; give each task its own through classes=, or evaluate domain-incremental")
