"""Rows of the table and the trainings that they need; powers and strengths of penalties are chosen first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from powerprop.experiments.generative.config import METHODS, POWERPROP, Config
from powerprop.experiments.generative.results import Tuned
from powerprop.experiments.harness.experiment import Job, Results, RunError
from powerprop.experiments.harness.typed import Diverged, result_of

SHOWN = {"EfficientPackNet": "EPN"}
"""Methods that the paper's table calls by another name."""
DAMPED = ("EWC", "Laplace")
"""Methods whose penalty rests on Fisher information."""


class Choice(NamedTuple):
    """The power of the shared decoder's weights, and strength and damping of a penalty; no strength is no penalty."""

    alpha: float = 1.0
    strength: float | None = None
    damping: float = 0.0

    def __str__(self) -> str:
        """All as they stand in the name of a job."""
        power = "" if self.alpha == 1 else f"-alpha{self.alpha:g}"
        damping = f"-damping{self.damping:g}" if self.damping else ""
        return power + ("" if self.strength is None else f"-strength{self.strength:g}") + damping


@dataclass(frozen=True)
class Arm:
    """A row: a method, with or without Powerpropagation, by its name among `METHODS`."""

    name: str

    @property
    def strategy(self) -> str:
        """The class of the method."""
        return self.name.removeprefix(POWERPROP)

    @property
    def powerprop(self) -> bool:
        """True if it is trained with a power above 1."""
        return self.name.startswith(POWERPROP)

    @property
    def label(self) -> str:
        """What the reader sees."""
        shown = SHOWN.get(self.strategy, self.strategy)
        return f"Powerprop + {shown}" if self.powerprop else shown

    def job(self, seed: int, choice: Choice) -> Job:
        """All tasks from one seed."""
        return self._job(self.name, seed, choice, tuning=False)

    def tuning_job(self, choice: Choice) -> Job:
        """The first tasks with one choice."""
        return self._job(f"tuning-{self.name}{choice}", 0, choice, tuning=True)

    def _job(self, name: str, seed: int, choice: Choice, tuning: bool) -> Job:
        settings = {"strategy": self.strategy, **choice._asdict(), "tuning": tuning, "seed": seed}
        return Job(f"{name.replace('+', '-')}-seed{seed}", settings)


def arms(config: Config) -> list[Arm]:
    """The rows in the order of the paper's table."""
    return [Arm(name) for name in METHODS if name in config.methods or "all" in config.methods]


def choices(config: Config, arm: Arm) -> list[Choice]:
    """What an arm may be trained with: every power, strength and damping that it has, each with each."""
    penalties = {"SI": config.si_strengths, **dict.fromkeys(DAMPED, config.strengths)}
    strengths: tuple[float | None, ...] = penalties.get(arm.strategy, (None,))
    dampings = config.dampings if arm.strategy in DAMPED else (0.0,)
    return [Choice(*each) for each in product(config.alphas if arm.powerprop else (1.0,), strengths, dampings)]


def tuning_jobs(config: Config, arm: Arm) -> list[Job]:
    """A training for each choice, if there is more than one."""
    found = choices(config, arm)
    return [arm.tuning_job(each) for each in found] if len(found) > 1 else []


def jobs(config: Config, results: Results) -> list[Job]:
    """First every choice on the first tasks; then all tasks from all seeds, with those that were made."""
    rows = arms(config)
    first = [job for arm in rows for job in tuning_jobs(config, arm)]
    if any(job.key not in results for job in first):
        return first
    best = {arm: chosen(config, arm, results) for arm in rows}
    return first + [arm.job(seed, best[arm]) for seed in range(config.seeds) for arm in rows]


def tuned(config: Config, arm: Arm, results: Results) -> dict[Choice, float | None]:
    """The validation log-likelihood with everything that was tried; None where training diverged."""
    found = {each: result_of(Tuned, results, arm.tuning_job(each).key) for each in choices(config, arm)}
    return {each: None if isinstance(result, Diverged) else result.validation for each, result in found.items()}


def chosen(config: Config, arm: Arm, results: Results) -> Choice:
    """The choice with the best validation log-likelihood."""
    found = choices(config, arm)
    if len(found) == 1:
        return found[0]
    values = {each: value for each, value in tuned(config, arm, results).items() if value is not None}
    if not values:
        raise RunError(f"{arm.label} diverged with everything that was tried: {', '.join(str(c)[1:] for c in found)}")
    return max(values, key=lambda each: values[each])
