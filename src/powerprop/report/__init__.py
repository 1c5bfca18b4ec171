"""Reports: tables with mean ± std, figures in one style, and self-contained HTML pages.

Figures need matplotlib (``pip install 'powerprop[report]'``), which is imported when the first one is drawn.
"""

from powerprop.report.bars import Bars, bars
from powerprop.report.cell import Cell
from powerprop.report.curve import Curve
from powerprop.report.figures import lines, overlap_curves, pruning_curves
from powerprop.report.heatmap import heatmap
from powerprop.report.page import Image, Page, Section, Stat, index_page, render_index, render_page, write_page
from powerprop.report.style import MissingMatplotlibError, alpha_colour, alpha_marker
from powerprop.report.table import Column, Table
from powerprop.report.weights import density, weight_change, weight_change_stats

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
