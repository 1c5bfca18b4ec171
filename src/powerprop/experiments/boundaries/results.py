"""What one learner found in a stream without boundaries, as it stands in result.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Streamed:
    """A learner after the stream.

    Args:
        seed: of the run.
        true: the first batches of all tasks but the first.
        found: (batch at which a change was noticed, first batch of the new task) of every alarm.
        delays: batches from each change that was found to its alarm.
        missed: the changes that were not found.
        false: alarms where nothing had changed.
        given, inferred: accuracy on each true task, with the task given and inferred.
        used: fraction of weights used.
        losses: of every batch when it arrived.
        note: what is to be said of the data.
    """

    seed: int
    true: list[int]
    found: list[tuple[int, int]]
    delays: list[int]
    missed: list[int]
    false: list[int]
    given: list[float]
    inferred: list[float]
    used: float
    losses: list[float]
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("given", "inferred", "losses"):
            if not getattr(self, name):
                raise ValueError(f"{name!r} must not be empty")
