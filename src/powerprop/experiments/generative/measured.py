"""The results of the table, row by row: averages over seeds, and the paper's beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from powerprop.experiments.generative.arms import Arm, Choice, arms, chosen, tuned, tuning_jobs
from powerprop.experiments.generative.config import Config
from powerprop.experiments.generative.results import Learned
from powerprop.experiments.harness.experiment import Results
from powerprop.experiments.harness.typed import Diverged, result_of
from powerprop.report import Mean

PAPER: dict[str, dict[str, float]] = {
    "mnist": {
        "Naive": -258.40, "Laplace": -108.06, "EWC": -105.78, "SI": -111.47, "VCL": -94.27, "EfficientPackNet": -94.50,
        "Powerprop+Laplace": -96.72, "Powerprop+EWC": -95.79, "Powerprop+EfficientPackNet": -92.15,
    },
    "notmnist": {
        "Naive": -797.88, "Laplace": -225.54, "EWC": -212.62, "SI": -190.48, "VCL": -187.34,
        "EfficientPackNet": -177.08, "Powerprop+Laplace": -196.87, "Powerprop+EWC": -188.56,
        "Powerprop+EfficientPackNet": -174.54,
    },
}  # fmt: skip
"""Its table 3."""


@dataclass(frozen=True)
class Measured:
    """The finished runs of a row.

    keys: of their jobs.
    choice: the power, and the strength and damping of the penalty, by the validation log-likelihood.
    tried: the validation log-likelihood with each choice; None where training diverged; empty where there was one.
    """

    arm: Arm
    runs: list[Learned]
    keys: list[str]
    choice: Choice
    tried: dict[Choice, float | None]
    diverged: list[str]
    notes: set[str]

    def average(self) -> Mean | None:
        """The log-likelihood over all tasks after the last."""
        return Mean.of(fmean(run.final) for run in self.runs) if self.runs else None

    def learned(self) -> Mean | None:
        """The same of every task right after it was learned."""
        return Mean.of(fmean(row[-1] for row in run.curve) for run in self.runs) if self.runs else None

    def forgotten(self) -> Mean | None:
        """By how much it has fallen since: mean over the tasks before the last of curve[j][j] - curve[T][j]."""
        if not self.runs or len(self.runs[0].final) < 2:
            return None
        return Mean.of(fmean(run.curve[j][j] - last for j, last in enumerate(run.curve[-1][:-1])) for run in self.runs)

    def unchanged(self) -> bool:
        """True if no likelihood of any task has changed by a bit."""
        return bool(self.runs) and all(run.unchanged() for run in self.runs)

    def used(self) -> Mean | None:
        """The fraction of the shared weights in use after the last task."""
        found = [run.used[-1] for run in self.runs if run.used]
        return Mean.of(found) if found else None


def measure_all(config: Config, results: Results) -> list[Measured]:
    """Every row."""
    return [measure(config, arm, results) for arm in arms(config)]


def measure(config: Config, arm: Arm, results: Results) -> Measured:
    """All seeds of a row."""
    choice, runs, keys, lost, notes = chosen(config, arm, results), [], [], [], set()
    for seed in range(config.seeds):
        key = arm.job(seed, choice).key
        found = result_of(Learned, results, key)
        notes |= {found.note} - {""}
        if isinstance(found, Diverged):
            lost.append(f"{arm.label}, seed {seed}: {found.diverged}")
        else:
            runs.append(found)
            keys.append(key)
    tried = tuned(config, arm, results) if tuning_jobs(config, arm) else {}
    return Measured(arm, runs, keys, choice, tried, lost, notes)


def summary(config: Config, measured: Sequence[Measured]) -> dict[str, Any]:
    """The numbers of the report as plain data."""
    return {"dataset": config.dataset, "rows": [_row(config, m) for m in measured]}


def _row(config: Config, m: Measured) -> dict[str, Any]:
    return {
        "name": m.arm.name, "label": m.arm.label, **m.choice._asdict(),
        "tried": [{**each._asdict(), "validation": value} for each, value in m.tried.items()],
        "log_likelihood": _plain(m.average()), "learned": _plain(m.learned()), "forgotten": _plain(m.forgotten()),
        "unchanged": m.unchanged(), "used": _plain(m.used()), "paper": PAPER[config.dataset][m.arm.name],
        "curves": [run.curve for run in m.runs], "final": [run.final for run in m.runs], "diverged": len(m.diverged),
    }  # fmt: skip


def _plain(value: Mean | None) -> dict[str, float | None] | None:
    """A mean as JSON has it: one run has no deviation."""
    return None if value is None else {"mean": value.mean, "std": value.std if value.n > 1 else None, "n": value.n}
