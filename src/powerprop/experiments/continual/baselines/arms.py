"""Rows of the table and the trainings that they need; strengths and learning rates are chosen first, if asked."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import NamedTuple

from powerprop.continual import STRATEGIES
from powerprop.experiments.continual.baselines.config import Config
from powerprop.experiments.continual.baselines.protocol import all_options, names_of, outputs_of
from powerprop.experiments.continual.baselines.results import Learned
from powerprop.experiments.harness.experiment import Job, Results
from powerprop.experiments.harness.typed import Diverged, result_of

SHOWN = {"JointTraining": "Joint", "AGEM": "A-GEM"}
"""Methods that readers know by another name than their class."""


class Choice(NamedTuple):
    """Factors of the published strength of a penalty and of the learning rate."""

    strength: float = 1.0
    rate: float = 1.0

    def __str__(self) -> str:
        """What they add to the name of a job."""
        return "".join(f"-{name}{each:g}" for name, each in self._asdict().items() if each != 1)


AS_PUBLISHED = Choice()


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

    def job(self, outputs: str, seed: int, choice: Choice = AS_PUBLISHED) -> Job:
        """A training with a kind of outputs, at so many times the published strength and rate."""
        power = "" if self.alpha == 1 else f"-alpha{self.alpha:g}"
        settings = {"strategy": self.name, "alpha": self.alpha, "outputs": outputs, **choice._asdict(), "seed": seed}
        return Job(f"{self.name}{power}-{outputs}{choice}-seed{seed}", settings)


def arms(config: Config) -> list[Arm]:
    """Every method, and those with Powerpropagation below the same without."""
    powers = {name: (1.0, config.alpha) if name in config.powerprop else (1.0,) for name in STRATEGIES}
    return [Arm(name, alpha) for name in names_of(config.strategy, config.benchmark) for alpha in powers[name]]


def trainings(config: Config) -> list[tuple[Arm, str]]:
    """Every arm with every kind of outputs that its columns need."""
    columns = config.columns()
    return [(arm, outputs) for arm in arms(config) for outputs in outputs_of(config.benchmark, arm.name, columns)]


def choices(config: Config, arm: Arm) -> list[Choice]:
    """What an arm may be trained with: every strength, if its method has one, at every rate."""
    strengths = (config.si_strengths or config.strengths) if arm.name == "SI" else config.strengths
    if "strength" not in all_options(STRATEGIES[arm.name]):
        strengths = (1.0,)
    return [Choice(*each) for each in product(strengths, config.rates)]


def jobs(config: Config, results: Results) -> list[Job]:
    """Every choice with the tuning seeds, where there are several; then all seeds, with the one that was chosen."""
    pairs = trainings(config)
    several = [(arm, outputs, found) for arm, outputs in pairs if len(found := choices(config, arm)) > 1]
    seeds = range(config.tuning_seeds)
    first = [arm.job(outputs, seed, each) for seed in seeds for arm, outputs, found in several for each in found]
    if any(job.key not in results for job in first):
        return first
    best = {pair: chosen(config, *pair, results) for pair in pairs}
    table = [arm.job(outputs, seed, best[arm, outputs]) for seed in range(config.seeds) for arm, outputs in pairs]
    return list({job.key: job for job in first + table}.values())


def chosen(config: Config, arm: Arm, outputs: str, results: Results) -> Choice:
    """The choice with the best validation accuracy."""
    found = choices(config, arm)
    return found[0] if len(found) == 1 else max(found, key=lambda each: score(config, arm, outputs, each, results))


def score(config: Config, arm: Arm, outputs: str, choice: Choice, results: Results) -> float:
    """The validation accuracy of a choice, averaged over the tuning seeds; below all others if one diverged."""
    keys = [arm.job(outputs, seed, choice).key for seed in range(config.tuning_seeds)]
    found = [result_of(Learned, results, key) for key in keys]
    good = [fmean(each.validation.values()) for each in found if not isinstance(each, Diverged)]
    return fmean(good) if len(good) == len(found) else -1.0
