"""The experiment on task inference at smoke scale, and its parts worked out by hand."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import runs
from powerprop_paper import data
from powerprop_paper.experiments.inference import EXPERIMENTS, FOREIGN, METHODS, PRESETS, ask, foreign, tasks_of

SMOKE = PRESETS["smoke"]


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fell to"),  # a few steps in a network of this size
    pytest.mark.filterwarnings("ignore:.*no sub-network of"),
]


@pytest.fixture(autouse=True)
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", runs.digits)


def test_smoke(tmp_path: Path) -> None:
    summary = runs.run_smoke(EXPERIMENTS["task-inference"], tmp_path)
    for stream in SMOKE.streams:
        rows = runs.table(summary, f"Right task, {stream}")
        by_hand = [(inputs, str(more)) for inputs in SMOKE.inputs for more in SMOKE.superfluous]
        assert list(dict.fromkeys((row["inputs"], row["superfluous"]) for row in rows)) == by_hand
        assert {row["method"] for row in rows if row["superfluous"] == "0"} == set(METHODS)
        assert {"oneshot-superfluous", *METHODS} < {row["method"] for row in rows if row["superfluous"] == "5"}
        assert all(0 <= row[images]["mean"] <= 1 for row in rows for images in ("1 image", "16 images"))
    flagged = runs.table(summary, "Flagged as unknown")
    assert len(flagged) == len(SMOKE.streams) * len(SMOKE.inputs) * 3
    assert all(0 <= row[kind]["mean"] <= 1 for row in flagged for kind in ("known (false alarms)", *FOREIGN))
    page = html.unescape((tmp_path / "report.html").read_text())
    assert "which the paper's method does not have" in page
    assert "false alarms" in page


def test_stopped_after_a_task_and_resumed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"stream": "permuted", "inputs": "plain", "superfluous": 0, "seed": 0}

    def asked(name: str, progress: Callable[[float, dict[str, float]], None]) -> dict[str, Any]:
        (tmp_path / name).mkdir(exist_ok=True)
        return ask(SMOKE, tmp_path / name, progress, **settings)

    def stop(done: float, values: dict[str, float]) -> None:
        if values["task"] == 2:
            raise KeyboardInterrupt

    whole = asked("whole", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        asked("parts", stop)
    assert asked("parts", lambda *_: None) == whole
    first, second = ((tmp_path / name / "learner.safetensors").read_bytes() for name in ("whole", "parts"))
    assert first == second


def test_standardised_inputs_have_no_mean() -> None:
    mnist = runs.digits("mnist")
    for kind in ("permuted", "rotated", "split"):
        stream = tasks_of(SMOKE, kind, "standardised", 0, mnist)
        for task in (stream[0], stream[2]):
            assert float(task.train().x.mean(0).abs().max()) < 1e-4
    plain = tasks_of(SMOKE, "permuted", "plain", 0, mnist)
    assert float(plain[0].train().x.min()) == 0.0


def test_foreign_inputs_are_prepared_as_the_tasks_are() -> None:
    mnist = runs.digits("mnist")
    plain, standard = (tasks_of(SMOKE, "permuted", inputs, 0, mnist)[0] for inputs in ("plain", "standardised"))
    found, prepared = (foreign(SMOKE, task, mnist, 0) for task in (plain, standard))
    assert list(found) == list(FOREIGN)
    x = plain.train().x
    expected = (found["inverted digits"] - x.mean(0)) / (x.var(0) + 0.01).sqrt()
    assert torch.allclose(prepared["inverted digits"], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prunings": 9}, "prunings times pruning_steps must be at most 6, the retrain_steps, got 18"),
    ],
)
def test_bad_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMOKE, **change)
