"""The finished runs of a one-shot experiment, arm by arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from powerprop.experiments.harness.experiment import Results
from powerprop.experiments.harness.typed import Diverged, result_of
from powerprop.experiments.oneshot.config import FORMS, LASSO, Candidate, Config
from powerprop.experiments.oneshot.results import Pruned
from powerprop.experiments.oneshot.train import Arm
from powerprop.experiments.oneshot.tuning import chosen, final_jobs
from powerprop.report import Curve, Mean


@dataclass(frozen=True)
class Measured:
    """An arm with its chosen candidate: the results of its seeds, without those that diverged.

    plain: drawn as the lesser of two forms of the same power.
    """

    arm: Arm
    label: str
    chosen: Candidate
    plain: bool
    keys: list[str]
    runs: list[Pruned]
    diverged: int

    def of(self, number: Callable[[Pruned], float]) -> Mean:
        """Mean and std over the seeds of a number of each."""
        return Mean.of(number(run) for run in self.runs)

    @property
    def dense(self) -> Mean:
        """Test accuracy before pruning."""
        return self.of(lambda run: run.test[-1])

    def band(self, points: Sequence[int]) -> Mean:
        """Mean and std over the seeds of the mean test accuracy over some points of the grid."""
        return self.of(lambda run: fmean(run.test[i] for i in points))

    def accuracy(self, x: list[float]) -> Curve:
        """Test accuracy against weights kept."""
        return self._curve(x, [run.test for run in self.runs])

    def pruned_otherwise(self, x: list[float], way: str) -> Curve:
        """Test accuracy against weights kept, pruned in another way."""
        return self._curve(x, [run.others[way] for run in self.runs])

    def overlap(self, x: list[float]) -> Curve:
        """Overlap of the masks against weights kept."""
        return self._curve(x, [run.overlap for run in self.runs])

    def _curve(self, x: list[float], values: list[list[float]]) -> Curve:
        return Curve(self.label, self.arm.alpha, x, values, plain=self.plain)


def measure(config: Config, arm: Arm, results: Results) -> Measured:
    """The seeds of an arm with its chosen candidate."""
    jobs = final_jobs(config, arm, results)
    plain = arm.form == LASSO or (arm.form == "direct" and len(config.forms) > 1)
    found = {job.key: result_of(Pruned, results, job.key) for job in jobs}
    good = {key: run for key, run in found.items() if not isinstance(run, Diverged)}
    lost = len(found) - len(good)
    best = chosen(config, arm, results)
    return Measured(arm, label(config, arm), best, plain, list(good), list(good.values()), lost)


def tried(config: Config, arm: Arm, candidate: Candidate, results: Results) -> tuple[list[Pruned], int]:
    """The runs of an arm with a candidate, chosen or not, and how many more diverged."""
    keys = [arm.job(config, candidate, seed).key for seed in range(max(config.seeds, config.tuning_seeds))]
    found = [result_of(Pruned, results, key) for key in keys if key in results]
    runs = [run for run in found if not isinstance(run, Diverged)]
    return runs, len(found) - len(runs)


def label(config: Config, arm: Arm) -> str:
    """What the reader sees of an arm."""
    if arm.form == LASSO:
        return "α = 1 with an L1 penalty"
    if config.optimiser == "sgd":
        return "baseline (α = 1)" if arm.alpha == 1 else f"α = {arm.alpha:g}"
    return "Adam (α = 1)" if arm.alpha == 1 else f"Adam {FORMS[arm.form]} (α = {arm.alpha:g})"


def baseline(measured: Sequence[Measured]) -> Measured | None:
    """The arm with α = 1, if it was run."""
    return next((m for m in measured if m.arm.alpha == 1), None)


def best_arm(measured: Sequence[Measured]) -> Measured | None:
    """The arm with α > 1 that scores best on the validation images, over the whole grid."""
    candidates = [m for m in measured if m.arm.alpha > 1]
    return max(candidates, key=lambda m: m.of(lambda run: fmean(run.validation)).mean, default=None)


def nearest_to_four(measured: Sequence[Measured]) -> Measured | None:
    """The arm whose α is nearest to 4, the one that the paper shows in figure 2d."""
    candidates = [m for m in measured if m.arm.alpha > 1 and not m.plain]
    return min(candidates, key=lambda m: abs(m.arm.alpha - 4), default=None)


def band_points(config: Config) -> list[int]:
    """The points of the grid inside the band that the headline averages over."""
    return [i for i, kept in enumerate(config.grid) if config.band[0] <= kept <= config.band[1]]


def nearest(config: Config, kept: float) -> int:
    """The point of the grid nearest to a fraction kept, on the log scale."""
    return int(np.argmin(np.abs(np.log(config.grid) - np.log(kept))))


def largest_gain(config: Config, base: Measured, best: Measured) -> tuple[float, int]:
    """The largest difference of the mean test accuracies at one point of the grid, and that point."""
    gains = best.accuracy(config.grid).mean - base.accuracy(config.grid).mean
    return float(gains.max()), int(gains.argmax())
