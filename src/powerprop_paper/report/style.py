"""One visual style for every figure, in pictures that fit light and dark pages, without global state.

One colour and one marker for every α and every method, in all figures, on light pages and on dark ones.

A figure compares either powers or methods. Powers: grey is α = 1, and lightness rises with α. Methods: the table below;
a method with Powerpropagation has the hue of the method alone, a thick line and a filled marker, the method alone a
thin line and a hollow marker. The nine hues stay apart for readers with any of the three colour deficiencies (a test
simulates them), and no two methods share both hue and marker. Dashed lines are never data: they mark what data is
held against, such as the paper's value.

Colours are given for light pages. On dark ones neutral tones change places and every other colour is mixed with white.
"""

from __future__ import annotations

import io
import math
import re
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from powerprop.continual import STRATEGIES
from powerprop.files import replacing
from powerprop.sparsify import DSR, SET, SNFS, SNIP, IterativePruning, RigL, Static
from powerprop.sparsify import Method as Sparsifier

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, AXIS, GRID, SHADE, PAPER = "#1f2328", "#667085", "#98a2b3", "#e4e7ec", "#f2f4f7", "#ffffff"
ON_DARK, ON_LIGHT = "#fdfdfd", "#101010"
"""Text on coloured ground, which is the same on light and dark pages."""

BASELINE, ACCENT = "#4a4a4a", "#c2410c"

NEUTRALS = {
    INK: "#e6e9ee", MUTED: "#98a2b3", AXIS: "#667085", GRID: "#2b323c", SHADE: "#1f252e", PAPER: "#181d24",
    ON_DARK: ON_DARK, ON_LIGHT: ON_LIGHT,
}  # fmt: skip
"""Tones of a light page and what they are on a dark one."""

WHITENED = 0.42
"""How much white every other colour gets on a dark page."""

ALPHA_COLOURS: dict[float, str] = {
    1.125: "#662d00", 1.25: "#6706c1", 1.375: "#2e02ff", 1.5: "#0f6fbc", 1.75: "#6986a3", 2.0: "#0088ed",
    3.0: "#2a9c39", 4.0: "#6ba600", 5.0: "#b29089",
}  # fmt: skip
"""The α of the paper: lightness rises with α (so the order survives colour blindness and grey print)."""

BEYOND: tuple[float, str] = (10.0, "#d49a6a")
"""Where the colours end: larger α share this one."""

ALPHA_MARKERS: dict[float, str] = {
    1.0: "o", 1.125: "<", 1.25: ">", 1.375: "p", 1.5: "d", 1.75: "h", 2.0: "s", 3.0: "D", 4.0: "^", 5.0: "v",
}  # fmt: skip
"""A second cue beside colour."""

