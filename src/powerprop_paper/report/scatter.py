"""Methods as points: what one costs against what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from powerprop_paper.report import palette, style
from powerprop_paper.report.figures import number_text, percent_text
from powerprop_paper.report.image import Image
from powerprop_paper.report.labels import Named, point_labels
from powerprop_paper.report.mean import Mean
from powerprop_paper.report.palette import Look, alpha_look, method_look


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


def scatter(
    points: Sequence[Point], path: str | Path, title: str, xlabel: str, ylabel: str, percent: bool = False,
    logx: bool = False, caption: str = "",
) -> Image:  # fmt: skip
    """One labelled point per method, with error bars of one standard deviation, such as accuracy against bytes kept.

    Args:
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
            markerfacecolor=colour if point.filled else palette.PAPER, markeredgecolor=colour, markeredgewidth=1.6,
            elinewidth=1.2, capsize=2.5, zorder=3,
        )  # fmt: skip
    axes.margins(x=0.1, y=0.1)
    if percent:
        axes.yaxis.set_major_formatter("{x:g}%")
    point_labels(axes, [Named(p.x, p.y.mean * scale, p.method, p.look.colour) for p in points])
    value = percent_text if percent else number_text
    words = "; ".join(f"{p.method}: {value(p.y.mean)} at {number_text(p.x)}" for p in points)
    return Image(style.save(figure, path), f"{title}: {ylabel} against {xlabel}. {words}.", caption, wide=True)
