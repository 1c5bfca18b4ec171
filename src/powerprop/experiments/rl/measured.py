"""The numbers of the table: average success, forgetting, and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from powerprop.experiments.rl.methods import Arm
from powerprop.experiments.rl.results import Learned

LEVEL, RESAMPLES = 0.9, 10_000


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its confidence interval; of one seed there is none."""

    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        bounds = "" if self.low is None or self.high is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.mean:.2f}{bounds}"


def bootstrap(values: Sequence[float], level: float = LEVEL) -> Interval:
    """The mean and the middle 90% of means of as many values drawn again with replacement (Efron, 1979)."""
    if not values:
        raise ValueError("an interval needs at least one value, got none")
    if len(values) == 1:
        return Interval(float(values[0]), None, None)
    drawn = np.random.default_rng(0).choice(np.asarray(values, float), (RESAMPLES, len(values))).mean(1)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(fmean(values), float(low), float(high))


@dataclass(frozen=True)
class Measured:
    """A row with its runs, one for each seed."""

    arm: Arm
    runs: Sequence[Learned]

    def success(self) -> Interval:
        """Average success over all tasks at the very end."""
        return bootstrap([fmean(run.final) for run in self.runs])

    def forgetting(self) -> Interval:
        """Success at the end of a task's training, before pruning, minus that at the very end, averaged over tasks."""
        return bootstrap([fmean(a - b for a, b in zip(run.trained, run.final, strict=True)) for run in self.runs])

    def of_task(self, task: int) -> tuple[float, float, float]:
        """Mean success on a task: trained, packed, at the very end."""
        means = [
            fmean(each)
            for each in zip(*((r.trained[task], r.packed[task], r.final[task]) for r in self.runs), strict=True)
        ]
        return means[0], means[1], means[2]

    def moved(self) -> float:
        """The largest change of an action of any task but the last, in any run."""
        return max((value for run in self.runs for value in run.moved[:-1]), default=0.0)

    def curve(self, task: int) -> tuple[list[int], list[list[float]]]:
        """Steps in all, and the success on a task of every run, from when it has begun."""
        steps = [each.step for each in self.runs[0].curve if task < len(each.success)]
        return steps, [[each.success[task] for each in run.curve if task < len(each.success)] for run in self.runs]
