"""What a learning rate buys: dense accuracy against accuracy when pruned, one point per power and rate."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from powerprop.experiments.harness.experiment import Results
from powerprop.experiments.oneshot.config import LASSO, Candidate, Config
from powerprop.experiments.oneshot.measured import band_points, tried
from powerprop.experiments.oneshot.train import Arm, arms
from powerprop.report import Mean, Point, Section, scatter

TRAINED = 0.05
"""A network further than this below the best dense accuracy has learned too little to have a place in the picture."""


def frontier_section(config: Config, results: Results, figures: Path, where: str) -> Section:
    """One point for each power and learning rate: what a network knows dense, and what is left of it when pruned.

    where: the range of weights kept over which the accuracy when pruned is averaged, in words.
    """
    points, band, lost = [], band_points(config), []
    tries = [(arm, each) for arm in arms(config) for each in config.candidates(arm.alpha, arm.form)]
    for arm, each in tries:
        runs, diverged = tried(config, arm, each, results)
        if runs:
            dense = 100 * fmean(run.test[-1] for run in runs)
            pruned = Mean.of(fmean(run.test[i] for i in band) for run in runs)
            points.append(Point(name(config, arm, each), dense, pruned, arm.alpha))
        if diverged:
            lost.append(f"{name(config, arm, each)} ({diverged} of {diverged + len(runs)})")
    least = max((point.x for point in points), default=0.0) - 100 * TRAINED
    weak = [f"{point.method} ({point.x:.1f}%)" for point in points if point.x < least]
    pictures = [
        scatter(
            [point for point in points if point.x >= least], figures / "frontier.svg",
            "Dense accuracy against accuracy when pruned", "dense test accuracy (%)", f"test accuracy, {where}",
            percent=True,
        )
    ] if points else []  # fmt: skip
    return Section("What a learning rate buys", text(config, lost, weak), pictures)


def name(config: Config, arm: Arm, each: Candidate) -> str:
    """The power, the rate and, where it was tuned, the decay."""
    power = "L1" if arm.form == LASSO else f"α = {arm.alpha:g}"
    return f"{power}, {each.lr:g}" + (f", {each.decay:g}" if config.decays else "")


def text(config: Config, lost: list[str], weak: list[str]) -> str:
    """How to read the picture, and what is not in it."""
    said = [
        "Every power with every learning rate that was tried, chosen or not, named by the two"
        + (" and by the decay." if config.decays else "."),
        "Where a point of α > 1 lies above and to the right of the hollow ones, Powerpropagation has moved the "
        "frontier.",
        f"Rates that were not chosen have n = {config.tuning_seeds}.",
    ]
    if lost:
        said.append(f"Seeds that diverged are left out: {'; '.join(lost)}.")
    if weak:
        said.append(f"Not drawn, more than {100 * TRAINED:g} points below the best dense accuracy: {'; '.join(weak)}.")
    return " ".join(said)
