"""Figures without curves: bars, methods as points, matrices as heat maps, and pictures of pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from powerprop_paper.report import style
from powerprop_paper.report.curve import Array, Named, point_labels
from powerprop_paper.report.figures import number_text, percent_text
from powerprop_paper.report.style import Image, Look, alpha_look, method_look
from powerprop_paper.report.table import Mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WRITTEN_TASKS = 12
"""Matrices of at most this many rows and columns carry their numbers."""
PITCH = 0.27
"""Inches from one small image to the next."""
GAP = 0.08
"""Between small images, as a fraction of their size."""


@dataclass(frozen=True)
class Bars:
    """One series of a bar chart: a mean (or None) for each of its labels; colour by ``alpha`` as everywhere."""

    label: str
    alpha: float
    means: Sequence[Mean | None]

    def data(self) -> dict[str, Any]:
        """As summary.json has it."""
        return {"label": self.label, "means": [mean and mean.data() for mean in self.means]}


def bars(
    labels: Sequence[str], series: Sequence[Bars], path: str | Path, title: str, xlabel: str, zoom: bool = False,
    caption: str = "",
) -> Image:  # fmt: skip
    """Methods (rows) with one bar per series and error bars of one standard deviation.

    zoom: dots on an axis that does not begin at zero, for values that lie close together.
    """
    if not labels or not series:
        raise ValueError(f"bar chart {title!r} needs labels and series, got {len(labels)} and {len(series)}")
    for one in series:
        if len(one.means) != len(labels):
            raise ValueError(f"series {one.label!r} has {len(one.means)} means, expected {len(labels)}, one per label")
    figure = style.figure(6.8, 1.5 + len(labels) * max(0.3, 0.2 * len(series) + 0.08))
    axes = style.dress(figure.add_subplot(), title, xlabel, "", grid="x")
    rows = np.arange(len(labels), dtype=np.float64)
    height = (0.5 if zoom else 0.78) / len(series)
    for row in range(1, len(labels), 2):
        axes.axhspan(row - 0.5, row + 0.5, color=style.SHADE, linewidth=0, zorder=0)
    for number, one in enumerate(series):
        _draw_series(axes, one, rows + (number - (len(series) - 1) / 2) * height, height, zoom)
    axes.set_yticks(rows, labels, fontsize=9.5, color=style.INK)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)
    if len(series) > 1:
        figure.legend(loc="outside lower center", ncols=len(series), fontsize=9, frameon=False, labelcolor=style.INK)
    words = "; ".join(
        f"{one.label}, {label}: {number_text(mean.mean)}"
        for one in series
        for label, mean in zip(labels, one.means, strict=True)
        if mean is not None
    )
    return Image(style.save(figure, path), f"{title}: {xlabel}. {words}.", caption)


def _draw_series(axes: Axes, one: Bars, rows: Array, height: float, zoom: bool) -> None:
    known = [(mean, row) for mean, row in zip(one.means, rows, strict=True) if mean is not None]
    means, places = [mean.mean for mean, _ in known], [row for _, row in known]
    stds = [mean.std if mean.n > 1 else 0.0 for mean, _ in known]
    colour = style.alpha_colour(one.alpha)
    error: dict[str, Any] = {"ecolor": style.darker(colour), "elinewidth": 1.2, "capsize": 2.5, "capthick": 1.2}
    if zoom:
        axes.errorbar(means, places, xerr=stds, fmt="o", color=colour, markersize=6, label=one.label, zorder=4, **error)
    else:
        shown = stds if any(stds) else None  # a bar without a spread needs no caps at its end
        axes.barh(places, means, height * 0.9, xerr=shown, color=colour, label=one.label, zorder=3, error_kw=error)


@dataclass(frozen=True)
class Point:
    """A method at a place; filled with Powerpropagation (`"Powerprop + EWC"`), hollow without.

    Where powers are compared, alpha decides on the look and `method` is any label.
    """

    method: str
    x: float
    y: Mean
    alpha: float | None = None

    @property
    def look(self) -> Look:
        """Colour and marker."""
        return method_look(self.method) if self.alpha is None else alpha_look(self.alpha)

    @property
    def filled(self) -> bool:
        """True with Powerpropagation."""
        return self.method.startswith("Powerprop + ") if self.alpha is None else self.alpha > 1

    def data(self) -> dict[str, Any]:
        """As summary.json has it."""
        return {"label": self.method, "x": self.x, "y": self.y.data()}


def scatter(
    points: Sequence[Point], path: str | Path, title: str, xlabel: str, ylabel: str, percent: bool = False,
    logx: bool = False, caption: str = "",
) -> Image:  # fmt: skip
    """One labelled point per method, with error bars of one standard deviation, such as accuracy against bytes kept.

    percent: the heights are fractions, shown as percent.
    logx: logarithmic x axis; places must be positive then.
    """
    if not points:
        raise ValueError(f"figure {title!r} needs at least one point, got none")
    if logx and (low := min(point.x for point in points)) <= 0:
        raise ValueError(f"a logarithmic axis needs positive x, got {low:g}")
    figure = style.figure(9.6, 4.9)
    axes = style.dress(figure.add_subplot(), title, xlabel, ylabel)
    if logx:
        axes.set_xscale("log")
        axes.minorticks_off()
    scale = 100.0 if percent else 1.0
    for point in points:
        colour, marker = point.look
        mean = point.y.scaled(scale)
        axes.errorbar(
            point.x, mean.mean, yerr=mean.std if mean.n > 1 else None, color=colour, marker=marker, markersize=8,
            markerfacecolor=colour if point.filled else style.PAPER, markeredgecolor=colour, markeredgewidth=1.6,
            elinewidth=1.2, capsize=2.5, zorder=3,
        )  # fmt: skip
    axes.margins(x=0.1, y=0.1)
    if percent:
        axes.yaxis.set_major_formatter("{x:g}%")
    point_labels(axes, [Named(p.x, p.y.mean * scale, p.method, p.look.colour) for p in points])
    value = percent_text if percent else number_text
    words = "; ".join(f"{p.method}: {value(p.y.mean)} at {number_text(p.x)}" for p in points)
    return Image(style.save(figure, path), f"{title}: {ylabel} against {xlabel}. {words}.", caption, wide=True)


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
    style.matplotlib()
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("powerprop", ["#fbfaf5", "#cfe3d4", "#74b8ac", "#22808c", "#143d66"])
    figure = style.figure(5.8, 4.9)
    axes = style.dress(figure.add_subplot(), title, xlabel, ylabel, grid="none")
    low = max(0.0, 10 * math.floor(float(known.min()) * 10 - 1e-9))  # a round lower end of the colour scale
    rows, columns = values.shape
    image = axes.imshow(
        values * 100, cmap=colours.with_extremes(bad=(0, 0, 0, 0)), vmin=low, vmax=100, interpolation="nearest",
        aspect="equal" if rows == columns else "auto", extent=(0.5, columns + 0.5, rows + 0.5, 0.5),
    )  # fmt: skip
    for spine in axes.spines.values():
        spine.set_visible(False)
    _task_ticks(axes, rows, columns)
    if max(rows, columns) <= WRITTEN_TASKS:
        _write_values(axes, values * 100, low)
    bar = figure.colorbar(image, ax=axes, shrink=0.86, pad=0.03, format="{x:g}%")
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=9, colors=style.MUTED)
    bar.set_label(label, fontsize=10, color=style.INK)
    alt = (
        f"{title}: {label} in {rows} rows ({ylabel}) and {columns} columns ({xlabel}), "
        f"{100 * known.min():.3g}% to {100 * known.max():.3g}%, {100 * values.diagonal().mean():.3g}% on the diagonal."
    )
    return Image(style.save(figure, path), alt, caption)


def _task_ticks(axes: Axes, rows: int, columns: int) -> None:
    for axis, count in ((axes.xaxis, columns), (axes.yaxis, rows)):
        step = next(step for step in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 10**9) if count / step <= WRITTEN_TASKS)
        axis.set_ticks(sorted({1, *range(step, count + 1, step)}))


def _write_values(axes: Axes, percent: Array, low: float) -> None:
    for (row, column), value in np.ndenumerate(percent):
        if np.isfinite(value):
            colour = style.ON_DARK if (value - low) / (100 - low) > 0.6 else style.ON_LIGHT
            axes.text(column + 1, row + 1, f"{value:.1f}", ha="center", va="center", fontsize=7.5, color=colour)


@dataclass(frozen=True, eq=False)
class Grid:
    """A block of small grey images.

    label: what the reader sees above it.
    images: (rows, columns, height, width) in [0, 1].
    note: a second line below the label, such as a score.
    """

    label: str
    images: ArrayLike
    note: str = ""

    def __post_init__(self) -> None:
        images = np.asarray(self.images, np.float64)
        if images.ndim != 4 or images.size == 0 or not (images.min() >= 0 and images.max() <= 1):
            raise ValueError(f"grid {self.label!r} needs images (rows, columns, height, width) in [0, 1]")
        object.__setattr__(self, "images", images)

    def data(self) -> dict[str, Any]:
        """As summary.json has it, which does not repeat pixels."""
        return {"label": self.label, "note": self.note}

    @property
    def values(self) -> Array:
        """The images as an array."""
        return np.asarray(self.images, np.float64)


def image_grids(
    grids: Sequence[Grid], rows: Sequence[str], path: str | Path, title: str, across: int = 5, caption: str = ""
) -> Image:
    """Blocks of images with their labels, so many across; the images of one row are of the thing named beside it."""
    if not grids:
        raise ValueError(f"figure {title!r} needs at least one grid, got none")
    shapes = {grid.values.shape for grid in grids}
    if len(shapes) != 1 or len(rows) != grids[0].values.shape[0]:
        raise ValueError(f"figure {title!r} needs grids of one shape with {len(rows)} rows, got {sorted(shapes)}")
    down, columns = -(-len(grids) // across), grids[0].values.shape[1]
    across = min(across, len(grids))
    width, height = across * (columns * PITCH + 0.3) + 0.3, down * (len(rows) * PITCH + 0.55) + 0.4
    figure = style.figure(width, height)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold", color=style.INK)
    for number, grid in enumerate(grids):
        axes = figure.add_subplot(down, across, number + 1)
        _draw_grid(axes, grid, rows if number % across == 0 else ())
    words = "; ".join(f"{grid.label} ({grid.note})" if grid.note else grid.label for grid in grids)
    alt = f"{title}: {columns} images in each of the rows {', '.join(rows)}, for {words}."
    return Image(style.save(figure, path), alt, caption, wide=True)


def _draw_grid(axes: Axes, grid: Grid, rows: Sequence[str]) -> None:
    """One block as a single picture, dark on light: so it looks the same on every page."""
    joined = tiled(grid.values)
    count, columns = grid.values.shape[:2]
    axes.imshow(joined, cmap="gray_r", vmin=0, vmax=1, interpolation="none", extent=(0, columns, count, 0))
    axes.set_xticks([])
    axes.set_yticks([row + 0.5 for row in range(len(rows))], list(rows))
    axes.tick_params(length=0, labelsize=9, colors=style.MUTED, pad=3)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.text(0, -0.75 if grid.note else -0.2, grid.label, fontsize=9.5, fontweight="bold", color=style.INK)
    axes.text(0, -0.15, grid.note, fontsize=8.5, color=style.MUTED)


def tiled(images: Array) -> Array:
    """(rows, columns, height, width) as one picture, with paper between the small ones."""
    rows, columns, height, width = images.shape
    edge = max(1, round(GAP * height))
    padded = np.pad(images, ((0, 0), (0, 0), (0, edge), (0, edge)))
    return padded.transpose(0, 2, 1, 3).reshape(rows * (height + edge), columns * (width + edge))
