"""The results of a continual-learning run, arm by arm: averages over seeds and the numbers of the summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from powerprop.continual import Accuracies, Scenario
from powerprop.experiments.continual.arms import Arm, chosen_candidate
from powerprop.experiments.continual.candidates import with_candidate
from powerprop.experiments.continual.config import Config
from powerprop.experiments.continual.results import Learned
from powerprop.experiments.continual.train import rate
from powerprop.experiments.harness.experiment import Results
from powerprop.experiments.harness.typed import Diverged, result_of
from powerprop.report import Curve, Mean

GIVEN: Scenario = "task-incremental"
INFERRED: Scenario = "class-incremental"


NAMES = {"frugal-packnet": "Frugal EfficientPackNet", "efficient-packnet": "EfficientPackNet", "packnet": "PackNet"}
"""Methods as the table of colours calls them."""


@dataclass(frozen=True)
class Measured:
    """The finished runs of an arm, and what became of those that diverged."""

    arm: Arm
    runs: list[Learned]
    diverged: list[str]
    notes: set[str]
    lr: float
    several: bool = False
    """True if other arms are of another method, so that colours tell methods apart and not powers."""

    def given(self) -> Mean:
        """Average accuracy over all tasks after the last, with the task given."""
        return Mean.of(fmean(run.accuracy) for run in self.runs)

    def worst(self) -> Mean:
        """The lowest accuracy of a task, the task given."""
        return Mean.of(min(run.accuracy) for run in self.runs)

    def inferred(self, group: int) -> Mean:
        """The same with the task inferred by the default method from groups of this size."""
        whole = [run.class_incremental for run in self.runs]
        if all(each is not None and each.group == group for each in whole):
            return Mean.of(fmean(each.accuracy) for each in whole if each is not None)
        return self.probed("shortlist", group, 1)

    def probed(self, method: str, group: int, what: int, at: int = -1) -> Mean:
        """The fraction of right tasks (what = 0) or right classes (1) in a probe of task inference."""
        return Mean.of(run.inference[at].rates[method][str(group)][what] for run in self.runs)

    def used(self) -> Mean:
        """The fraction of weights used after the last task."""
        return Mean.of(run.used[-1] for run in self.runs)

    def forgetting(self) -> Mean:
        """What was once known of earlier tasks and is lost after the last, with the task given."""
        return Mean.of(accuracies.forgetting() for accuracies in self._matrices())

    def backward_transfer(self) -> Mean:
        """What later tasks added to earlier ones, with the task given."""
        return Mean.of(accuracies.backward_transfer() for accuracies in self._matrices())

    def curve(self, values: list[list[float]]) -> Curve:
        """A number after each task, one list per seed."""
        name = NAMES[self.arm.method] if self.several else None
        plain = self.several and self.arm.alpha == 1
        return Curve(self.arm.label, self.arm.alpha, range(1, len(values[0]) + 1), values, name, plain)

    def averages(self) -> Curve:
        """Average accuracy over the tasks learned so far, with the task given."""
        return self.curve([running_mean(run.accuracy) for run in self.runs])

    def tasks(self) -> Curve:
        """The accuracy of every task, right after it was learned and ever since."""
        return self.curve([run.accuracy for run in self.runs])

    def used_weights(self) -> Curve:
        """The fraction of weights used after each task."""
        return self.curve([run.used for run in self.runs])

    def _matrices(self) -> list[Accuracies]:
        return [Accuracies(GIVEN, run.matrix or []) for run in self.runs]


def measure(config: Config, arm: Arm, results: Results) -> Measured:
    """The seeds of an arm."""
    chosen = with_candidate(config, chosen_candidate(config, arm, results))
    found = [result_of(Learned, results, arm.job(seed).key) for seed in range(config.seeds)]
    lost = [f"{arm.label}, seed {i}: {run.diverged}" for i, run in enumerate(found) if isinstance(run, Diverged)]
    notes = {run.note for run in found if run.note}
    runs = [run for run in found if isinstance(run, Learned)]
    return Measured(arm, runs, lost, notes, rate(chosen, arm.alpha), several=len(config.methods) > 1)


def compared(config: Config) -> bool:
    """True if earlier tasks are measured again after later ones, as forgetting needs it."""
    return config.matrix and config.tasks > 1


def summary(config: Config, measured: Sequence[Measured]) -> dict[str, Any]:
    """The numbers of the report as plain data."""
    return {"tasks": config.tasks, "arms": [_arm(config, m) for m in measured]}


def _arm(config: Config, m: Measured) -> dict[str, Any]:
    """The numbers of an arm; only what it was if all its runs diverged."""
    what = {
        "label": m.arm.label, "method": m.arm.method, "alpha": m.arm.alpha, "lr": m.lr,
        "seeds": len(m.runs), "diverged": len(m.diverged),
    }  # fmt: skip
    return {**what, **_numbers(config, m)} if m.runs else what


def _numbers(config: Config, m: Measured) -> dict[str, Any]:
    group, known = max(config.groups), compared(config)
    return {
        GIVEN: m.given().mean, "worst": m.worst().mean,
        INFERRED: m.inferred(group).mean, "group": group, "used": m.used().mean,
        "forgetting": m.forgetting().mean if known else None,
        "backward_transfer": m.backward_transfer().mean if known else None,
        "accuracy": m.averages().mean.tolist(), "used_weights": m.used_weights().mean.tolist(),
        "inference": [asdict(probe) for probe in m.runs[0].inference],
    }  # fmt: skip


def running_mean(values: Sequence[float]) -> list[float]:
    """The mean of the first, of the first two, …"""
    return [fmean(values[: i + 1]) for i in range(len(values))]
