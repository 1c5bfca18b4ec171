"""The experiment on learning rates: best for α = 1 first, then every power around it."""

from pathlib import Path

import pytest

import runs
import standin
from powerprop_paper import data
from powerprop_paper.experiments.rates import EXPERIMENTS, OPTIMISERS, Config, around, best_rate, job


def test_the_rate_is_the_best_on_validation_images() -> None:
    rows = runs.rows_of(job("SGD", lr, 1.0) | {"validation": v, "test": 1 - v} for lr, v in ((0.1, 0.5), (0.3, 0.9)))
    assert best_rate(rows) == 0.3


def test_neighbours_end_with_the_grid() -> None:
    rates = OPTIMISERS["SGD"][1]
    assert around("SGD", rates[0]) == rates[:2]
    assert around("SGD", rates[2]) == rates[1:4]
    assert around("SGD", rates[-1]) == rates[-2:]


def test_the_optimiser_of_the_figures_is_there() -> None:
    with pytest.raises(ValueError, match="optimisers must have SGD among them, got"):
        Config(optimisers=("Adam",))


def test_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", standin.load)
    summary = runs.run_smoke(EXPERIMENTS["learning-rates"], tmp_path)
    seeds = runs.table(summary, "Accuracy")
    assert [row["0"] for row in seeds] == ["α = 1", "α = 2"]
    assert all(row["dense"]["n"] == 2 for row in seeds)
    every = runs.table(summary, "Dense accuracy")
    assert {row["optimiser"] for row in every} == {"SGD", "Adam"}
    assert len(list((tmp_path / "figures").glob("*.svg"))) == 2
