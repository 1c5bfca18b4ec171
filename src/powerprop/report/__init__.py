"""Reports: tables with mean ± std, figures in one style, and self-contained HTML pages.

Figures need matplotlib (``pip install 'powerprop[report]'``), which is imported when the first one is drawn.
"""

from powerprop.report.bars import Bars, bars
from powerprop.report.curve import Curve
from powerprop.report.figures import lines, pruning_curves
from powerprop.report.grids import Grid, image_grids
from powerprop.report.heatmap import heatmap
from powerprop.report.image import Image
from powerprop.report.mean import Mean
from powerprop.report.page import Headline, Page, Section, Stat, index_page, render_index, render_page, write_page
from powerprop.report.palette import alpha_look, method_look
from powerprop.report.panels import panels
from powerprop.report.scatter import Point, scatter
from powerprop.report.style import MissingMatplotlibError
from powerprop.report.table import Column, Table
from powerprop.report.weights import density, weight_change, weight_change_stats

__all__ = [
    "Bars",
    "Column",
    "Curve",
    "Grid",
    "Headline",
    "Image",
    "Mean",
    "MissingMatplotlibError",
    "Page",
    "Point",
    "Section",
    "Stat",
    "Table",
    "alpha_look",
    "bars",
    "density",
    "heatmap",
    "image_grids",
    "index_page",
    "lines",
    "method_look",
    "panels",
    "pruning_curves",
    "render_index",
    "render_page",
    "scatter",
    "weight_change",
    "weight_change_stats",
    "write_page",
]
