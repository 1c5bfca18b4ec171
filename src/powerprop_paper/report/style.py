"""One visual style for every figure: type, grid, and pictures that fit light and dark pages, without global state."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from powerprop.files import replacing
from powerprop_paper.report import palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 100
"""Dots of an inch on the page; sizes of figures are in inches."""

RASTER_DPI = 250
"""The density of the few parts that are pixels: clouds of points, heat maps."""

FONTS: tuple[str, ...] = ("Inter", "Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans")

DASHES = (0, (3, 3))
"""Of what data is held against; data is never dashed."""


@dataclass(frozen=True)
class Image:
    """An SVG file or a GIF clip, what it shows (for those who do not see it), a caption; ``wide`` takes the width of
    the page."""

    path: Path
    alt: str
    caption: str = ""
    wide: bool = False

    def __post_init__(self) -> None:
        if not self.alt.strip():
            raise ValueError(f"picture {str(self.path)!r} needs an alt text that says what it shows, got none")


class MissingMatplotlibError(ImportError):
    """Figures were asked for and matplotlib is not installed."""


def matplotlib() -> Any:
    """The matplotlib module, or an error that says how to get it."""
    try:
        import matplotlib as module
    except ImportError as error:
        raise MissingMatplotlibError("figures need matplotlib: pip install 'powerprop[paper]'") from error
    return module


def figure(width: float = 6.4, height: float = 4.2) -> Figure:
    """An empty figure on its own canvas: no pyplot, no window, no global settings."""
    matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    result = Figure(figsize=(width, height), dpi=DPI, facecolor="none", layout=layout)
    FigureCanvasAgg(result)
    return result


def dress(
    axes: Axes, title: str = "", xlabel: str = "", ylabel: str = "", grid: Literal["both", "x", "y", "none"] = "both"
) -> Axes:
    """Give ``axes`` the common look."""
    axes.set_facecolor("none")
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=palette.INK, pad=10)
    axes.set_xlabel(xlabel, fontsize=10, color=palette.INK, labelpad=6)
    axes.set_ylabel(ylabel, fontsize=10, color=palette.INK, labelpad=6)
    axes.tick_params(which="both", length=0, labelsize=9, colors=palette.MUTED, pad=5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(palette.AXIS)
        axes.spines[side].set_linewidth(0.8)
    axes.set_axisbelow(True)
    if grid == "none":
        axes.grid(False)
    else:
        axes.grid(True, which="major", axis=grid, color=palette.GRID, linewidth=0.8)
    return axes


def save(result: Figure, path: str | Path) -> Path:
    """Write ``result`` as SVG, whole or not at all, and return the path.

    The ground is transparent and the letters are outlines, so that it looks the same everywhere; the same figure gives
    the same bytes.
    """
    path = Path(path)
    if path.suffix.lower() != ".svg":
        raise ValueError(f"figures are written as .svg, got {str(path)!r}")
    from matplotlib.text import Text

    for axes in result.axes:
        axes.tick_params(labelfontfamily=list(_fonts()))
    for text in result.findobj(Text):
        text.set_fontfamily(list(_fonts()))
    drawn = io.StringIO()
    with matplotlib().rc_context({"svg.hashsalt": "powerprop", "svg.fonttype": "path"}):
        result.savefig(drawn, format="svg", dpi=RASTER_DPI, transparent=True, metadata={"Date": None, "Creator": None})
    with replacing(path) as file:
        file.write(adapted(drawn.getvalue()).encode())
    return path


def adapted(svg: str) -> str:
    """The picture with rules that change its colours on a dark page; viewers that know none show the light one."""
    rules = []
    for part in ("fill", "stroke"):
        for colour in dict.fromkeys(re.findall(rf"{part}: (#[0-9a-f]{{6}})", svg)):
            if (other := palette.on_dark(colour)) != colour:
                rules.append(f'[style*="{part}: {colour}"] {{ {part}: {other} !important }}')
    style = "\n".join(["<style>@media (prefers-color-scheme: dark) {", *rules, "}</style>"])
    start = svg.index(">", svg.index("<svg")) + 1
    return f"{svg[:start]}\n{style}{svg[start:]}"


@cache
def _fonts() -> tuple[str, ...]:
    """The preferred fonts that this machine has; DejaVu Sans comes with matplotlib and has every glyph used here."""
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return tuple(font for font in FONTS if font in installed)
