"""Rows of the table and the trainings that they need; the strengths of penalties are chosen first."""

from __future__ import annotations

from dataclasses import dataclass

from powerprop.experiments.generative.config import METHODS, POWERPROP, Config
from powerprop.experiments.generative.results import Tuned
from powerprop.experiments.harness.experiment import Job, Results, RunError
from powerprop.experiments.harness.typed import Diverged, result_of

SHOWN = {"EfficientPackNet": "EPN"}
"""Methods that the paper's table calls by another name."""


@dataclass(frozen=True)
class Arm:
    """A row: a method, with or without Powerpropagation.

    name: as it is among `METHODS`.
    strategy: the class of the method.
    alpha: its power.
    """

    name: str
    strategy: str
    alpha: float

    @property
    def label(self) -> str:
        """What the reader sees."""
        shown = SHOWN.get(self.strategy, self.strategy)
        return shown if self.alpha == 1 else f"Powerprop + {shown}"

    def job(self, seed: int, strength: float | None) -> Job:
        """All tasks from one seed."""
        return self._job(self.name, seed, strength, tuning=False)

    def tuning_job(self, strength: float) -> Job:
        """The first tasks at one strength."""
        return self._job(f"tuning-{self.name}-strength{strength:g}", 0, strength, tuning=True)

    def _job(self, name: str, seed: int, strength: float | None, tuning: bool) -> Job:
        settings = {"strategy": self.strategy, "alpha": self.alpha, "strength": strength, "tuning": tuning}
        return Job(f"{name.replace('+', '-')}-seed{seed}", {**settings, "seed": seed})


def arms(config: Config) -> list[Arm]:
    """The rows in the order of the paper's table."""
    chosen = [name for name in METHODS if name in config.methods or "all" in config.methods]
    powers = {name: config.alpha if name.startswith(POWERPROP) else 1.0 for name in chosen}
    return [Arm(name, name.removeprefix(POWERPROP), alpha) for name, alpha in powers.items()]


def strengths_of(config: Config, arm: Arm) -> tuple[float, ...]:
    """The strengths that an arm's penalty may have; none for methods without one."""
    known = {"EWC": config.strengths, "Laplace": config.strengths, "SI": config.si_strengths}
    return known.get(arm.strategy, ())


def tuning_jobs(config: Config, arm: Arm) -> list[Job]:
    """A training for each strength, if there is more than one to choose from."""
    strengths = strengths_of(config, arm)
    return [arm.tuning_job(each) for each in strengths] if len(strengths) > 1 else []


def jobs(config: Config, results: Results) -> list[Job]:
    """First every strength on the first tasks; then all tasks from all seeds, at the strengths that were chosen."""
    rows = arms(config)
    first = [job for arm in rows for job in tuning_jobs(config, arm)]
    if any(job.key not in results for job in first):
        return first
    chosen = {arm: chosen_strength(config, arm, results) for arm in rows}
    return first + [arm.job(seed, chosen[arm]) for seed in range(config.seeds) for arm in rows]


def tuned(config: Config, arm: Arm, results: Results) -> dict[float, float | None]:
    """The validation log-likelihood at every strength that was tried; None where training diverged."""
    found = {each: result_of(Tuned, results, arm.tuning_job(each).key) for each in strengths_of(config, arm)}
    return {each: None if isinstance(result, Diverged) else result.validation for each, result in found.items()}


def chosen_strength(config: Config, arm: Arm, results: Results) -> float | None:
    """The strength with the best validation log-likelihood; None for methods without a penalty."""
    strengths = strengths_of(config, arm)
    if len(strengths) < 2:
        return strengths[0] if strengths else None
    values = {each: value for each, value in tuned(config, arm, results).items() if value is not None}
    if not values:
        raise RunError(f"{arm.label} diverged at every strength: {', '.join(f'{each:g}' for each in strengths)}")
    return max(values, key=lambda each: values[each])
