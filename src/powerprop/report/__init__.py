"""Reports: tables with mean ± std, figures in one style, and self-contained HTML pages.

Figures need matplotlib (``pip install 'powerprop[report]'``), which is imported when the first one is drawn.
"""

from .bars import Bars, bars
from .cell import Cell
from .curve import Curve
from .figures import lines, overlap_curves, pruning_curves
from .heatmap import heatmap
from .page import Image, Page, Section, Stat, index_page, render_index, render_page, write_page
from .style import MissingMatplotlibError, alpha_colour, alpha_marker
from .table import Column, Table
from .weights import density, weight_change, weight_change_stats

__all__ = [
    "Bars",
    "Cell",
    "Column",
    "Curve",
    "Image",
    "MissingMatplotlibError",
    "Page",
    "Section",
    "Stat",
    "Table",
    "alpha_colour",
    "alpha_marker",
    "bars",
    "density",
    "heatmap",
    "index_page",
    "lines",
    "overlap_curves",
    "pruning_curves",
    "render_index",
    "render_page",
    "weight_change",
    "weight_change_stats",
    "write_page",
]
