"""A curve with its repetitions, how it is drawn, and names beside what they name, never on top of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from powerprop_paper.report import style
from powerprop_paper.report.style import Look, alpha_look, method_look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]
LINE = 13.0 / 72
"""The height of a label in inches."""
LETTER = 0.074
"""The average width of a letter of a label in inches."""
STEPS = (0, 1, -1, 2, -2, 3, -3, 4, -4)
"""How many lines a point's label may move up or down."""
MARKED_POINTS = 24
"""Longer curves have a marker at about every so many points of a dozen, each curve at places of its own."""


class Named(NamedTuple):
    """A place in data coordinates, its name and its colour."""

    x: float
    y: float
    label: str
    colour: str


@dataclass(frozen=True, eq=False)
class Curve:
    """Repetitions of one measurement.

    label: what the reader sees.
    alpha: decides colour and marker where powers are compared; None where they are not.
    x: (points,) positions.
    values: (seeds, points) measurements, or (points,) for a single run.
    method: decides colour and marker where methods are compared, see `style.METHODS`.
    plain: the plain one of two curves of the same colour: a method without Powerpropagation, Adam without virtual
        targets, a pruned network as it is. Its line is thin and its markers are hollow.
    """

    label: str
    alpha: float | None
    x: ArrayLike
    values: ArrayLike
    method: str | None = None
    plain: bool = False

    def __post_init__(self) -> None:
        x, values = np.asarray(self.x, np.float64), np.atleast_2d(np.asarray(self.values, np.float64))
        if x.ndim != 1 or values.ndim != 2 or values.shape[1] != len(x) or values.size == 0:
            wanted = f"values must be (seeds, {x.size}) to match x of shape {x.shape}"
            raise ValueError(f"curve {self.label!r}: {wanted}, got {np.shape(self.values)}")
        if not (np.isfinite(x).all() and np.isfinite(values).all()):
            raise ValueError(f"curve {self.label!r}: x and values must be finite")
        order = np.argsort(x, kind="stable")
        object.__setattr__(self, "x", x[order])
        object.__setattr__(self, "values", values[:, order])

    @property
    def positions(self) -> Array:
        """``x`` in rising order."""
        return np.asarray(self.x, np.float64)

    @property
    def runs(self) -> Array:
        """``values`` in the order of ``positions``, always two-dimensional."""
        return np.asarray(self.values, np.float64)

    @property
    def mean(self) -> Array:
        """Mean over the seeds."""
        return np.asarray(self.runs.mean(axis=0), np.float64)

    @property
    def std(self) -> Array:
        """Sample standard deviation over the seeds, 0 for a single one."""
        if len(self.runs) == 1:
            return np.zeros_like(self.positions)
        return np.asarray(self.runs.std(axis=0, ddof=1), np.float64)

    @property
    def look(self) -> Look:
        """By method, else by α, else that of the only curve of a figure."""
        if self.method is not None:
            return method_look(self.method)
        return alpha_look(self.alpha) if self.alpha is not None else Look(style.SLATE, "o")

    def data(self) -> dict[str, Any]:
        """As summary.json has it."""
        line = {"label": self.label, "x": self.positions.tolist(), "mean": self.mean.tolist(), "n": len(self.runs)}
        return line | ({"std": self.std.tolist()} if len(self.runs) > 1 else {})

    def end(self, scale: float = 1.0, first: bool = False) -> Named:
        """The end of the drawn line (or its beginning) with the label to write there."""
        at = 0 if first else -1
        return Named(float(self.positions[at]), float(self.mean[at]) * scale, self.label, self.look.colour)


def require_curves(curves: Sequence[Curve], title: str) -> None:
    """Refuse an empty figure."""
    if not curves:
        raise ValueError(f"figure {title!r} needs at least one curve, got none")


def require_fractions(curves: Sequence[Curve]) -> None:
    """Refuse values that are not fractions (percent given by mistake)."""
    for curve in curves:
        low, high = float(curve.runs.min()), float(curve.runs.max())
        if low < 0 or high > 1:
            raise ValueError(f"curve {curve.label!r}: values must be fractions in [0, 1], got {low:g} to {high:g}")


def draw(axes: Axes, curves: Sequence[Curve], bounds: tuple[float, float] | None = None, scale: float = 1.0) -> None:
    """Draw every curve times ``scale``; bands are cut at ``bounds``; plain curves and the baseline lie beneath."""
    for number, curve in enumerate(curves):
        beneath = curve.plain or (curve.method is None and curve.alpha == 1)
        layer = 2.5 if beneath else 3
        low, high = curve.mean - curve.std, curve.mean + curve.std
        if bounds is not None:
            low, high = np.clip(low, *bounds), np.clip(high, *bounds)
        if curve.std.any():
            axes.fill_between(
                curve.positions, low * scale, high * scale, color=curve.look.colour, alpha=0.13, linewidth=0,
                zorder=layer - 1,
            )  # fmt: skip
        axes.plot(curve.positions, curve.mean * scale, zorder=layer, **_drawn(curve, number, len(curves)))


def _drawn(curve: Curve, number: int, count: int) -> dict[str, Any]:
    """Line and markers; those of long curves are shifted against each other, so that they do not fall together."""
    colour, marker = curve.look
    points = len(curve.positions)
    every = max(1, points // 12) if points > MARKED_POINTS else 1
    shown: dict[str, Any] = {"markevery": (every * number // max(count, 1), every)} if every > 1 else {}
    alone = count == 1 and points > MARKED_POINTS
    return shown | {
        "color": colour, "linewidth": 1.2 if curve.plain else 2.0, "solid_capstyle": "round",
        "marker": "" if alone else marker, "markersize": 6, "markeredgewidth": 1.3 if curve.plain else 0.6,
        "markerfacecolor": style.PAPER if curve.plain else colour,
        "markeredgecolor": colour if curve.plain else style.PAPER, "clip_on": False,
    }  # fmt: skip


def in_words(curves: Sequence[Curve], place: Callable[[float], str], value: Callable[[float], str]) -> str:
    """Where each curve begins and ends, and the largest value between if it is neither."""
    return "; ".join(_one_in_words(curve, place, value) for curve in curves) + "."


def _one_in_words(curve: Curve, place: Callable[[float], str], value: Callable[[float], str]) -> str:
    x, y = curve.positions, curve.mean
    if len(x) == 1:
        return f"{curve.label}: {value(y[0])} at {place(x[0])}"
    ends = f"{curve.label}: {value(y[0])} at {place(x[0])}, {value(y[-1])} at {place(x[-1])}"
    top = int(y.argmax())
    return ends if top in (0, len(y) - 1) else f"{ends}, at most {value(y[top])} at {place(x[top])}"


# Names.


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
            1.04, level, end.label, color=style.darker(end.colour), fontsize=9, fontweight="bold", va="center", **look
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
            edge, level, point.label, color=style.darker(point.colour), fontsize=9, fontweight="bold", va="center",
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
