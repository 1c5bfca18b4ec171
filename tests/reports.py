"""What the tests of reports share: a curve, a table, and text that must be escaped."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from powerprop_paper.report import Column, Curve, Mean, Table
from powerprop_paper.report.page import html

HOSTILE = '<script>alert("x")</script> & | *bold*'
KEPT = np.geomspace(0.01, 1.0, 20)


def curve(alpha: float | None = 2.0, seeds: int = 3) -> Curve:
    noise = np.random.default_rng(0).uniform(-0.02, 0.02, (seeds, len(KEPT)))
    return Curve(f"α = {alpha}", alpha, KEPT, 0.1 + 0.8 * KEPT**0.3 + noise)


def accuracy_table() -> Table:
    columns = ["method", Column("accuracy (%)", best="max", percent=True, digits=1), Column("paper", paper=True)]
    rows = [["α = 1", Mean.of([0.5, 0.6]), 55.1], ["α = 2", Mean.of([0.7, 0.8]), None]]
    return Table("MNIST", columns, rows, "At 2%.")


def html_of(table: Table) -> str:
    """The table as a page has it, without the page."""
    section = {"heading": "", "text": "", "figures": [], "tables": [table.data()]}
    page = html({"title": "", "intro": "", "sections": [section]}, Path())
    return page[page.index('<figure class="table') :]
