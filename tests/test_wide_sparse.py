"""The experiments `wide-sparse`: as many steps as fit into the time of the dense network."""

from dataclasses import replace
from pathlib import Path

import pytest

import runs
import standin
from powerprop.sparse.linear import SparseLinear
from powerprop_paper import data
from powerprop_paper.experiments.wide import EXPERIMENTS, PRESETS, Network, best_rate, equal_steps, job, make, parse


def test_a_network_is_read_from_its_words() -> None:
    assert parse("dense") == Network(1, 0.0, "dense")
    assert parse("8x 0.99 static") == Network(8, 0.99, "static")


@pytest.mark.parametrize(
    "text", ["", "4x", "4x 0.98", "4x 98 rigl", "0x 0.98 rigl", "4x 0.98 lottery", "4x 0.98 dense"]
)
def test_other_words_are_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=f"a network must look like 'dense' or '4x 0.98 rigl' .*, got {text!r}"):
        replace(PRESETS["smoke"], networks=(text,))


def test_the_dense_network_is_always_there() -> None:
    with pytest.raises(ValueError, match="networks are those beside the dense one, got 'dense' among them"):
        replace(PRESETS["smoke"], networks=("dense",))


def test_steps_fill_the_time_of_the_dense_training() -> None:
    assert equal_steps(1000, 2e-3, 1.5e-3) == 1330
    assert equal_steps(1000, 2e-3, 2e-3) == 1000
    assert equal_steps(1, 1e-3, 9.0) == 1


def test_the_best_rate_of_those_that_did_not_diverge() -> None:
    each = ("dense", 1.0)
    rows = [job(each, 5, lr, 0) | result for lr, result in ((0.1, {"diverged": "nan"}), (0.2, {"validation": 0.5}))]
    assert best_rate(runs.rows_of(rows)) == 0.2


def test_every_layer_of_a_wide_network_computes_sparsely_and_none_of_the_dense_one() -> None:
    cfg = PRESETS["smoke"]
    for name, expected in (("dense", 0), ("2x 0.9 rigl", 3)):
        model, _ = make(cfg, name, 2.0, 0.01, 20, 0)
        assert sum(isinstance(module, SparseLinear) for module in model.modules()) == expected


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_smoke(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", standin.load)
    summary = runs.run_smoke(EXPERIMENTS[name], tmp_path)
    rows = runs.table(summary, "At the end")
    assert [row["α"] for row in rows] == ["1", "2", "1", "2"]
    assert all(row["weights"] == row["weights as dense"] for row in rows[:2])
    assert all(0.09 < row["weights"] / row["weights as dense"] < 0.12 for row in rows[2:])
    assert len(list((tmp_path / "figures").glob("*.svg"))) == 1
