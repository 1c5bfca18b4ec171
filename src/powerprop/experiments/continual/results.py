"""What one continual-learning run found, as it stands in result.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Probe:
    """How well tasks were inferred when so many were known: rates[method][group] = [right task, right class]."""

    tasks: int
    rates: dict[str, dict[str, tuple[float, float]]]


@dataclass(frozen=True)
class Inferred:
    """All test images of every task with the task inferred from groups: accuracy, and confusion[true][inferred]."""

    group: int
    accuracy: list[float]
    confusion: list[list[float]]


@dataclass(frozen=True)
class Learned:
    """A learner after its last task.

    Args:
        accuracy: of each task right after it was learned, the task given.
        used: fraction of weights used by all tasks so far, after each.
        inference: probes of task inference at several numbers of tasks, the last at the end.
        note: what is to be said of the data.
        matrix: matrix[i][j], accuracy on task j after task i, the task given; empty if it was not measured.
        class_incremental: None if it was not measured on the whole test sets.
    """

    accuracy: list[float]
    used: list[float]
    inference: list[Probe]
    note: str = ""
    matrix: list[list[float]] | None = None
    class_incremental: Inferred | None = None

    def __post_init__(self) -> None:
        for name in ("accuracy", "used", "inference"):
            if not getattr(self, name):
                raise ValueError(f"{name!r} must not be empty")
        if len(self.used) != len(self.accuracy):
            raise ValueError(f"'used' must have {len(self.accuracy)} values, one per task, got {len(self.used)}")
