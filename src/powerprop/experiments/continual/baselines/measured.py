"""The results of a table, row by row: averages over seeds, and how far they are from published values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from powerprop.continual import Accuracies, Scenario
from powerprop.experiments.continual.baselines.arms import Arm, Choice, arms, chosen
from powerprop.experiments.continual.baselines.config import Config
from powerprop.experiments.continual.baselines.protocol import outputs_of
from powerprop.experiments.continual.baselines.published import PRINTED, PUBLISHED, Value
from powerprop.experiments.continual.baselines.results import Learned
from powerprop.experiments.harness.experiment import Results
from powerprop.experiments.harness.typed import Diverged, result_of
from powerprop.report import Mean

FAR = 2.0
"""So many published standard deviations are far."""


@dataclass(frozen=True)
class Measured:
    """The finished runs of a row by kind of outputs, and what became of those that diverged.

    scenarios: the kind of outputs that each column of the row is of; columns that the method does not have are not in.
    choices: by kind of outputs, the factors of the published strength and rate.
    """

    arm: Arm
    runs: dict[str, list[Learned]]
    scenarios: dict[Scenario, str]
    choices: dict[str, Choice]
    diverged: list[str]
    notes: set[str]

    def accuracy(self, scenario: Scenario) -> Mean | None:
        """Average over all tasks after the last; None where the method has no value."""
        runs = self.runs_of(scenario)
        return Mean.of(Accuracies(scenario, run.accuracies[scenario]).average() for run in runs) if runs else None

    def together(self) -> Mean | None:
        """Class-incremental, the task inferred from a group of images."""
        found = [run.together for runs in self.runs.values() for run in runs if run.together is not None]
        return Mean.of(found) if found else None

    def kept(self, scenario: Scenario) -> int | None:
        """Bytes beyond the model, the most of all seeds: memories have one size, bases may differ a little."""
        return max((run.memory_bytes for run in self.runs_of(scenario)), default=None)

    def most_kept(self) -> int | None:
        """The same over all columns."""
        return max((bytes for each in self.scenarios if (bytes := self.kept(each)) is not None), default=None)

    def seconds(self) -> float | None:
        """Of one training on average, with its evaluation."""
        found = [run.seconds for runs in self.runs.values() for run in runs]
        return fmean(found) if found else None

    def runs_of(self, scenario: Scenario) -> list[Learned]:
        """The finished runs that a column is of."""
        return self.runs.get(self.scenarios.get(scenario, ""), [])


def measure(config: Config, arm: Arm, results: Results) -> Measured:
    """All trainings of a row."""
    kinds = outputs_of(config.benchmark, arm.name, config.columns())
    best = {outputs: chosen(config, arm, outputs, results) for outputs in kinds}
    runs: dict[str, list[Learned]] = {outputs: [] for outputs in kinds}
    lost, notes = [], set()
    for outputs, choice in best.items():
        for seed in range(config.seeds):
            found = result_of(Learned, results, arm.job(outputs, seed, choice).key)
            notes |= {found.note} - {""}
            if isinstance(found, Diverged):
                lost.append(f"{arm.label}, {' and '.join(kinds[outputs])}, seed {seed}: {found.diverged}")
            else:
                runs[outputs].append(found)
    scenarios = {scenario: outputs for outputs, own in kinds.items() for scenario in own}
    return Measured(arm, runs, scenarios, best, lost, notes)


def measure_all(config: Config, results: Results) -> list[Measured]:
    """Every row."""
    return [measure(config, arm, results) for arm in arms(config)]


@dataclass(frozen=True)
class Comparison:
    """One of our values beside those of others.

    away: from the published one, in its standard deviations; None if there is none.
    printed: the paper's, if it is of this scenario.
    """

    label: str
    scenario: Scenario
    here: Mean
    published: Value | None
    printed: Value | None

    @property
    def away(self) -> float | None:
        return None if self.published is None else (100 * self.here.mean - self.published.mean) / self.published.std


def comparisons(config: Config, measured: Sequence[Measured]) -> list[Comparison]:
    """Every value that somebody has published, the scenario named; groups of images where the paper has groups."""
    found = []
    for m in measured:
        known = PUBLISHED[config.benchmark].get(m.arm.name, {}) if m.arm.alpha == 1 else {}
        label = f"Powerprop + {m.arm.name}" if m.arm.alpha > 1 else m.arm.name
        kind, printed = PRINTED[config.benchmark].get(label, (None, None))
        for scenario in config.columns():
            inferred = m.together() if scenario == "class-incremental" else None
            here, of_paper = inferred or m.accuracy(scenario), printed if scenario == kind else None
            if here is not None and (scenario in known or of_paper is not None):
                found.append(Comparison(m.arm.label, scenario, here, known.get(scenario), of_paper))
    return found


def summary(config: Config, measured: Sequence[Measured]) -> dict[str, Any]:
    """The numbers of the report as plain data."""
    return {"benchmark": config.benchmark, "scenarios": config.columns(), "rows": [_row(config, m) for m in measured]}


def _row(config: Config, m: Measured) -> dict[str, Any]:
    values = {scenario: m.accuracy(scenario) for scenario in config.columns()}
    choices = {outputs: each._asdict() for outputs, each in m.choices.items()}
    return {
        "label": m.arm.label, "strategy": m.arm.name, "alpha": m.arm.alpha,
        "accuracy": {scenario: _plain(each) for scenario, each in values.items()},
        "together": _plain(m.together()), "memory_bytes": m.most_kept(),
        "seconds": m.seconds(), "choices": choices, "diverged": len(m.diverged),
    }  # fmt: skip


def _plain(value: Mean | None) -> dict[str, float | None] | None:
    """A mean as JSON has it: one run has no deviation."""
    return None if value is None else {"mean": value.mean, "std": value.std if value.n > 1 else None, "n": value.n}
