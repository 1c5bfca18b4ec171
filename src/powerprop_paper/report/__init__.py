"""Reports: tables with mean ± std, figures in one style, and self-contained HTML pages.

Figures need matplotlib (``pip install 'powerprop[paper]'``), which is imported when the first one is drawn.
"""

from powerprop_paper.report.bars import Bars, bars
from powerprop_paper.report.curve import Curve
from powerprop_paper.report.figures import lines, pruning_curves
from powerprop_paper.report.grids import Grid, image_grids
from powerprop_paper.report.heatmap import heatmap
from powerprop_paper.report.image import Image
from powerprop_paper.report.mean import Mean
from powerprop_paper.report.page import Headline, Stat
from powerprop_paper.report.palette import alpha_look, method_look
from powerprop_paper.report.panels import panels
from powerprop_paper.report.scatter import Point, scatter
from powerprop_paper.report.style import MissingMatplotlibError
from powerprop_paper.report.table import Column, Table, Value
from powerprop_paper.report.weights import density, weight_change, weight_change_stats

__all__ = [
    "Bars",
    "Column",
    "Curve",
    "Grid",
    "Headline",
    "Image",
    "Mean",
    "MissingMatplotlibError",
    "Point",
    "Stat",
    "Table",
    "Value",
    "alpha_look",
    "bars",
    "density",
    "heatmap",
    "image_grids",
    "lines",
    "method_look",
    "panels",
    "pruning_curves",
    "scatter",
    "weight_change",
    "weight_change_stats",
]
