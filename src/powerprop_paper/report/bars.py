"""Bar charts of methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from powerprop_paper.report import palette, style
from powerprop_paper.report.figures import number_text, percent_text
from powerprop_paper.report.image import Image
from powerprop_paper.report.labels import Array
from powerprop_paper.report.mean import Mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Bars:
    """One series of a bar chart: a mean (or None) for each of its labels; colour by ``alpha`` as everywhere."""

    label: str
    alpha: float
    means: Sequence[Mean | None]


def bars(
    labels: Sequence[str], series: Sequence[Bars], path: str | Path, title: str, xlabel: str,
    percent: bool = False, zoom: bool = False, paper: Sequence[float | None] | None = None,
    caption: str = "",
) -> Image:  # fmt: skip
    """Methods (rows) with one bar per series and error bars of one standard deviation.

    Args:
        percent: the means are fractions, shown as percent.
        zoom: dots on an axis that does not begin at zero, for values that lie close together.
        paper: the paper's value for each label, drawn as an open diamond where there is one.
    """
    _check_bars(labels, series, paper, title)
    figure = style.figure(6.8, 1.5 + len(labels) * max(0.3, 0.2 * len(series) + 0.08))
    axes = style.dress(figure.add_subplot(), title, xlabel, "", grid="x")
    scale = 100.0 if percent else 1.0
    rows = np.arange(len(labels), dtype=np.float64)
    height = (0.5 if zoom else 0.78) / len(series)
    for row in range(1, len(labels), 2):
        axes.axhspan(row - 0.5, row + 0.5, color=palette.SHADE, linewidth=0, zorder=0)
    for number, one in enumerate(series):
        _draw_series(axes, one, rows + (number - (len(series) - 1) / 2) * height, height, scale, zoom)
    if paper is not None:
        known = [(value * scale, row) for value, row in zip(paper, rows, strict=True) if value is not None]
        axes.plot(
            *zip(*known, strict=True),
            "D",
            color=palette.INK,
            markerfacecolor=palette.PAPER,
            markersize=5,
            label="paper",
            zorder=6,
        )
    axes.set_yticks(rows, labels, fontsize=9.5, color=palette.INK)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)
    if percent:
        axes.xaxis.set_major_formatter("{x:g}%")
    if len(series) > 1 or paper is not None:
        # Containers come after lines in matplotlib's own order; the paper is always last here.
        handles, names = axes.get_legend_handles_labels()
        order = sorted(range(len(names)), key=lambda index: names[index] == "paper")
        figure.legend(
            [handles[index] for index in order], [names[index] for index in order], loc="outside lower center",
            ncols=len(order), fontsize=9, frameon=False, labelcolor=palette.INK,
        )  # fmt: skip
    value = percent_text if percent else number_text
    words = "; ".join(
        f"{one.label}, {label}: {value(mean.mean)}"
        for one in series
        for label, mean in zip(labels, one.means, strict=True)
        if mean is not None
    )
    return Image(style.save(figure, path), f"{title}: {xlabel}. {words}.", caption)


def _draw_series(axes: Axes, one: Bars, rows: Array, height: float, scale: float, zoom: bool) -> None:
    known = [(mean.scaled(scale), row) for mean, row in zip(one.means, rows, strict=True) if mean is not None]
    means = [mean.mean for mean, _ in known]
    stds = [mean.std if mean.n > 1 else 0.0 for mean, _ in known]
    colour = palette.alpha_colour(one.alpha)
    places = [row for _, row in known]
    error: dict[str, Any] = {"ecolor": palette.darker(colour), "elinewidth": 1.2, "capsize": 2.5, "capthick": 1.2}
    if zoom:
        axes.errorbar(means, places, xerr=stds, fmt="o", color=colour, markersize=6, label=one.label, zorder=4, **error)
    else:
        shown = stds if any(stds) else None  # a bar without a spread needs no caps at its end
        axes.barh(places, means, height * 0.9, xerr=shown, color=colour, label=one.label, zorder=3, error_kw=error)


def _check_bars(
    labels: Sequence[str], series: Sequence[Bars], paper: Sequence[float | None] | None, title: str
) -> None:
    if not labels or not series:
        raise ValueError(f"bar chart {title!r} needs labels and series, got {len(labels)} and {len(series)}")
    for one in series:
        if len(one.means) != len(labels):
            raise ValueError(f"series {one.label!r} has {len(one.means)} means, expected {len(labels)}, one per label")
    if paper is not None and len(paper) != len(labels):
        raise ValueError(f"paper has {len(paper)} values, expected {len(labels)}, one per label")
