"""Small multiples: the curves of the same methods for one thing after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerprop_paper.report import palette, style
from powerprop_paper.report.curve import Curve, require_curves
from powerprop_paper.report.image import Image

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 5
"""Panels side by side."""
ROOM, LEAST = 0.06, 0.02
"""Room above the largest value, as a fraction of a panel's height; its least height, as one of the largest value."""


def panels(
    curves: Mapping[str, Sequence[Curve]], path: str | Path, title: str, xlabel: str, ylabel: str,
    span: float | None = None, caption: str = "",
) -> Image:  # fmt: skip
    """A small figure for each name, with a scale of its own, and one key for all.

    Args:
        curves: of every panel by its name.
        span: a panel shows at most so much below its largest value, and curves that fall lower leave it: one that does
            much worse than the others would make them one line. By default all is shown.
    """
    for name, each in curves.items():
        require_curves(each, name)
    down, across = -(-len(curves) // ACROSS), min(ACROSS, len(curves))
    figure = style.figure(0.6 + 2.0 * across, 1.0 + 1.8 * down)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold", color=palette.INK)
    last = max(float(curve.positions[-1]) for each in curves.values() for curve in each)
    for number, (name, each) in enumerate(curves.items()):
        below, left = number + ACROSS >= len(curves), number % ACROSS == 0
        axes = figure.add_subplot(down, across, number + 1)
        style.dress(axes, "", xlabel if below else "", ylabel if left else "")
        axes.set_title(name, loc="left", fontsize=9.5, color=palette.INK, pad=4)
        _draw(axes, each, span)
        axes.set_xlim(1, max(last, 2))
        axes.locator_params(axis="x", integer=True, nbins=5)
    _key(figure, list({curve.label: curve for each in curves.values() for curve in each}.values()))
    ends = "; ".join(
        f"{name}: {', '.join(f'{c.label} {c.mean[-1]:.4g}' for c in each)}" for name, each in curves.items()
    )
    return Image(
        style.save(figure, path), f"{title}: {ylabel} against {xlabel}. At the end {ends}.", caption, wide=True
    )


def _draw(axes: Axes, curves: Sequence[Curve], span: float | None) -> None:
    """Mean lines with few markers; in so small a figure bands would hide each other."""
    for curve in curves:
        single = len(curve.positions) == 1
        axes.plot(curve.positions, curve.mean, zorder=2.5 if curve.plain else 3, **_look(curve, single))
    largest = max(float(curve.mean.max()) for curve in curves)
    smallest = min(float(curve.mean.min()) for curve in curves)
    height = largest - smallest if span is None else min(span, largest - smallest)
    height = max(height, LEAST * abs(largest), 1e-9)
    axes.set_ylim(largest - (1 + ROOM) * height, largest + ROOM * height)
    axes.locator_params(axis="y", nbins=5)
    axes.ticklabel_format(axis="y", useOffset=False)


def _look(curve: Curve, marked: bool) -> dict[str, Any]:
    colour, marker = curve.look
    return {
        "color": colour, "linewidth": 1.0 if curve.plain else 1.9, "marker": marker, "markersize": 4,
        "markevery": [0] if marked else [0, -1], "markeredgewidth": 1.0 if curve.plain else 0.5,
        "markerfacecolor": palette.PAPER if curve.plain else colour,
        "markeredgecolor": colour if curve.plain else palette.PAPER, "solid_capstyle": "round",
    }  # fmt: skip


def _key(figure: Figure, curves: Sequence[Curve]) -> None:
    """The names of all curves below the panels."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=curve.label, **(_look(curve, True) | {"markevery": None})) for curve in curves]
    columns = min(len(curves), ACROSS)
    figure.legend(
        handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=9, labelcolor=palette.INK,
        handlelength=2.2, columnspacing=1.6,
    )  # fmt: skip
