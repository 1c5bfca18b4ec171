"""What one run of robot tasks found, as it stands in result.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Evaluation:
    """Success of every task so far, after so many steps in all."""

    step: int
    success: list[float]


@dataclass(frozen=True)
class Learned:
    """An agent after the last task.

    Args:
        seed: of the run.
        curve: success on the way.
        trained: success on each task at the end of its training, before pruning.
        packed: the same after pruning and retraining; without them the same episodes again.
        final: success on each task at the very end.
        moved: the largest change of an action, on observations of each task, from its end to the very end.
        used: fraction of the actor's weights that tasks use; 1 if the method does not share them out.
        seconds: of learning, evaluation included, since the run was last resumed.
        clips: file names of the clips, task by task; empty if none was drawn.
        note: what is to be said of this run.
    """

    seed: int
    curve: list[Evaluation]
    trained: list[float]
    packed: list[float]
    final: list[float]
    moved: list[float]
    used: float
    seconds: float
    clips: list[str]
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("trained", "packed", "final", "moved"):
            if len(getattr(self, name)) != len(self.final) or not self.final:
                raise ValueError(f"{name!r} must have a value for each task, got {getattr(self, name)}")
