"""The finished runs of a one-shot experiment, arm by arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from powerprop.experiments.harness.experiment import Results
from powerprop.experiments.oneshot.config import FORMS, Config
from powerprop.experiments.oneshot.train import Arm
from powerprop.experiments.oneshot.tuning import final_jobs
from powerprop.report import Cell, Curve


@dataclass(frozen=True)
class Measured:
    """An arm at its chosen learning rate: the results of its seeds, without those that diverged."""

    arm: Arm
    label: str
    lr: float
    keys: list[str]
    runs: list[dict[str, Any]]
    diverged: int

    def cell(self, name: str, index: int | None = None) -> Cell:
        """Mean and std over the seeds of a number, or of one point of a curve."""
        return Cell.of(run[name] if index is None else run[name][index] for run in self.runs)

    def band(self, points: Sequence[int], name: str = "test") -> Cell:
        """Mean and std over the seeds of the mean over some points of the grid."""
        return Cell.of(fmean(run[name][i] for i in points) for run in self.runs)

    def curve(self, name: str, x: list[float]) -> Curve:
        return Curve(self.label, self.arm.alpha, x, [run[name] for run in self.runs], self.arm.form == "direct")


def measure(config: Config, arm: Arm, results: Results) -> Measured:
    """The seeds of an arm at its chosen learning rate."""
    jobs = final_jobs(config, arm, results)
    runs = [results[job.key] for job in jobs]
    good = [(job.key, run) for job, run in zip(jobs, runs, strict=True) if "diverged" not in run]
    keys, kept = [key for key, _ in good], [run for _, run in good]
    return Measured(arm, label(config, arm), jobs[0].settings["lr"], keys, kept, len(runs) - len(kept))


def label(config: Config, arm: Arm) -> str:
    """What the reader sees of an arm."""
    if config.optimiser == "sgd":
        return "baseline (α = 1)" if arm.alpha == 1 else f"α = {arm.alpha:g}"
    return "Adam (α = 1)" if arm.alpha == 1 else f"Adam {FORMS[arm.form]} (α = {arm.alpha:g})"


def baseline(measured: Sequence[Measured]) -> Measured | None:
    """The arm with α = 1, if it was run."""
    return next((m for m in measured if m.arm.alpha == 1), None)


def best_arm(measured: Sequence[Measured]) -> Measured | None:
    """The arm with α > 1 that scores best on the validation images, over the whole grid."""
    candidates = [m for m in measured if m.arm.alpha > 1]
    return max(candidates, key=lambda m: m.band(range(len(m.runs[0]["kept"])), "validation").mean, default=None)


def nearest_to_four(measured: Sequence[Measured]) -> Measured | None:
    candidates = [m for m in measured if m.arm.alpha > 1 and m.arm.form == "targets"]
    return min(candidates, key=lambda m: abs(m.arm.alpha - 4), default=None)


def band_points(config: Config) -> list[int]:
    """The points of the grid inside the band that the headline averages over."""
    return [i for i, kept in enumerate(config.grid) if config.band[0] <= kept <= config.band[1]]


def nearest(config: Config, kept: float) -> int:
    """The point of the grid nearest to a fraction kept, on the log scale."""
    return int(np.argmin(np.abs(np.log(config.grid) - np.log(kept))))


def largest_gain(config: Config, base: Measured, best: Measured) -> tuple[float, int]:
    """The largest difference of the mean test accuracies at one point of the grid, and that point."""
    gains = best.curve("test", config.grid).mean - base.curve("test", config.grid).mean
    return float(gains.max()), int(gains.argmax())
