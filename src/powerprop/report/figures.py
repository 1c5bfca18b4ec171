"""Figures of curves. Each function writes one PNG and returns its path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from powerprop.report import style
from powerprop.report.curve import Curve, draw, end_labels, require_curves, require_fractions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEPT_TICKS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
TICKED_POINTS = 12
"""A logarithmic axis with at most this many positions has a tick at each."""


def pruning_curves(
    curves: Sequence[Curve], path: str | Path, title: str, xlabel: str = "weights kept (log scale)",
    ylabel: str = "test accuracy", highlight: tuple[float, float] | None = None,
) -> Path:  # fmt: skip
    """Accuracy (a fraction) against the fraction of weights kept, dense on the left (the paper's figures 2a and 3a).

    Args:
        highlight: a range of weights kept to shade, such as the one that the text averages over.
    """
    return _against_kept(curves, path, title, xlabel, ylabel, highlight)


def overlap_curves(
    curves: Sequence[Curve], path: str | Path, title: str, xlabel: str = "weights kept (log scale)",
    ylabel: str = "overlap of the two masks",
) -> Path:  # fmt: skip
    """Overlap of the masks before and after training against the fraction of weights kept (figure 2b)."""
    return _against_kept(curves, path, title, xlabel, ylabel, None)


def lines(
    curves: Sequence[Curve], path: str | Path, title: str, xlabel: str, ylabel: str, percent: bool = False,
    logx: bool = False, reference: tuple[float, str] | None = None,
    changes: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Path:  # fmt: skip
    """Any metric against steps, tasks or batch size, each curve labelled at its end.

    Args:
        percent: the values are fractions, shown as percent.
        logx: logarithmic x axis.
        reference: (value, label) of a horizontal line, such as the paper's number.
        changes: places on the x axis where something changed, and where it was noticed.
    """
    require_curves(curves, title)
    if percent:
        require_fractions(curves)
    figure = style.figure(6.0, 3.9)
    axes = style.dress(figure.add_subplot(), title, xlabel, ylabel)
    scale = 100.0 if percent else 1.0
    draw(axes, curves, (0.0, 1.0) if percent else None, scale)
    if reference is not None:
        _reference(axes, reference[0] * scale, reference[1])
    if changes is not None:
        _changes(axes, *changes)
    _x_axis(axes, curves, logx)
    if percent:
        axes.yaxis.set_major_formatter("{x:g}%")
    end_labels(axes, curves, scale)
    return style.save(figure, path)


def _against_kept(
    curves: Sequence[Curve],
    path: str | Path,
    title: str,
    xlabel: str,
    ylabel: str,
    highlight: tuple[float, float] | None,
) -> Path:
    require_curves(curves, title)
    require_fractions(curves)
    for curve in curves:
        if curve.positions[0] <= 0 or curve.positions[-1] > 1:
            raise ValueError(
                f"curve {curve.label!r}: weights kept must be fractions in (0, 1], "
                f"got {curve.positions[0]:g} to {curve.positions[-1]:g}"
            )
    figure = style.figure(5.8, 4.1)
    axes = style.dress(figure.add_subplot(), title, xlabel, ylabel)
    if highlight is not None:
        axes.axvspan(*highlight, color=style.ACCENT, alpha=0.07, linewidth=0, zorder=0)
    draw(axes, curves, (0.0, 1.0), 100.0)
    _kept_axis(axes, min(float(curve.positions[0]) for curve in curves))
    axes.set_ylim(0, 102)
    axes.set_yticks(range(0, 101, 20))
    axes.yaxis.set_major_formatter("{x:g}%")
    style.legend(axes, "lower left")
    return style.save(figure, path)


def _kept_axis(axes: Axes, smallest: float) -> None:
    """100% on the left, then 50%, 20%, 10% … on a log scale, as plain percent."""
    axes.set_xscale("log")
    ticks = [tick for tick in KEPT_TICKS if tick >= smallest * 0.99]
    axes.set_xticks(ticks, [f"{tick * 100:g}%" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(1.06, smallest / 1.06)


def _x_axis(axes: Axes, curves: Sequence[Curve], logx: bool) -> None:
    low = min(float(curve.positions[0]) for curve in curves)
    high = max(float(curve.positions[-1]) for curve in curves)
    if logx:
        if low <= 0:
            raise ValueError(f"a logarithmic axis needs positive x, got {low:g}")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        measured = np.unique(np.concatenate([curve.positions for curve in curves]))
        if len(measured) <= TICKED_POINTS:
            axes.set_xticks(measured)
            axes.minorticks_off()
    elif high >= 10_000:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
    if high > low:
        axes.set_xlim(low, high)


def _reference(axes: Axes, value: float, label: str) -> None:
    axes.axhline(value, color=style.MUTED, linewidth=1, linestyle=(0, (3, 3)), zorder=1.5)
    axes.annotate(
        label, xy=(0.01, value), xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points",
        fontsize=8.5, color=style.MUTED,
    )  # fmt: skip


def _changes(axes: Axes, true: Sequence[float], noticed: Sequence[float]) -> None:
    """Dashed lines from bottom to top, and triangles on the upper edge."""
    for place in true:
        axes.axvline(place, color=style.MUTED, linewidth=1, linestyle=(0, (3, 3)), zorder=1.5)
    axes.plot(
        noticed, [1.0] * len(noticed), "v", color=style.ACCENT, markersize=6, transform=axes.get_xaxis_transform(),
        clip_on=False, zorder=4,
    )  # fmt: skip
