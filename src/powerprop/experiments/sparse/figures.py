"""The figures of a sparse-training run: accuracy against sparsity, and during training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerprop.experiments.sparse.rows import ROWS, parse
from powerprop.report import Curve, Image, lines

if TYPE_CHECKING:
    from powerprop.experiments.sparse.config import Config

Found = Callable[..., list[dict[str, Any]]]
"""found(row, column, cycles=1): the results of its seeds."""

Logged = Callable[[str, str], list[dict[str, float]]]
"""logged(row, column): the metrics of its first seed, step by step."""

DRAWN = ("dense", "static", "rigl", "iterative", "topkast-0", "pp-iterative", "pp-topkast-0")
"""The rows whose training is drawn: more could not be told apart."""

FAR = 0.05
"""A row that falls by more than this below all others would hide their differences."""


def extreme(config: Config, found: Found, figures: Path) -> Image:
    """Accuracy against sparsity, uniform distribution; rows with Powerprop are dashed.

    Where Static falls so far that beside it the others could not be told apart, it stands in the table alone.
    """
    columns = [c for c in config.columns if c.startswith("uniform")]
    curves = []
    for row in ("static", "set", "rigl", "iterative", "topkast-0", "pp-iterative", "pp-topkast-0"):
        runs = [found(row, c) for c in columns] if row in config.rows else []
        values = [[run["test"] for run in cell_runs if "test" in run] for cell_runs in runs]
        if values and all(len(v) == config.seeds for v in values):
            sparsities = [parse(c)[1] for c in columns]
            per_seed = [[v[seed] for v in values] for seed in range(config.seeds)]
            curves.append(Curve(ROWS[row].label, None, sparsities, per_seed, dashed=ROWS[row].powerprop))
    lowest = {curve.label: curve.mean.min() for curve in curves}
    static = lowest.pop(ROWS["static"].label, 1.0)
    alone = bool(lowest) and static < min(lowest.values()) - FAR
    shown = [curve for curve in curves if not alone or curve.label != ROWS["static"].label]
    path = figures / "sparsity.png"
    lines(shown, path, "Accuracy against sparsity", "sparsity", "test accuracy", percent=True)
    return Image(path, "Static is far below and stands in the table alone." if alone else "", wide=True)


def training(config: Config, logged: Logged, figures: Path) -> list[Image]:
    """Validation accuracy during training, a figure for each uniform column; rows with Powerprop are dashed."""
    columns = [c for c in config.columns if c.startswith("uniform")]
    return [_training(config, logged, column, figures) for column in columns]


def _training(config: Config, logged: Logged, column: str, figures: Path) -> Image:
    curves = []
    for row in (r for r in DRAWN if r in config.rows):
        points = [point for point in logged(row, column) if "accuracy" in point]
        steps, values = [p["step"] for p in points], [p["accuracy"] for p in points]
        curves.append(Curve(ROWS[row].label, None, steps, values, dashed=ROWS[row].powerprop))
    sparsity = parse(column)[1]
    path = figures / f"training-{100 * sparsity:g}.png"
    lines(curves, path, f"Training at {sparsity:.0%} sparsity", "step", "validation accuracy", percent=True)
    return Image(path, "First seed, at the chosen rate.")
