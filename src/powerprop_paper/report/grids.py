"""Pictures of pictures: small images in rows and columns, one block for each method, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from powerprop_paper.report import palette, style
from powerprop_paper.report.image import Image
from powerprop_paper.report.labels import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PITCH = 0.27
"""Inches from one small image to the next."""
GAP = 0.08
"""Between small images, as a fraction of their size."""


@dataclass(frozen=True, eq=False)
class Grid:
    """A block of small grey images.

    Args:
        label: what the reader sees above it.
        images: (rows, columns, height, width) in [0, 1].
        note: a second line below the label, such as a score.
    """

    label: str
    images: ArrayLike
    note: str = ""

    def __post_init__(self) -> None:
        images = np.asarray(self.images, np.float64)
        if images.ndim != 4 or images.size == 0 or not (images.min() >= 0 and images.max() <= 1):
            raise ValueError(f"grid {self.label!r} needs images (rows, columns, height, width) in [0, 1]")
        object.__setattr__(self, "images", images)

    @property
    def values(self) -> Array:
        """The images as an array."""
        return np.asarray(self.images, np.float64)


def image_grids(
    grids: Sequence[Grid], rows: Sequence[str], path: str | Path, title: str, across: int = 5, caption: str = ""
) -> Image:
    """Blocks of images with their labels, so many across; the images of one row are of the same thing.

    Args:
        rows: the name of each row, written beside the blocks on the left.
    """
    if not grids:
        raise ValueError(f"figure {title!r} needs at least one grid, got none")
    shapes = {grid.values.shape for grid in grids}
    if len(shapes) != 1 or len(rows) != grids[0].values.shape[0]:
        raise ValueError(f"figure {title!r} needs grids of one shape with {len(rows)} rows, got {sorted(shapes)}")
    down, columns = -(-len(grids) // across), grids[0].values.shape[1]
    across = min(across, len(grids))
    width, height = across * (columns * PITCH + 0.3) + 0.3, down * (len(rows) * PITCH + 0.55) + 0.4
    figure = style.figure(width, height)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold", color=palette.INK)
    for number, grid in enumerate(grids):
        axes = figure.add_subplot(down, across, number + 1)
        _draw(axes, grid, rows if number % across == 0 else ())
    alt = f"{title}: {columns} images in each of the rows {', '.join(rows)}, for {_in_words(grids)}."
    return Image(style.save(figure, path), alt, caption, wide=True)


def _draw(axes: Axes, grid: Grid, rows: Sequence[str]) -> None:
    """One block as a single picture, dark on light: so it looks the same on every page."""
    joined = tiled(grid.values)
    count, columns = grid.values.shape[:2]
    axes.imshow(joined, cmap="gray_r", vmin=0, vmax=1, interpolation="none", extent=(0, columns, count, 0))
    axes.set_xticks([])
    axes.set_yticks([row + 0.5 for row in range(len(rows))], list(rows))
    axes.tick_params(length=0, labelsize=9, colors=palette.MUTED, pad=3)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.text(0, -0.75 if grid.note else -0.2, grid.label, fontsize=9.5, fontweight="bold", color=palette.INK)
    axes.text(0, -0.15, grid.note, fontsize=8.5, color=palette.MUTED)


def tiled(images: Array) -> Array:
    """(rows, columns, height, width) as one picture, with paper between the small ones."""
    rows, columns, height, width = images.shape
    edge = max(1, round(GAP * height))
    padded = np.pad(images, ((0, 0), (0, 0), (0, edge), (0, edge)))
    return padded.transpose(0, 2, 1, 3).reshape(rows * (height + edge), columns * (width + edge))


def _in_words(grids: Sequence[Grid]) -> str:
    return "; ".join(f"{grid.label} ({grid.note})" if grid.note else grid.label for grid in grids)
