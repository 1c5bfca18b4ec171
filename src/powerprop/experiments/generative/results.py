"""What one learner of ten characters found, as it stands in result.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuned:
    """A learner after the first tasks.

    Args:
        validation: average validation log-likelihood over them.
        note: what is to be said of the data.
    """

    validation: float
    note: str = ""


@dataclass(frozen=True)
class Learned:
    """A learner after its last task.

    Args:
        curve: curve[i][j], the average test log-likelihood of task j after task i, with few samples of each image.
        final: the same of every task after the last, with many.
        used: fraction of the shared weights that are in use after each task; None for methods that share them all.
        memory_bytes: what the method keeps beyond the model.
        seconds: of learning and evaluation.
        note: what is to be said of the data.
    """

    curve: list[list[float]]
    final: list[float]
    used: list[float] | None
    memory_bytes: int
    seconds: float
    note: str = ""

    def __post_init__(self) -> None:
        tasks = len(self.final)
        if not tasks or [len(row) for row in self.curve] != list(range(1, tasks + 1)):
            lengths = [len(row) for row in self.curve]
            raise ValueError(f"'curve' must have rows of 1..{tasks} values, as 'final' has {tasks}, got {lengths}")

    def unchanged(self) -> bool:
        """True if every task's likelihood is to the bit what it was when the task was learned."""
        return all(value == self.curve[j][j] for row in self.curve for j, value in enumerate(row))
