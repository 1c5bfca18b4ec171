"""What one learner of a benchmark found, as it stands in result.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Learned:
    """A learner after its last task.

    Args:
        accuracies: by scenario, rows[i][j], the test accuracy on task j after task i.
        validation: by scenario, average validation accuracy over all tasks after the last, if anything is chosen by it.
        memory_bytes: what the method keeps beyond the model.
        seconds: of learning and evaluation.
        together: class-incremental accuracy, where the task is inferred from a group of images; None for methods that
            infer none.
        note: what is to be said of the data.
    """

    accuracies: dict[str, list[list[float]]]
    validation: dict[str, float]
    memory_bytes: int
    seconds: float
    together: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        for scenario, rows in self.accuracies.items():
            if not rows or not all(rows):
                raise ValueError(f"'accuracies.{scenario}' must have a row for every task, got {len(rows)}")
