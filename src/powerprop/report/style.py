"""One visual style for every figure: colours, type, grid, and figures without any global state."""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from powerprop.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 200
"""Twice the density of a page, for sharp screens and print; sizes in inches are those on the page at 100 dots."""

INK = "#1f2328"
MUTED = "#667085"
GRID = "#e4e7ec"
BASELINE = "#4a4a4a"
ACCENT = "#c2410c"

ALPHA_COLOURS: dict[float, str] = {
    1.125: "#650848",
    1.25: "#531a8a",
    1.375: "#3645b1",
    1.5: "#126fa6",
    1.75: "#157f8c",
    2.0: "#22929a",
    3.0: "#21a059",
    4.0: "#94a824",
    5.0: "#dfb92f",
}
"""The α of the paper: lightness rises with α (so the order survives colour blindness and grey print)."""

BEYOND: tuple[float, str] = (10.0, "#f4b393")
"""Where the colours end: larger α share this one."""

ALPHA_MARKERS: dict[float, str] = {
    1.0: "o",
    1.125: "<",
    1.25: ">",
    1.375: "p",
    1.5: "d",
    1.75: "h",
    2.0: "s",
    3.0: "D",
    4.0: "^",
    5.0: "v",
}
"""A second cue beside colour."""

METHOD_COLOURS: tuple[str, ...] = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7f3c8d",
    "#8c6d31",
)
"""Categories without an order (the colour-blind safe set of Okabe and Ito, extended)."""

FONTS: tuple[str, ...] = ("Inter", "Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans")


class MissingMatplotlibError(ImportError):
    """Figures were asked for and matplotlib is not installed."""


def matplotlib() -> Any:
    """The matplotlib module, or an error that says how to get it."""
    try:
        import matplotlib as module
    except ImportError as error:
        raise MissingMatplotlibError("figures need matplotlib: pip install 'powerprop[report]'") from error
    return module


def alpha_colour(alpha: float) -> str:
    """The colour of ``alpha`` in every figure: grey for 1, fixed for the paper's values, blended (in log α) between."""
    if not (math.isfinite(alpha) and alpha >= 1):
        raise ValueError(f"alpha must be at least 1, got {alpha}")
    anchors = {1.0: BASELINE, **ALPHA_COLOURS, BEYOND[0]: BEYOND[1]}
    known = list(anchors)
    right = bisect_left(known, min(alpha, known[-1]))
    if right == 0 or known[right] == alpha:
        return anchors[known[right]]
    low, high = known[right - 1], known[right]
    weight = math.log(min(alpha, high) / low) / math.log(high / low)
    return _blend(anchors[low], anchors[high], weight)


def alpha_marker(alpha: float) -> str:
    """The marker of ``alpha``; a dot for values that the paper does not use."""
    return ALPHA_MARKERS.get(alpha, ".")


def method_colour(index: int) -> str:
    """The ``index``-th colour for things that have no α, counted round."""
    return METHOD_COLOURS[index % len(METHOD_COLOURS)]


def darker(colour: str, weight: float = 0.25) -> str:
    """``colour`` moved towards the ink, for text and error bars."""
    return _blend(colour, INK, weight)


def figure(width: float = 6.4, height: float = 4.2) -> Figure:
    """An empty figure on its own Agg canvas: no pyplot, no window, no global settings."""
    matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    result = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout=layout)
    FigureCanvasAgg(result)
    return result


def dress(
    axes: Axes, title: str = "", xlabel: str = "", ylabel: str = "", grid: Literal["both", "x", "y", "none"] = "both"
) -> Axes:
    """Give ``axes`` the common look."""
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK, pad=10)
    axes.set_xlabel(xlabel, fontsize=10, color=INK, labelpad=6)
    axes.set_ylabel(ylabel, fontsize=10, color=INK, labelpad=6)
    axes.tick_params(which="both", length=0, labelsize=9, colors=MUTED, pad=5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#98a2b3")
        axes.spines[side].set_linewidth(0.8)
    axes.set_axisbelow(True)
    if grid == "none":
        axes.grid(False)
    else:
        axes.grid(True, which="major", axis=grid, color=GRID, linewidth=0.8)
    return axes


def legend(axes: Axes, place: Literal["best", "lower left", "upper right"] = "best") -> None:
    """A quiet legend in the common type."""
    axes.legend(
        loc=place, fontsize=9, labelcolor=INK, frameon=True, framealpha=0.85, edgecolor="none", borderpad=0.3,
        handlelength=1.8, labelspacing=0.35,
    )  # fmt: skip


def save(result: Figure, path: str | Path) -> Path:
    """Write ``result`` as PNG, whole or not at all, and return the path."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ValueError(f"figures are written as .png, got {str(path)!r}")
    from matplotlib.text import Text

    for axes in result.axes:
        axes.tick_params(labelfontfamily=list(_fonts()))
    for text in result.findobj(Text):
        text.set_fontfamily(list(_fonts()))
    with replacing(path) as file:
        result.savefig(file, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    return path


@cache
def _fonts() -> tuple[str, ...]:
    """The preferred fonts that this machine has; DejaVu Sans comes with matplotlib and has every glyph used here."""
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return tuple(font for font in FONTS if font in installed)


def _blend(first: str, second: str, weight: float) -> str:
    pairs = ((int(first[i : i + 2], 16), int(second[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * weight):02x}" for a, b in pairs)
