"""Matrices as heat maps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from powerprop_paper.report import palette, style
from powerprop_paper.report.image import Image
from powerprop_paper.report.labels import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap

WRITTEN_TASKS = 12
"""Matrices of at most this many rows and columns carry their numbers."""


def heatmap(
    matrix: ArrayLike, path: str | Path, title: str, xlabel: str = "evaluated on task",
    ylabel: str = "after learning task", label: str = "accuracy", caption: str = "",
) -> Image:  # fmt: skip
    """A matrix of fractions in percent, such as accuracy after task i (row) on task j (column); NaN stays empty."""
    values = np.asarray(matrix, np.float64)
    if values.ndim != 2 or values.size == 0:
        raise ValueError(f"heat map {title!r} needs a matrix (rows, columns), got shape {values.shape}")
    known = values[np.isfinite(values)]
    if known.size == 0 or known.min() < 0 or known.max() > 1:
        found = f"{known.min():g} to {known.max():g}" if known.size else "no finite value"
        raise ValueError(f"heat map {title!r} needs fractions in [0, 1], got {found}")
    figure = style.figure(5.8, 4.9)
    axes = style.dress(figure.add_subplot(), title, xlabel, ylabel, grid="none")
    low = _floor(float(known.min()) * 100)
    rows, columns = values.shape
    image = axes.imshow(
        values * 100, cmap=_colour_map(), vmin=low, vmax=100, interpolation="nearest",
        aspect="equal" if rows == columns else "auto", extent=(0.5, columns + 0.5, rows + 0.5, 0.5),
    )  # fmt: skip
    for spine in axes.spines.values():
        spine.set_visible(False)
    _task_ticks(axes, rows, columns)
    if max(rows, columns) <= WRITTEN_TASKS:
        _write_values(axes, values * 100, low)
    bar = figure.colorbar(image, ax=axes, shrink=0.86, pad=0.03, format="{x:g}%")
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=9, colors=palette.MUTED)
    bar.set_label(label, fontsize=10, color=palette.INK)
    alt = (
        f"{title}: {label} in {rows} rows ({ylabel}) and {columns} columns ({xlabel}), "
        f"{100 * known.min():.3g}% to {100 * known.max():.3g}%, {100 * values.diagonal().mean():.3g}% on the diagonal."
    )
    return Image(style.save(figure, path), alt, caption)


def _floor(smallest: float) -> float:
    """A round lower end of the colour scale: whole range for wide matrices, the nearest ten below for good ones."""
    return max(0.0, 10 * math.floor((smallest - 1e-9) / 10))


def _colour_map() -> Colormap:
    from matplotlib.colors import LinearSegmentedColormap

    stops = ["#fbfaf5", "#cfe3d4", "#74b8ac", "#22808c", "#143d66"]
    return LinearSegmentedColormap.from_list("powerprop", stops).with_extremes(bad=(0, 0, 0, 0))


def _task_ticks(axes: Axes, rows: int, columns: int) -> None:
    for axis, count in ((axes.xaxis, columns), (axes.yaxis, rows)):
        step = next(step for step in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 10**9) if count / step <= WRITTEN_TASKS)
        ticks = (
            [1, *(tick for tick in range(step, count + 1, step) if tick > 1)] if step > 1 else list(range(1, count + 1))
        )
        axis.set_ticks(ticks)


def _write_values(axes: Axes, percent: Array, low: float) -> None:
    for (row, column), value in np.ndenumerate(percent):
        if np.isfinite(value):
            colour = palette.ON_DARK if (value - low) / (100 - low) > 0.6 else palette.ON_LIGHT
            axes.text(column + 1, row + 1, f"{value:.1f}", ha="center", va="center", fontsize=7.5, color=colour)
