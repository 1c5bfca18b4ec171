"""A curve with its repetitions, and how it is drawn: mean line, band of one standard deviation, markers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from powerprop_paper.report import palette
from powerprop_paper.report.labels import Array, Named
from powerprop_paper.report.palette import Look, alpha_look, method_look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKED_POINTS = 24
"""Longer curves have a marker at about every so many points of a dozen, each curve at places of its own."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Repetitions of one measurement.

    label: what the reader sees.
    alpha: decides colour and marker where powers are compared; None where they are not.
    x: (points,) positions.
    values: (seeds, points) measurements, or (points,) for a single run.
    method: decides colour and marker where methods are compared, see `palette.METHODS`.
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
        return alpha_look(self.alpha) if self.alpha is not None else Look(palette.SLATE, "o")

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
        "markerfacecolor": palette.PAPER if curve.plain else colour,
        "markeredgecolor": colour if curve.plain else palette.PAPER, "clip_on": False,
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
