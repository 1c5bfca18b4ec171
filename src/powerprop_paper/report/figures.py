"""Figures of curves. Each function writes one SVG and returns it with the words that stand for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from powerprop_paper.report import style
from powerprop_paper.report.curve import Curve, draw, end_labels, in_words, require_curves, require_fractions, room_for
from powerprop_paper.report.style import Image

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEPT_TICKS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
TICKED_POINTS = 12
"""An axis of fractions, or a logarithmic one, with at most this many positions has a tick at each."""
ACROSS = 5
"""Panels side by side."""
ROOM, LEAST = 0.06, 0.02
"""Room above the largest value, as a fraction of a panel's height; its least height, as one of the largest value."""


def pruning_curves(
    curves: Sequence[Curve], path: str | Path, title: str, ylabel: str = "test accuracy",
    highlight: tuple[float, float] | None = None, caption: str = "",
) -> Image:  # fmt: skip
    """A fraction against the fraction of weights kept, dense on the left (the paper's figures 2 a and b, 3 a and b).

    highlight: a range of weights kept to shade, such as the one that the text averages over.
    """
    require_curves(curves, title)
    require_fractions(curves)
    for curve in curves:
        low, high = curve.positions[0], curve.positions[-1]
        if low <= 0 or high > 1:
            raise ValueError(
                f"curve {curve.label!r}: weights kept must be fractions in (0, 1], got {low:g} to {high:g}"
            )
    figure = sized(curves, 7.4, 4.3)
    axes = style.dress(figure.add_subplot(), title, "weights kept (log scale)", ylabel)
    if highlight is not None:
        axes.axvspan(*highlight, color=style.ACCENT, alpha=0.07, linewidth=0, zorder=0)
    draw(axes, curves, (0.0, 1.0), 100.0)
    _kept_axis(axes, min(float(curve.positions[0]) for curve in curves))
    _percent_axis(axes, max(float((curve.mean + curve.std).max()) for curve in curves))
    end_labels(axes, [curve.end(100.0, first=True) for curve in curves])
    alt = f"{title}: {ylabel} against weights kept. {in_words(curves, percent_text, percent_text)}"
    return Image(style.save(figure, path), alt, caption, wide=True)


def lines(
    curves: Sequence[Curve], path: str | Path, title: str, xlabel: str, ylabel: str, percent: bool = False,
    logx: bool = False, fractions: bool = False,
    changes: tuple[Sequence[float], Sequence[float]] | None = None, caption: str = "", wide: bool = False,
    logy: bool = False,
) -> Image:  # fmt: skip
    """Any metric against steps, tasks or batch size, each curve labelled at its end.

    percent: the values are fractions, shown as percent.
    logx: logarithmic x axis.
    fractions: the positions are fractions, shown as percent where they were measured.
    changes: places on the x axis where something changed (dashed), and where it was noticed (triangles).
    wide: for the whole width of the page.
    logy: logarithmic y axis.
    """
    require_curves(curves, title)
    if percent:
        require_fractions(curves)
    figure = sized(curves, 7.4 if wide else 4.9, 3.9)
    axes = style.dress(figure.add_subplot(), title, xlabel, ylabel)
    scale = 100.0 if percent else 1.0
    draw(axes, curves, (0.0, 1.0) if percent else None, scale)
    if changes is not None:
        _changes(axes, *changes)
    _x_axis(axes, curves, logx, fractions)
    if logy:
        _log_y_axis(axes, curves, scale)
    if percent:
        axes.yaxis.set_major_formatter("{x:g}%")
    end_labels(axes, [curve.end(scale) for curve in curves])
    place: Callable[[float], str] = percent_text if fractions else number_text
    alt = f"{title}: {ylabel} against {xlabel}. {in_words(curves, place, percent_text if percent else number_text)}"
    return Image(style.save(figure, path), alt, caption, wide)


def sized(curves: Sequence[Curve], width: float, height: float) -> Figure:
    """A figure whose axes are this large whatever room the labels beside them take."""
    labels = [curve.label for curve in curves]
    return style.figure(width + room_for(labels), max(height, 1.3 + 0.2 * len(labels)))


def percent_text(value: float) -> str:
    """A fraction as percent with as many digits as it needs."""
    return f"{100 * value:.3g}%"


def number_text(value: float) -> str:
    """A number as words have it."""
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.3g}"


