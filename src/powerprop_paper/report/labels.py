"""Names beside what they name: at the ends of lines and next to points, never on top of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from powerprop_paper.report import palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]

LINE = 13.0 / 72
"""The height of a label in inches."""

LETTER = 0.074
"""The average width of a letter of a label in inches."""

STEPS = (0, 1, -1, 2, -2, 3, -3, 4, -4)
"""How many lines a point's label may move up or down."""


class Named(NamedTuple):
    """A place in data coordinates, its name and its colour."""

    x: float
    y: float
    label: str
    colour: str


def room_for(labels: Sequence[str]) -> float:
    """The width in inches that labels at the ends of lines take."""
    return 0.2 + LETTER * max(len(label) for label in labels)


def end_labels(axes: Axes, ends: Sequence[Named]) -> None:
    """Write each name right of the axes at the height of its line's end, moved apart where names would touch."""
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # lays out the axes, whose height is needed
    height = axes.get_window_extent().height / axes.figure.dpi
    places = _in_axes(axes, ends)
    for end, (x, y), level in zip(ends, places, keep_apart(places[:, 1], LINE / height), strict=True):
        look: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
        axes.plot([x, 1.0, 1.03], [y, y, level], color=end.colour, linewidth=0.8, alpha=0.8, zorder=2, **look)
        axes.text(
            1.04, level, end.label, color=palette.darker(end.colour), fontsize=9, fontweight="bold", va="center", **look
        )


def keep_apart(wanted: Array, gap: float) -> Array:
    """Positions in [0, 1] near ``wanted``, in the same order and ``gap`` apart (least squares, pooling neighbours)."""
    order = np.argsort(wanted, kind="stable")
    pools: list[tuple[float, int]] = []
    for rank, index in enumerate(order):
        pools.append((float(wanted[index]) - rank * gap, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (b, m), (a, n) = pools.pop(), pools.pop()
            pools.append(((a * n + b * m) / (n + m), n + m))
    level = np.repeat([value for value, _ in pools], [count for _, count in pools])
    level = np.clip(level, 0.0, max(0.0, 1.0 - gap * (len(wanted) - 1)))
    result = np.empty_like(wanted)
    result[order] = level + gap * np.arange(len(wanted))
    return result


def point_labels(axes: Axes, points: Sequence[Named]) -> None:
    """Write each name right or left of its point, moved up or down and tied to it where others are in the way."""
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]
    extent = axes.get_window_extent()
    width, height = extent.width / axes.figure.dpi, extent.height / axes.figure.dpi
    places = _in_axes(axes, points)
    marks = [(x - 0.07 / width, y - 0.07 / height, x + 0.07 / width, y + 0.07 / height) for x, y in places]
    taken: list[tuple[float, float, float, float]] = []
    for point, (x, y) in zip(points, places, strict=True):
        size = (LETTER * len(point.label) / width, LINE / height)
        box = min(_boxes(x, y, size, 0.14 / width), key=lambda box: _overlap(box, [*marks, *taken]))
        taken.append(box)
        look: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
        level, left = (box[1] + box[3]) / 2, box[0] > x
        edge = box[0] if left else box[2]
        axes.plot([x, edge], [y, level], color=point.colour, linewidth=0.8, alpha=0.8, zorder=2, **look)
        axes.text(
            edge, level, point.label, color=palette.darker(point.colour), fontsize=9, fontweight="bold", va="center",
            ha="left" if left else "right", **look,
        )  # fmt: skip


def _boxes(x: float, y: float, size: tuple[float, float], gap: float) -> list[tuple[float, float, float, float]]:
    """Where a label may stand, the best places first: (left, bottom, right, top) in fractions of the axes."""
    width, height = size
    found = []
    for step in STEPS:
        low = y + (step - 0.5) * height
        away = gap * (1 + 0.5 * abs(step))
        found += [(x + away, low, x + away + width, low + height), (x - away - width, low, x - away, low + height)]
    return found


def _overlap(box: tuple[float, float, float, float], others: Sequence[tuple[float, float, float, float]]) -> float:
    """The area that a box shares with others or has outside the axes."""
    left, bottom, right, top = box
    shared = sum(
        max(0.0, min(right, r) - max(left, x)) * max(0.0, min(top, t) - max(bottom, y)) for x, y, r, t in others
    )
    inside = max(0.0, min(right, 1.0) - max(left, 0.0)) * max(0.0, min(top, 1.0) - max(bottom, 0.0))
    return shared + (right - left) * (top - bottom) - inside


def _in_axes(axes: Axes, places: Sequence[Named]) -> Array:
    """Data coordinates as fractions of the axes, whatever their scales."""
    transform = axes.transScale + axes.transLimits
    return np.asarray(transform.transform([(place.x, place.y) for place in places]), np.float64)
