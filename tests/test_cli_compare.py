"""Two runs side by side: how values are matched, their differences, and the page."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

import standin
from powerprop import data
from powerprop.cli import main
from powerprop.commands.differences import Number, Pair, pairs_of
from powerprop.files import read_sealed_json, write_sealed_json
from powerprop.report import Column, Page, Section, Table


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of two seeds that differ in their length."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load", standin.load)
        for name, steps in (("short", "2"), ("long", "20")):
            settings = ["--preset", "smoke", "--alphas", "1", "--forms", "targets", "--seeds", "2", "--steps", steps]
            assert main(["run", "mnist-optimisers", *settings, "--workers", "1", "--out", str(folder / name)]) == 0
    return folder / "short", folder / "long"


def page(*tables: Table) -> Page:
    return Page("a page", "", [Section("results", tables=tables)])


def test_values_are_matched_by_table_row_and_column() -> None:
    columns = ["", "lr", Column("accuracy", percent=True, digits=1), Column("paper", paper=True)]
    first = page(Table("t", columns, [["a", "0.1", 0.5, 99], ["b", "0.1", 0.25, None], ["c", "0.2", None, None]]))
    second = page(Table("t", columns, [["b", "0.3", 0.75, 99], ["a", "0.1", 0.375, None]]))
    assert [(pair.row, pair.texts()) for pair in pairs_of(first, second)] == [
        ("a", ["50.0", "37.5", "-12.5"]),
        ("b", ["25.0", "75.0", "+50.0"]),
    ]


def test_a_value_of_one_run_has_no_difference() -> None:
    tables = [Table("t", ["", name], [["a", 2.0]]) for name in ("old", "new")]
    assert [(pair.column, *pair.texts()) for pair in pairs_of(page(tables[0]), page(tables[1]))] == [
        ("old", "2.000", "", ""),
        ("new", "", "2.000", ""),
    ]


def test_rows_of_the_same_name_are_told_apart() -> None:
    table = Table("t", ["", "column", "value"], [["rigl", "erk 0.9", 1.0], ["rigl", "erk 0.8", 2.0]])
    assert [pair.row for pair in pairs_of(page(table), page(table))] == ["rigl, erk 0.9", "rigl, erk 0.8"]


def test_the_spread_of_a_difference() -> None:
    pair = Pair("t", "a", "c", True, 1, Number(50.0, 3.0), Number(60.0, 4.0))
    assert pair.difference == Number(10.0, 5.0)
    assert pair.texts() == ["50.0 ± 3.0", "60.0 ± 4.0", "+10.0 ± 5.0"]
    alone = pair._replace(second=Number(60.0, math.nan))
    assert alone.texts()[1:] == ["60.0", "+10.0"], "one seed has no spread"


def test_compare(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for run in runs for path in run.rglob("*")}
    assert main(["compare", *map(str, runs)]) == 0
    shown = capsys.readouterr().out
    assert "steps" in shown
    assert "Adam (α = 1)" in shown
    assert " ± " in shown
    text = Path("runs/compare-short-long/report.html").read_text()
    assert "Settings that differ" in text
    assert "data:image/" in text or "<svg" in text
    assert {path: path.stat().st_mtime_ns for run in runs for path in run.rglob("*")} == before


def test_what_cannot_be_compared(runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short, long = map(str, runs)
    assert main(["compare", short, long, "--out", short]) == 2
    assert (
        capsys.readouterr().err == f"error: {short} is the folder of a run; choose another --out for the comparison\n"
    )
    other = tmp_path / "other"
    shutil.copytree(runs[0], other)
    text = (other / "config.json").read_text()
    write_sealed_json(other / "config.json", {**read_sealed_json(other / "config.json"), "experiment": "mnist-oneshot"})
    assert main(["compare", short, str(other)]) == 2
    expected = f"{short} is a run of mnist-optimisers and {other} of mnist-oneshot; expected the same"
    assert capsys.readouterr().err == f"error: {expected}\n"
    (other / "config.json").write_text(text)
    shutil.rmtree(other / "jobs")
    assert main(["compare", short, str(other), "--out", str(tmp_path / "page")]) == 2
    assert "is not finished: 0 of 2 jobs are done" in capsys.readouterr().err
    assert not (tmp_path / "page").exists()
