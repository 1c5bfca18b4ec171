"""A report in a real browser, where there is one: nothing is wider than the window, nothing is complained about."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from powerprop_paper.pages import Figure, Page, Section, Stat, write_page
from powerprop_paper.report import lines
from powerprop_paper.report.table import Table
from reports import accuracy_table, curve

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FRAME = """<!doctype html><title></title><iframe src="report.html" style="width: {width}px; height: 900px"
onload="const page = this.contentDocument.documentElement;
document.title = page.scrollWidth + ' of ' + page.clientWidth"></iframe>"""
"""Windows of browsers without a screen are never as narrow as a phone; frames are."""
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    wide = Table("Many columns", ["", *(f"column {i}" for i in range(12))], [["row", *range(12)]])
    figure = Figure("a", lines, [curve()], title="t", xlabel="x", ylabel="y", wide=True)
    sections = [Section(f"Section {i}", "Some words. " * 40, [figure], [accuracy_table(), wide]) for i in range(4)]
    about = {"command": "powerprop run x --preset cpu", "config": {"alpha": [1, 2]}, "versions": {"torch": "2.13"}}
    write_page(Page("A run", "What it is. " * 20, sections, "Figure 2.", [Stat("Gain", "+30 points")]), out, about)
    return out


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_a_report_fits_its_window(page: Path, width: int, tmp_path: Path) -> None:
    command = [str(BROWSER), *QUIET, f"--user-data-dir={tmp_path}", "--allow-file-access-from-files", "--dump-dom"]
    frame = page / f"{width}.html"
    frame.write_text(FRAME.format(width=width), encoding="utf-8")
    done = subprocess.run([*command, frame.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"<title>(\d+) of (\d+)</title>", done.stdout)
    assert found, done.stderr
    assert int(found[1]) <= int(found[2]) <= width, "what is left is the scroll bar"
    assert int(found[2]) > width - 20
    assert "CONSOLE" not in done.stderr
