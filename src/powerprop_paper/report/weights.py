"""What training does to the weights: before against after, who survives pruning, density around zero (figure 2c, d)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from powerprop_paper.report import style
from powerprop_paper.report.curve import Array
from powerprop_paper.report.style import Image

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SURVIVOR = style.ORANGE
REST = "#9aa4b2"
BLOCK = 4096
BEFORE = style.AZURE


def bandwidth(values: Array) -> float:
    """Silverman's rule, 0.9·min(σ, IQR/1.34)·n^(-1/5), which heavy tails do not inflate."""
    std = float(np.std(values))
    quartiles = np.quantile(values, [0.25, 0.75])
    robust = float(quartiles[1] - quartiles[0]) / 1.34
    width = min(std, robust) if robust > 0 else std
    return 0.9 * width * len(values) ** -0.2 if width > 0 else 1e-3


def density(values: ArrayLike, grid: ArrayLike, width: float | None = None) -> Array:
    """Gaussian kernel density estimate: p(g) = mean over v of N(g; v, h²); h is ``width`` or :func:`bandwidth`."""
    data, points = np.ravel(np.asarray(values, np.float64)), np.asarray(grid, np.float64)
    if data.size < 2:
        raise ValueError(f"a density needs at least two values, got {data.size}")
    width = bandwidth(data) if width is None else width
    # One block of the (grid, values) table at a time keeps large layers out of memory.
    blocks = [data[start : start + BLOCK] for start in range(0, len(data), BLOCK)]
    total = sum(np.exp(-0.5 * ((points[:, None] - block) / width) ** 2).sum(axis=1) for block in blocks)
    return np.asarray(total / (data.size * width * np.sqrt(2 * np.pi)), np.float64)


def weight_change_stats(before: ArrayLike, after: ArrayLike, survives: ArrayLike) -> dict[str, float]:
    """The numbers of the figure: density at zero, sign changes of all weights and of the survivors, fraction kept."""
    first, last, kept = _checked(before, after, survives)
    flipped = np.sign(first) * np.sign(last) < 0
    return {
        "density at zero before": float(density(first, [0.0])[0]),
        "density at zero after": float(density(last, [0.0])[0]),
        "sign changes": float(flipped.mean()),
        "sign changes of survivors": float(flipped[kept].mean()),
        "kept": float(kept.mean()),
    }


def weight_change(
    before: ArrayLike, after: ArrayLike, survives: ArrayLike, path: str | Path, title: str,
    limit: float | None = None, points: int = 10_000, caption: str = "",
) -> Image:  # fmt: skip
    """Scatter of weights before and after training with the survivors of pruning and the marginal densities.

    before, after: the same weights before and after training, any shape.
    survives: True where the weight is kept by pruning after training.
    limit: axes from -limit to limit, to compare two figures; by default what holds 99.9% of the weights.
    points: weights drawn at random (all if there are fewer); the stated numbers are of all weights.
    """
    first, last, kept = _checked(before, after, survives)
    stats = weight_change_stats(first, last, kept)
    limit = float(np.quantile(np.abs(np.concatenate([first, last])), 0.999)) * 1.05 if limit is None else limit
    if not limit > 0:
        raise ValueError(f"limit must be positive, got {limit} for {title!r}")
    chosen = np.random.default_rng(0).permutation(len(first))[:points]
    first, last, kept = first[chosen], last[chosen], kept[chosen]

    figure = style.figure(5.6, 5.6)
    figure.suptitle(title, x=0.015, ha="left", fontsize=11.5, fontweight="bold", color=style.INK)
    spec = figure.add_gridspec(2, 2, width_ratios=(4, 1.05), height_ratios=(1.05, 4))
    main = style.dress(figure.add_subplot(spec[1, 0]), "", "weight before training", "weight after training")
    _scatter(main, first, last, kept, limit)
    _describe(main, stats, limit)
    top = figure.add_subplot(spec[0, 0], sharex=main)
    right = figure.add_subplot(spec[1, 1], sharey=main)
    grid = np.linspace(-limit, limit, 401)
    _marginal(top, grid, first, kept, BEFORE, upright=True)
    _marginal(right, grid, last, kept, style.INK, upright=False)
    _key(figure.add_subplot(spec[0, 1]), stats["kept"])
    alt = (
        f"{title}: weights after training against the same weights before. Density at zero "
        f"{stats['density at zero before']:.3g} before, {stats['density at zero after']:.3g} after; "
        f"{stats['sign changes']:.1%} of all weights and {stats['sign changes of survivors']:.1%} of those kept by "
        f"pruning ({stats['kept']:.0%}) changed sign."
    )
    return Image(style.save(figure, path), alt, caption)


