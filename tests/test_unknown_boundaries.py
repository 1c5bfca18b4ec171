"""Learning without boundaries as an experiment: a whole run at smoke scale, and its measures worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import runs
import standin
from powerprop_paper import data
from powerprop_paper.experiments.boundaries import (
    BATCH,
    EXPERIMENTS,
    METHODS,
    PRESETS,
    Match,
    around_changes,
    batches_of,
    changes_section,
    learn,
    main_table,
    match,
    overlaps,
    task_lengths,
)
from powerprop_paper.folder import read_row
from powerprop_paper.run import Row, Rows

SMOKE = PRESETS["smoke"]


@pytest.fixture(autouse=True)
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", lambda name: standin.made_up(name))


def test_smoke(tmp_path: Path) -> None:
    summary = runs.run_smoke(EXPERIMENTS["unknown-boundaries"], tmp_path)
    folder = tmp_path / "jobs" / "learn"
    found, told, frugal = (
        read_row(folder / f"method={method},seed=0", {"method": method, "seed": 0})["result"] for method in METHODS
    )
    assert found["true"] == told["true"] == frugal["true"]
    assert 0 < frugal["used"] < found["used"]
    assert found["missed"] == found["false"] == []
    assert found["delays"] == [2, 2]
    assert [start for _, start in found["found"]] == found["true"]
    # Every batch was trained on as part of its own task, so the two learners are the same.
    for name in ("given", "inferred", "used"):
        assert found[name] == told[name]
    assert min(found["given"]) > 0.4
    html = (tmp_path / "report.html").read_text()
    assert "proves that it runs" in html
    assert "Of 2 alarms, 2 named the very first batch of the new task." in html
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"stream.svg", "change.svg"}
    assert [row["0"] for row in runs.table(summary, "Boundaries")] == list(METHODS.values())


def test_the_same_seed_gives_the_same_result(tmp_path: Path) -> None:
    config = replace(SMOKE, tasks=2, width=20, test=64)
    heard: list[float] = []
    first, second = (
        learn(config, tmp_path, lambda done, values: heard.append(done), method="found", seed=0) for _ in range(2)
    )
    assert first == second
    assert len(first["losses"]) == sum(first["lengths"])
    assert heard[: len(heard) // 2] == sorted(heard[: len(heard) // 2])


def test_lengths_and_batches_come_from_the_seed() -> None:
    lengths = task_lengths(replace(SMOKE, tasks=200), 0)
    assert (min(lengths), max(lengths)) == (SMOKE.shortest, SMOKE.longest)
    assert task_lengths(SMOKE, 0) == task_lengths(SMOKE, 0) != task_lengths(SMOKE, 1)
    stream = data.permuted(standin.made_up("mnist"), 2, 0, validation=0)
    tasks, x, _ = zip(*batches_of(stream, [2, 3], 0), strict=True)
    assert tasks == (0, 0, 1, 1, 1)
    assert all(part.shape == (BATCH, 1, 28, 28) for part in x)
    assert not torch.equal(x[0].flatten(1).sort(1).values, x[2].flatten(1).sort(1).values)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([102, 200], Match([2, 0], [], [])),
        ([105, 206], Match([5], [200], [206])),
        ([99, 101, 102, 203], Match([1, 3], [], [99, 102])),
        ([], Match([], [100, 200], [])),
    ],
)
def test_alarms_are_matched_with_changes(found: list[int], expected: Match) -> None:
    assert match([100, 200], found, 5) == expected


def test_an_alarm_finds_one_change_only() -> None:
    assert match([100, 103], [104], 5) == Match([4], [103], [])
    assert match([100, 103], [102, 104], 5) == Match([2, 1], [], [])


def test_batches_that_true_and_found_tasks_share() -> None:
    # true tasks are batches 0-9, 10-29 and 30-34
    assert overlaps([10, 20, 5], [0, 9, 30]).tolist() == [[9, 1, 0], [0, 20, 0], [0, 0, 5]]
    assert overlaps([10, 20, 5], [0]).tolist() == [[10], [20], [5]]
    assert overlaps([10, 20, 5], [0, 12, 15, 32]).tolist() == [[10, 0, 0, 0], [2, 3, 15, 0], [0, 0, 2, 3]]


def test_who_learns_nothing_notices_nothing(tmp_path: Path) -> None:
    config = replace(SMOKE, tasks=2, lr=1e-6, retrain_steps=0, prunings=0, width=20, test=64)
    found = learn(config, tmp_path, lambda done, values: None, method="found", seed=0)
    assert found["found"] == found["false"] == []
    assert found["missed"] == found["true"] == found["lengths"][:1]
    # The only task found is that of the longer true one; images of the other cannot have their task inferred.
    assert found["matched"] == [0, 0]
    longer = int(found["lengths"][1] > found["lengths"][0])
    assert found["inferred"][1 - longer] == 0
    assert found["inferred"][longer] == found["given"][longer]


def result(found: list[tuple[int, int]], **values: Any) -> Row:
    """What a job says of a stream of two tasks of thirty batches."""
    made = match([30], [noticed for noticed, _ in found], 5)._asdict()
    said = {
        "seed": 0, "true": [30], "found": found, **made, "given": [0.9, 0.8], "inferred": [0.9, 0.7], "used": 0.1,
        "losses": [float(i >= 30) for i in range(60)],
    }  # fmt: skip
    return Row(said | values, Path())


def test_the_table_by_hand() -> None:
    rows = Rows([result([(32, 30)]), result([(20, 18), (34, 29)], given=[0.7, 0.8])])
    runs = {"found": rows, "told": Rows(rows[:1]), "frugal": Rows([result([])])}
    config = replace(SMOKE, tasks=2)
    ours, told, frugal = main_table(config, runs).rows
    assert [ours[0], told[0], frugal[0]] == list(METHODS.values())
    assert [cell.mean for cell in ours[1:5]] == [1.0, 0.0, 0.5, 3.0]  # type: ignore[union-attr]
    assert ours[5].mean == pytest.approx(0.8)  # type: ignore[union-attr]
    assert list(told[1:5]) == [None] * 4
    assert frugal[4] is None
    assert "Of 3 alarms, 1 named the very first batch of the new task." in changes_section(config, rows).text


def test_losses_around_a_change() -> None:
    assert around_changes([result([])]) == [[0.0] * 20 + [1.0] * 21]
    assert around_changes([result([], true=[10, 50])]) == []


def test_bad_settings() -> None:
    for change, message in (
        ({"shortest": 150}, "expected shortest <= longest, got 150 and 140"),
        ({"min_length": 101}, r"min_length must be at most 100 \(the shortest task\), got 101"),
        ({"images": 63}, r"images must be at least 64 \(the batch\), or 0 for all, got 63"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(SMOKE, **change)  # type: ignore[arg-type]
    assert SMOKE.told().lr == SMOKE.lr
