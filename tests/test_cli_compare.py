"""Two runs side by side: how values are matched, their differences, and the page."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import toys
from powerprop.cli import main
from powerprop_paper.cli import Options, run_experiment
from powerprop_paper.commands import Pair, pairs_of
from powerprop_paper.folder import write_json
from powerprop_paper.report import Column, Mean, Table
from toys import Config


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of the toy that differ in their length and in the seeds."""
    first, second = tmp_path / "short", tmp_path / "long"
    for out, config in ((first, Config()), (second, Config(steps=5, seeds=3))):
        run_experiment(toys.EXPERIMENT, Options("smoke", out, workers=1), config)
    return first, second


def summary(*tables: Table) -> dict[str, Any]:
    return json.loads(json.dumps({"sections": [{"tables": [table.data() for table in tables]}]}))


def shown(first: Sequence[Table], second: Sequence[Table]) -> list[tuple[str, ...]]:
    return [(pair.row, pair.column, *pair.texts()) for pair in pairs_of(summary(*first), summary(*second))]


def test_values_are_matched_by_table_row_and_column() -> None:
    columns = ["", "lr", Column("accuracy", percent=True, digits=1), Column("paper", paper=True)]
    first = Table("t", columns, [["a", "0.1", 0.5, 99], ["b", "0.1", 0.25, None], ["c", "0.2", None, None]])
    second = Table("t", columns, [["b", "0.3", 0.75, 99], ["a", "0.1", 0.375, None]])
    assert shown([first], [second]) == [
        ("a", "accuracy", "50.0", "37.5", "-12.5"),
        ("b", "accuracy", "25.0", "75.0", "+50.0"),
    ]


def test_a_value_of_one_run_has_no_difference() -> None:
    old, new = (Table("t", ["", name], [["a", 2.0]]) for name in ("old", "new"))
    assert shown([old], [new]) == [("a", "old", "2.000", "", ""), ("a", "new", "", "2.000", "")]


def test_rows_of_the_same_name_are_told_apart() -> None:
    table = Table("t", ["", "column", "value"], [["rigl", "erk 0.9", 1.0], ["rigl", "erk 0.8", 2.0]])
    assert [row for row, *_ in shown([table], [table])] == ["rigl, erk 0.9", "rigl, erk 0.8"]


def test_the_spread_of_a_difference() -> None:
    pair = Pair("t", "a", "c", True, 1, Mean(50.0, 3.0, 2), Mean(60.0, 4.0, 3))
    assert pair.difference == Mean(10.0, 5.0, 2)
    assert pair.texts() == ["50.0 ± 3.0", "60.0 ± 4.0", "+10.0 ± 5.0"]
    alone = pair._replace(second=Mean(60.0, math.nan, 1))
    assert alone.texts()[1:] == ["60.0", "+10.0"], "one seed has no spread"


def test_compare(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = [toys.files(run) for run in runs]
    capsys.readouterr()
    assert main(["compare", *map(str, runs)]) == 0
    printed = capsys.readouterr().out
    changed = [line.split() for line in printed.splitlines() if line.split()[:1] in (["steps"], ["seeds"])]
    assert changed == [["seeds", "2", "3"], ["steps", "3", "5"]]
    assert "20.50 ± 0.71" in printed
    assert "+0.50 ± 1.22" in printed, "√(0.707² + 1²)"
    assert printed.endswith("Comparison: runs/compare-short-long/report.html\n")
    text = Path("runs/compare-short-long/report.html").read_text()
    assert "Settings that differ" in text
    assert "data:image/svg+xml" in text
    assert [toys.files(run) for run in runs] == before


def test_what_cannot_be_compared(runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short, other = str(runs[0]), tmp_path / "other"
    capsys.readouterr()
    assert main(["compare", *map(str, runs), "--out", short]) == 2
    error = f"error: {short} is the folder of a run; choose another --out for the comparison\n"
    assert capsys.readouterr().err == error
    shutil.copytree(runs[0], other)
    found = json.loads((other / "summary.json").read_text())
    write_json(other / "summary.json", {**found, "experiment": "mnist-oneshot"})
    assert main(["compare", short, str(other)]) == 2
    error = f"error: {short} is a run of toy and {other} of mnist-oneshot; expected the same\n"
    assert capsys.readouterr().err == error
    (other / "summary.json").unlink()
    assert main(["compare", short, str(other), "--out", str(tmp_path / "page")]) == 2
    assert f"{other} is not finished: the same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "page").exists()
