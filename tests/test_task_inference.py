"""The experiment on task inference at smoke scale, and its parts worked out by hand."""

from __future__ import annotations

import html
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import standin
from powerprop import data
from powerprop.experiments import EXPERIMENTS
from powerprop.experiments.harness.runner import run
from powerprop.experiments.inference.config import PRESETS
from powerprop.experiments.inference.streams import FOREIGN, foreign, make_stream
from powerprop.experiments.inference.train import jobs

SMOKE = PRESETS["smoke"]


def load(name: str) -> data.Images:
    """The stand-in images for digits and letters alike, small."""
    images = standin.load("mnist")
    x, y, test_x, test_y = images.train_x[:3000], images.train_y[:3000], images.test_x[:600], images.test_y[:600]
    return data.Images(name, x, y, test_x, test_y, images.class_names)


@pytest.fixture(autouse=True)
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", load)


@pytest.mark.filterwarnings("ignore:.*fell to")  # a few steps in a network of this size
@pytest.mark.filterwarnings("ignore:.*no sub-network of")
def test_smoke(tmp_path: Path) -> None:
    run(EXPERIMENTS["task-inference"], "smoke", SMOKE, tmp_path, 1, Console(file=io.StringIO()))
    summary = json.loads((tmp_path / "summary.json").read_text())["runs"]
    assert set(summary) == {job.key for job in jobs(SMOKE, {})}
    for key, found in summary.items():
        assert ("oneshot-superfluous" in found["rates"]) == ("-5-" in key)
        assert {"exhaustive", "shortlist", "shortlist, means per class", "oneshot", "binary"} <= set(found["rates"])
        assert all(0 <= rate <= 1 for of in found["rates"].values() for rate in of.values())
        assert all(set(of) == {"known", *FOREIGN} for of in found["unknown"].values())
    page = html.unescape((tmp_path / "report.html").read_text())
    assert "which the paper's method does not have" in page
    assert "false alarms" in page


def test_standardised_inputs_have_no_mean() -> None:
    mnist = load("mnist")
    for kind in ("permuted", "rotated", "split"):
        stream = make_stream(SMOKE, kind, "standardised", 0, mnist)
        for task in (stream[0], stream[2]):
            assert float(task.train().x.mean(0).abs().max()) < 1e-4
    plain = make_stream(SMOKE, "permuted", "plain", 0, mnist)
    assert float(plain[0].train().x.min()) == 0.0


def test_foreign_inputs_are_prepared_as_the_tasks_are() -> None:
    mnist = load("mnist")
    plain, standard = (make_stream(SMOKE, "permuted", inputs, 0, mnist)[0] for inputs in ("plain", "standardised"))
    found, prepared = (foreign(SMOKE, task, mnist, 0) for task in (plain, standard))
    assert list(found) == list(FOREIGN)
    x = plain.train().x
    expected = (found["inverted digits"] - x.mean(0)) / (x.var(0) + 0.01).sqrt()
    assert torch.allclose(prepared["inverted digits"], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"streams": ("mixed",)}, "streams must be one of permuted, rotated, split, got 'mixed'"),
        ({"inputs": ()}, r"inputs must be some, each once, got \(\)"),
        ({"rate": 0.0}, r"rate must be in \(0, 1\), got 0\.0"),
        ({"superfluous": (-1,)}, "superfluous must be at least 0, got -1"),
        ({"groups": (0,)}, "group must be at least 1, got 0"),
        ({"prunings": 9}, "prunings times pruning_steps must be at most 6, the retrain_steps, got 18"),
        ({"gamma": 2.0}, r"gamma must be in \(0, 1\], got 2\.0"),
        ({"alpha": 0.5}, r"alpha must be at least 1, got 0\.5"),
        ({"lr": 0.0}, r"lr must be above 0, got 0\.0"),
    ],
)
def test_bad_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMOKE, **change)