GREY, SLATE, OCHRE, GREEN, VIOLET = BASELINE, "#3b6e93", "#9b5e07", "#00b058", "#8726ab"
ORANGE, AZURE, INDIGO, MAROON = "#e57d00", "#3e8aff", "#3c00ab", "#841b00"
NAMED = {
    "grey": GREY, "slate": SLATE, "ochre": OCHRE, "green": GREEN, "violet": VIOLET, "orange": ORANGE, "azure": AZURE,
    "indigo": INDIGO, "maroon": MAROON,
}  # fmt: skip
HUES = tuple(NAMED.values())

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
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK, pad=10)
    axes.set_xlabel(xlabel, fontsize=10, color=INK, labelpad=6)
    axes.set_ylabel(ylabel, fontsize=10, color=INK, labelpad=6)
    axes.tick_params(which="both", length=0, labelsize=9, colors=MUTED, pad=5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(AXIS)
        axes.spines[side].set_linewidth(0.8)
    axes.set_axisbelow(True)
    if grid == "none":
        axes.grid(False)
    else:
        axes.grid(True, which="major", axis=grid, color=GRID, linewidth=0.8)
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
            if (other := on_dark(colour)) != colour:
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


# Colours and markers.


class Look(NamedTuple):
    """Colour and marker."""

    colour: str
    marker: str


def _look(look: tuple[str, str]) -> Look:
    return Look(NAMED[look[0]], look[1])


METHODS: dict[str, Look] = {
    # sparse training
    "Dense": Look(GREY, "o"),
    **{kind.label: _look(kind.look) for kind in (Static, SNIP, SET, DSR, SNFS, RigL, IterativePruning)},
    "Top-KAST, 0% backward": Look(ORANGE, "h"), "Top-KAST, 50% backward": Look(OCHRE, "h"),
    "One-shot pruning": Look(MAROON, "X"),
    # continual learning
    "Naive": Look(GREY, "v"), "Joint": Look(GREY, "*"), "PerfectMemory": Look(GREY, "P"), "EWC": Look(AZURE, "o"),
    "Laplace": Look(SLATE, "s"), "SI": Look(INDIGO, "^"), "MAS": Look(VIOLET, "v"), "LwF": Look(GREEN, "<"),
    "ER": Look(ORANGE, "o"), "DER": Look(ORANGE, "^"), "DERpp": Look(ORANGE, "<"), "iCaRL": Look(ORANGE, "P"),
    "GEM": Look(OCHRE, "s"), "A-GEM": Look(MAROON, "v"), "DGR": Look(VIOLET, "p"), "RtF": Look(MAROON, "p"),
    "OWM": Look(SLATE, "d"), "GPM": Look(INDIGO, "d"), "HAT": Look(OCHRE, "D"), "VCL": Look(GREEN, "h"),
    "SupSup": Look(AZURE, "X"), "PackNet": Look(ORANGE, "D"), "EfficientPackNet": Look(GREEN, "D"),
    "Frugal EfficientPackNet": Look(VIOLET, ">"),
    # task inference
    "exhaustive": Look(SLATE, "o"), "shortlist": Look(ORANGE, "s"), "oneshot": Look(VIOLET, "^"),
    "binary": Look(GREEN, "v"), "shortlist, means per class": Look(ORANGE, ">"),
    "oneshot-superfluous": Look(VIOLET, "P"), "binary-superfluous": Look(GREEN, ">"),
}  # fmt: skip
"""Methods by the name that readers see, without Powerpropagation; sparse-training methods say it themselves."""


def method_look(method: str) -> Look:
    """The look of a method, the same with Powerpropagation (`"Powerprop + RigL"`) as without."""
    name = method.removeprefix("Powerprop + ")
    if name not in METHODS and (kind := {**STRATEGIES, **Sparsifier.kinds()}.get(name)) and hasattr(kind, "look"):
        return _look(kind.look)
    if name not in METHODS:
        known = ", ".join(METHODS)
        raise ValueError(f"method {method!r} has no colour yet: add a row to METHODS in report/style.py; has {known}")
    return METHODS[name]


def alpha_look(alpha: float) -> Look:
    """The look of an α; values that the paper does not use have a dot."""
    return Look(alpha_colour(alpha), ALPHA_MARKERS.get(alpha, "."))


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
    return blend(anchors[low], anchors[high], math.log(min(alpha, high) / low) / math.log(high / low), 2.2)


def darker(colour: str, weight: float = 0.25) -> str:
    """``colour`` moved towards the ink, for text and error bars."""
    return blend(colour, INK, weight)


def on_dark(colour: str) -> str:
    """What a colour of a light page is on a dark one."""
    return NEUTRALS.get(colour) or blend(colour, "#ffffff", WHITENED)


def blend(first: str, second: str, weight: float, gamma: float = 1.0) -> str:
    """`first` with this much of `second` mixed in; with a screen's gamma of 2.2 their light is, not their codes."""
    pairs = ((int(first[i : i + 2], 16) ** gamma, int(second[i : i + 2], 16) ** gamma) for i in (1, 3, 5))
    return "#" + "".join(f"{round((a + (b - a) * weight) ** (1 / gamma)):02x}" for a, b in pairs)
