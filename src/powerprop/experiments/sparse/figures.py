"""The figures of a sparse-training run: accuracy against sparsity, and during training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

from powerprop.experiments.sparse.results import Trained
from powerprop.experiments.sparse.rows import ROWS, parse
from powerprop.report import Curve, Image, Mean, Point, lines, scatter

if TYPE_CHECKING:
    from powerprop.experiments.sparse.config import Config

Found = Callable[..., list[Trained]]
"""found(row, column, cycles=1): the results of its seeds, without those that diverged."""

Logged = Callable[[str, str], list[dict[str, float]]]
"""logged(row, column): the metrics of its first seed, step by step."""

DRAWN = ("dense", "static", "rigl", "iterative", "topkast-0", "pp-iterative", "pp-topkast-0")
"""The rows whose training is drawn: more could not be told apart."""

TWINS = "Thick lines and filled markers: with Powerprop; thin and hollow: without."

FAR = 0.05
"""A row that falls by more than this below all others would hide their differences."""


def extreme(config: Config, found: Found, figures: Path) -> Image:
    """Accuracy against sparsity, uniform distribution.

    Where Static falls so far that beside it the others could not be told apart, it stands in the table alone.
    """
    columns = [c for c in config.columns if c.startswith("uniform")]
    curves = []
    for row in ("static", "set", "rigl", "iterative", "topkast-0", "pp-iterative", "pp-topkast-0"):
        runs = [found(row, c) for c in columns] if row in config.rows else []
        if runs and all(len(at_column) == config.seeds for at_column in runs):
            per_seed = [[at_column[seed].test for at_column in runs] for seed in range(config.seeds)]
            curves.append(curve(row, [parse(c)[1] for c in columns], per_seed))
    lowest = {curve.label: curve.mean.min() for curve in curves}
    static = lowest.pop(ROWS["static"].label, 1.0)
    alone = bool(lowest) and static < min(lowest.values()) - FAR
    shown = [curve for curve in curves if not alone or curve.label != ROWS["static"].label]
    caption = f"{TWINS} Static is far below and stands in the table alone." if alone else TWINS
    return lines(
        shown, figures / "sparsity.svg", "Accuracy against sparsity", "sparsity", "test accuracy", percent=True,
        fractions=True, caption=caption, wide=True,
    )  # fmt: skip


def priced(config: Config, found: Found, figures: Path) -> list[Image]:
    """Accuracy against what the training cost, where the rates were chosen."""
    points = []
    for row in config.rows:
        if runs := found(row, config.tune_at):
            cost = fmean(run.training_flops for run in runs)
            points.append(Point(ROWS[row].label, cost, Mean.of(run.test for run in runs)))
    if not points or config.tune_at not in config.columns:
        return []
    title = f"Accuracy against the FLOPs of a training, {parse(config.tune_at)[1]:.0%} sparsity"
    caption = "Filled markers: with Powerprop."
    return [scatter(points, figures / "cost.svg", title, "FLOPs, dense = 1", "test accuracy", True, caption=caption)]


def curve(row: str, x: Sequence[float], values: ArrayLike) -> Curve:
    """A row of the table as a curve."""
    one = ROWS[row]
    return Curve(one.label, None, x, values, method=ROWS[row.removeprefix("pp-")].label, plain=not one.powerprop)


def training(config: Config, logged: Logged, figures: Path) -> list[Image]:
    """Validation accuracy during training, a figure for each uniform column."""
    columns = [c for c in config.columns if c.startswith("uniform")]
    return [_training(config, logged, column, figures) for column in columns]


def _training(config: Config, logged: Logged, column: str, figures: Path) -> Image:
    curves = []
    for row in (r for r in DRAWN if r in config.rows):
        points = [point for point in logged(row, column) if "accuracy" in point]
        curves.append(curve(row, [p["step"] for p in points], [p["accuracy"] for p in points]))
    sparsity = parse(column)[1]
    path, title = figures / f"training-{100 * sparsity:g}.svg", f"Training at {sparsity:.0%} sparsity"
    caption = f"First seed, at the chosen rate. {TWINS}"
    return lines(curves, path, title, "step", "validation accuracy", percent=True, caption=caption, wide=True)
