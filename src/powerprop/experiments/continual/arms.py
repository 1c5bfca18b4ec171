"""Rows of the table and the trainings that they need: arms × seeds, after the candidates of each arm."""

from __future__ import annotations

from dataclasses import dataclass

from powerprop.experiments.continual.candidates import Tried, choose
from powerprop.experiments.continual.checks import METHOD_LABELS
from powerprop.experiments.continual.config import Config
from powerprop.experiments.harness.experiment import Job, Results, RunError
from powerprop.experiments.harness.typed import result_of


@dataclass(frozen=True)
class Arm:
    """One row of the table: a method and an α."""

    method: str
    alpha: float

    @property
    def label(self) -> str:
        """What the reader sees."""
        name = METHOD_LABELS[self.method]
        return name if self.alpha == 1 else f"Powerprop + {name}, α={self.alpha:g}"

    def job(self, seed: int, candidate: str = "") -> Job:
        """The run of this arm from a seed, with the settings that were chosen."""
        settings = {"method": self.method, "alpha": self.alpha, "seed": seed}
        chosen = {"candidate": candidate} if candidate else {}
        return Job(f"{self.method}-alpha{self.alpha:g}-seed{seed}", {**settings, **chosen})

    def trial(self, candidate: str) -> Job:
        """The first tasks with a candidate's settings."""
        settings = {"method": self.method, "alpha": self.alpha, "seed": 0, "candidate": candidate, "trial": True}
        name = candidate.replace("=", "").replace(" ", "-")
        return Job(f"trial-{self.method}-alpha{self.alpha:g}-{name}", settings)


def arms(config: Config) -> list[Arm]:
    """Every method at every α."""
    return [Arm(method, alpha) for method in config.methods for alpha in config.alphas]


def jobs(config: Config, results: Results) -> list[Job]:
    """Candidates first, if there are any to choose from; then all arms and seeds, with the chosen ones."""
    first = [arm.trial(text) for arm in arms(config) for text in config.candidates]
    if any(job.key not in results for job in first):
        return first
    chosen = {arm: chosen_candidate(config, arm, results) for arm in arms(config)}
    return first + [arm.job(seed, chosen[arm]) for seed in range(config.seeds) for arm in arms(config)]


def tried(config: Config, arm: Arm, results: Results) -> dict[str, Tried]:
    """What the candidates of an arm came to, without those that diverged."""
    found = {text: result_of(Tried, results, arm.trial(text).key) for text in config.candidates}
    return {text: each for text, each in found.items() if isinstance(each, Tried)}


def chosen_candidate(config: Config, arm: Arm, results: Results) -> str:
    """The candidate that an arm is run with; "" where there is none."""
    if not config.candidates:
        return ""
    found = tried(config, arm, results)
    if not found:
        raise RunError(f"{arm.label} diverged with every candidate: {', '.join(config.candidates)}")
    return choose(found, config.tasks)
