"""What one run of the experiment on task inference found, as it stands in result.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Asked:
    """A learner after its last task, asked in every way.

    Args:
        accuracy: the mean over tasks, the task given.
        used: the fraction of weights that some task uses.
        rates: rates[method][group], the fraction of images whose task was inferred rightly.
        unknown: unknown[by][kind], the fraction of images that was flagged as being of no task.
        note: what is to be said of the data.
    """

    accuracy: float
    used: float
    rates: dict[str, dict[str, float]]
    unknown: dict[str, dict[str, float]]
    note: str = ""
