"""Rows of the table and the trainings that they need; the strengths of penalties are chosen first, if asked."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from powerprop.continual import STRATEGIES
from powerprop.experiments.continual.baselines.config import Config
from powerprop.experiments.continual.baselines.protocol import all_options, names_of, outputs_of
from powerprop.experiments.continual.baselines.results import Learned
from powerprop.experiments.harness.experiment import Job, Results
from powerprop.experiments.harness.typed import Diverged, result_of

SHOWN = {"JointTraining": "Joint", "AGEM": "A-GEM"}
"""Methods that readers know by another name than their class."""


@dataclass(frozen=True)
class Arm:
    """A row: a method, with or without Powerpropagation."""

    name: str
    alpha: float

    @property
    def label(self) -> str:
        """What the reader sees."""
        shown = SHOWN.get(self.name, self.name)
        return shown if self.alpha == 1 else f"Powerprop + {shown}"

    def job(self, outputs: str, seed: int, strength: float = 1.0) -> Job:
        """A training with a kind of outputs, at so many times the published strength."""
        power = "" if self.alpha == 1 else f"-alpha{self.alpha:g}"
        times = "" if strength == 1 else f"-strength{strength:g}"
        settings = {"strategy": self.name, "alpha": self.alpha, "outputs": outputs, "strength": strength}
        return Job(f"{self.name}{power}-{outputs}{times}-seed{seed}", {**settings, "seed": seed})


def arms(config: Config) -> list[Arm]:
    """Every method, and those with Powerpropagation below the same without."""
    powers = {name: (1.0, config.alpha) if name in config.powerprop else (1.0,) for name in STRATEGIES}
    return [Arm(name, alpha) for name in names_of(config.strategy, config.benchmark) for alpha in powers[name]]


def trainings(config: Config) -> list[tuple[Arm, str]]:
    """Every arm with every kind of outputs that its columns need."""
    columns = config.columns()
    return [(arm, outputs) for arm in arms(config) for outputs in outputs_of(config.benchmark, arm.name, columns)]


def tuned(config: Config, arm: Arm) -> bool:
    """True if the strength of the arm's penalty is chosen on validation data."""
    return len(config.strengths) > 1 and "strength" in all_options(STRATEGIES[arm.name])


def jobs(config: Config, results: Results) -> list[Job]:
    """One run of each strength where they are tuned; then all seeds, at the strength that was chosen."""
    pairs = trainings(config)
    first = [arm.job(outputs, 0, each) for arm, outputs in pairs if tuned(config, arm) for each in config.strengths]
    if any(job.key not in results for job in first):
        return first
    chosen = {pair: chosen_strength(config, *pair, results) for pair in pairs}
    table = [arm.job(outputs, seed, chosen[arm, outputs]) for seed in range(config.seeds) for arm, outputs in pairs]
    return list({job.key: job for job in first + table}.values())


def chosen_strength(config: Config, arm: Arm, outputs: str, results: Results) -> float:
    """The factor of the published strength with the best validation accuracy, 1 where nothing is chosen."""
    if not tuned(config, arm):
        return config.strengths[0] if "strength" in all_options(STRATEGIES[arm.name]) else 1.0

    def score(factor: float) -> float:
        found = result_of(Learned, results, arm.job(outputs, 0, factor).key)
        return -1.0 if isinstance(found, Diverged) else fmean(found.validation.values())

    return max(config.strengths, key=score)