def _kept_axis(axes: Axes, smallest: float) -> None:
    """100% on the left, then 50%, 20%, 10% … on a log scale, as plain percent."""
    axes.set_xscale("log")
    ticks = [tick for tick in KEPT_TICKS if tick >= smallest * 0.99]
    axes.set_xticks(ticks, [f"{tick * 100:g}%" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(1.06, smallest)


def _percent_axis(axes: Axes, largest: float) -> None:
    """From zero to the next round number above the largest value: no half of the height without data."""
    top = 100 if largest > 0.8 else max(10, 10 * int(np.ceil(10 * largest - 1e-9)))
    axes.set_ylim(0, top * 1.02)
    axes.set_yticks(range(0, top + 1, 20 if top > 60 else 10))
    axes.yaxis.set_major_formatter("{x:g}%")


def _x_axis(axes: Axes, curves: Sequence[Curve], logx: bool, fractions: bool) -> None:
    low = min(float(curve.positions[0]) for curve in curves)
    high = max(float(curve.positions[-1]) for curve in curves)
    measured = np.unique(np.concatenate([curve.positions for curve in curves]))
    if logx:
        if low <= 0:
            raise ValueError(f"a logarithmic axis needs positive x, got {low:g}")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    elif (measured == np.round(measured)).all():
        axes.locator_params(axis="x", integer=True)
    if (logx or fractions) and len(measured) <= TICKED_POINTS:
        axes.set_xticks(measured)
        axes.minorticks_off()
    if fractions:
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    elif high >= 10_000 and not logx:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
    if high > low:
        axes.set_xlim(low, high)


def _log_y_axis(axes: Axes, curves: Sequence[Curve], scale: float) -> None:
    """Whole decades, so that what hardly changes looks like it."""
    low, high = (scale * float(f([f(curve.mean) for curve in curves])) for f in (np.min, np.max))
    if low <= 0:
        raise ValueError(f"a logarithmic axis needs positive y, got {low:g}")
    first, last = np.floor(np.log10(low)), np.ceil(np.log10(high))
    axes.set_yscale("log")
    axes.set_ylim(10.0**first, 10.0 ** max(last, first + 1))
    axes.yaxis.set_major_formatter(lambda value, _: number_text(value))
    axes.yaxis.set_minor_formatter("")


def _changes(axes: Axes, true: Sequence[float], noticed: Sequence[float]) -> None:
    """Dashed lines from bottom to top, and triangles on the upper edge."""
    for place in true:
        axes.axvline(place, color=style.MUTED, linewidth=1, linestyle=style.DASHES, zorder=1.5)
    axes.plot(
        noticed, [1.0] * len(noticed), "v", color=style.ACCENT, markersize=6, transform=axes.get_xaxis_transform(),
        clip_on=False, zorder=4,
    )  # fmt: skip


def panels(
    curves: Mapping[str, Sequence[Curve]], path: str | Path, title: str, xlabel: str, ylabel: str,
    span: float | None = None, caption: str = "",
) -> Image:  # fmt: skip
    """A small figure for each name, with a scale of its own, and one key for all.

    curves: of every panel by its name.
    span: a panel shows at most so much below its largest value, and curves that fall lower leave it: one that does
        much worse than the others would make them one line. By default all is shown.
    """
    for name, each in curves.items():
        require_curves(each, name)
    down, across = -(-len(curves) // ACROSS), min(ACROSS, len(curves))
    figure = style.figure(0.6 + 2.0 * across, 1.0 + 1.8 * down)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold", color=style.INK)
    last = max(float(curve.positions[-1]) for each in curves.values() for curve in each)
    for number, (name, each) in enumerate(curves.items()):
        below, left = number + ACROSS >= len(curves), number % ACROSS == 0
        axes = figure.add_subplot(down, across, number + 1)
        style.dress(axes, "", xlabel if below else "", ylabel if left else "")
        axes.set_title(name, loc="left", fontsize=9.5, color=style.INK, pad=4)
        _draw_panel(axes, each, span)
        axes.set_xlim(1, max(last, 2))
        axes.locator_params(axis="x", integer=True, nbins=5)
    _key(figure, list({curve.label: curve for each in curves.values() for curve in each}.values()))
    ends = "; ".join(
        f"{name}: {', '.join(f'{c.label} {c.mean[-1]:.4g}' for c in each)}" for name, each in curves.items()
    )
    return Image(
        style.save(figure, path), f"{title}: {ylabel} against {xlabel}. At the end {ends}.", caption, wide=True
    )


def _draw_panel(axes: Axes, curves: Sequence[Curve], span: float | None) -> None:
    """Mean lines with few markers; in so small a figure bands would hide each other."""
    for curve in curves:
        single = len(curve.positions) == 1
        axes.plot(curve.positions, curve.mean, zorder=2.5 if curve.plain else 3, **_panel_look(curve, single))
    largest = max(float(curve.mean.max()) for curve in curves)
    smallest = min(float(curve.mean.min()) for curve in curves)
    height = largest - smallest if span is None else min(span, largest - smallest)
    height = max(height, LEAST * abs(largest), 1e-9)
    axes.set_ylim(largest - (1 + ROOM) * height, largest + ROOM * height)
    axes.locator_params(axis="y", nbins=5)
    axes.ticklabel_format(axis="y", useOffset=False)


def _panel_look(curve: Curve, marked: bool) -> dict[str, Any]:
    colour, marker = curve.look
    return {
        "color": colour, "linewidth": 1.0 if curve.plain else 1.9, "marker": marker, "markersize": 4,
        "markevery": [0] if marked else [0, -1], "markeredgewidth": 1.0 if curve.plain else 0.5,
        "markerfacecolor": style.PAPER if curve.plain else colour,
        "markeredgecolor": colour if curve.plain else style.PAPER, "solid_capstyle": "round",
    }  # fmt: skip


def _key(figure: Figure, curves: Sequence[Curve]) -> None:
    """The names of all curves below the panels."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], label=curve.label, **(_panel_look(curve, True) | {"markevery": None})) for curve in curves
    ]
    columns = min(len(curves), ACROSS)
    figure.legend(
        handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=9, labelcolor=style.INK,
        handlelength=2.2, columnspacing=1.6,
    )  # fmt: skip
