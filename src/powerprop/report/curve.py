"""A curve with its repetitions, and how it is drawn: mean line, band of one standard deviation, label at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from powerprop.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]

MARKED_POINTS = 30
"""Curves of at most this many points carry markers."""

LEADER = {"arrowstyle": "-", "linewidth": 0.8, "shrinkA": 1, "shrinkB": 1, "relpos": (0, 0.5)}
"""The line from the end of a curve to the left edge of its label."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Repetitions of one measurement.

    Args:
        label: what the reader sees.
        alpha: decides colour and marker; None for curves that have no α.
        x: (points,) positions.
        values: (seeds, points) measurements, or (points,) for a single run.
        dashed: a second line style for two curves of the same α.
    """

    label: str
    alpha: float | None
    x: ArrayLike
    values: ArrayLike
    dashed: bool = False

    def __post_init__(self) -> None:
        x, values = np.asarray(self.x, np.float64), np.atleast_2d(np.asarray(self.values, np.float64))
        if x.ndim != 1 or values.ndim != 2 or values.shape[1] != len(x) or values.size == 0:
            raise ValueError(
                f"curve {self.label!r}: values must be (seeds, {x.size}) to match x of shape {x.shape}, "
                f"got {np.shape(self.values)}"
            )
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


def colours(curves: Sequence[Curve]) -> list[str]:
    """One colour per curve: by α, or the next free one for curves without."""
    free = iter(range(len(curves)))
    return [style.alpha_colour(c.alpha) if c.alpha is not None else style.method_colour(next(free)) for c in curves]


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
    """Draw every curve times ``scale``; bands are cut at ``bounds``; the baseline lies under the others."""
    for curve, colour in zip(curves, colours(curves), strict=True):
        layer = 3 if curve.alpha is None or curve.alpha > 1 else 2.5
        low, high = curve.mean - curve.std, curve.mean + curve.std
        if bounds is not None:
            low, high = np.clip(low, *bounds), np.clip(high, *bounds)
        if curve.std.any():
            axes.fill_between(
                curve.positions, low * scale, high * scale, color=colour, alpha=0.16, linewidth=0, zorder=layer - 1
            )
        axes.plot(curve.positions, curve.mean * scale, label=curve.label, color=colour, zorder=layer, **_look(curve))


def end_labels(axes: Axes, curves: Sequence[Curve], scale: float = 1.0) -> None:
    """Write each label beside the end of its curve, moved apart where they would touch."""
    bottom, top = axes.get_ylim()
    height = axes.get_window_extent().height / style.DPI * 72 * 0.95
    wanted = np.array([(curve.mean[-1] * scale - bottom) / (top - bottom) for curve in curves])
    for curve, colour, start, place in zip(curves, colours(curves), wanted, spread(wanted, 12.5 / height), strict=True):
        axes.annotate(
            curve.label, xy=(1.0, start), xytext=(1.035, place), xycoords="axes fraction", textcoords="axes fraction",
            color=style.darker(colour), fontsize=9, fontweight="bold", va="center", annotation_clip=False,
            arrowprops={**LEADER, "color": colour},
        )  # fmt: skip


def spread(wanted: Array, gap: float) -> Array:
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


def _look(curve: Curve) -> dict[str, Any]:
    """Line and marker; long curves are lines only."""
    few = len(curve.positions) <= MARKED_POINTS
    marker = style.alpha_marker(curve.alpha) if curve.alpha is not None else "o"
    return {
        "linewidth": 1.8, "linestyle": (0, (4, 1.6)) if curve.dashed else "-", "solid_capstyle": "round",
        "marker": marker if few else "", "markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.6,
        "clip_on": False,
    }  # fmt: skip