def _checked(before: ArrayLike, after: ArrayLike, survives: ArrayLike) -> tuple[Array, Array, NDArray[np.bool_]]:
    arrays = np.asarray(before, np.float64), np.asarray(after, np.float64), np.asarray(survives)
    if len({array.shape for array in arrays}) != 1:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise ValueError(f"before, after and survives must have one shape, got {shapes}")
    if not all(np.isfinite(array).all() for array in arrays[:2]):
        raise ValueError("before and after must be finite")
    kept = np.ravel(arrays[2]).astype(bool)
    if kept.sum() < 2:
        raise ValueError(f"at least two weights must survive, got {int(kept.sum())} of {kept.size}")
    return np.ravel(arrays[0]), np.ravel(arrays[1]), kept


def _scatter(axes: Axes, first: Array, last: Array, kept: NDArray[np.bool_], limit: float) -> None:
    for left, bottom in ((-limit, 0.0), (0.0, -limit)):
        axes.fill_between([left, left + limit], bottom, bottom + limit, color=style.SHADE, linewidth=0, zorder=0)
    axes.plot([-limit, limit], [-limit, limit], color=style.MUTED, linewidth=0.8, linestyle=style.DASHES, zorder=1)
    for mask, colour, size, opacity in ((~kept, REST, 3.0, 0.35), (kept, SURVIVOR, 6.0, 0.7)):
        axes.scatter(first[mask], last[mask], s=size, c=colour, alpha=opacity, linewidths=0, rasterized=True, zorder=2)
    axes.axhline(0, color=style.INK, linewidth=0.6, zorder=1)
    axes.axvline(0, color=style.INK, linewidth=0.6, zorder=1)
    axes.set_xlim(-limit, limit)
    axes.set_ylim(-limit, limit)
    axes.locator_params(nbins=5)


def _describe(axes: Axes, stats: dict[str, float], limit: float) -> None:
    """Write the numbers into the shaded quadrants, where few weights are."""
    zero = f"density at zero\n{stats['density at zero before']:.3g} before\n{stats['density at zero after']:.3g} after"
    text = f"sign changed\n{stats['sign changes of survivors']:.1%} of survivors\n{stats['sign changes']:.1%} of all"
    look: dict[str, Any] = {"fontsize": 8.5, "color": style.MUTED, "linespacing": 1.4, "zorder": 4}
    axes.text(-0.96 * limit, 0.96 * limit, zero, ha="left", va="top", **look)
    axes.text(0.96 * limit, -0.96 * limit, text, ha="right", va="bottom", **look)


def _marginal(axes: Axes, grid: Array, values: Array, kept: NDArray[np.bool_], colour: str, upright: bool) -> None:
    """Densities of all weights and of the survivors, each scaled to its own peak: their shapes are compared."""
    axes.axis("off")
    for data, shade in ((values, colour), (values[kept], SURVIVOR)):
        # Survivors have two humps, one per sign: the deviation of the magnitudes is the one to smooth by.
        height = density(data, grid, 1.4 * bandwidth(np.abs(data)) if shade == SURVIVOR else None)
        height = height / height.max()
        x, y = (grid, height) if upright else (height, grid)
        axes.plot(x, y, color=shade, linewidth=1.4)
        fill = axes.fill_between if upright else axes.fill_betweenx
        fill(grid, 0, height, color=shade, alpha=0.15, linewidth=0)
    (axes.set_ylim if upright else axes.set_xlim)(0, 1.08)


def _key(axes: Axes, kept: float) -> None:
    axes.axis("off")
    entries = ((BEFORE, "before"), (style.INK, "after"), (SURVIVOR, f"kept ({kept:.0%})"))
    for row, (colour, text) in enumerate(entries):
        axes.text(0.02, 0.85 - 0.28 * row, text, color=colour, fontsize=9, fontweight="bold", transform=axes.transAxes)
