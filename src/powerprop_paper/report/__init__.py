"""Reports: tables with mean ± std, figures in one style, and self-contained HTML pages.

Figures need matplotlib (``pip install 'powerprop[paper]'``), which is imported when the first one is drawn.
"""

from powerprop_paper.report.charts import Bars, Grid, Point, bars, heatmap, image_grids, scatter
from powerprop_paper.report.curve import Curve
from powerprop_paper.report.figures import lines, panels, pruning_curves
from powerprop_paper.report.page import Headline, Stat
from powerprop_paper.report.style import Image, MissingMatplotlibError, alpha_look, method_look
from powerprop_paper.report.table import Column, Mean, Table, Value
from powerprop_paper.report.weights import density, weight_change, weight_change_stats

__all__ = [
    "Bars", "Column", "Curve", "Grid", "Headline", "Image", "Mean", "MissingMatplotlibError", "Point", "Stat", "Table",
    "Value", "alpha_look", "bars", "density", "heatmap", "image_grids", "lines", "method_look", "panels",
    "pruning_curves", "scatter", "weight_change", "weight_change_stats",
]  # fmt: skip
