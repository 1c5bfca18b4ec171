"""Advice for a model and a goal: its code runs, and its numbers stand in committed results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from powerprop.advise import GOALS, advise
from powerprop.cli import main
from test_numbers import DECIMAL, ROOT, evidence, stands_in


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(400, 300), nn.ReLU(), nn.Linear(300, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )


SHAPES = {"perceptron": (perceptron, (400,)), "convolutional": (convolutional, (1, 8, 8))}


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("kind", SHAPES)
def test_the_code_runs(goal: str, kind: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, size = SHAPES[kind]
    model, x, y = make(), torch.rand(32, *size), torch.arange(32) % 3

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    code = advise(model, goal).code.replace("steps=1_000", "steps=4")
    exec(code, {"model": model, "train": train, "x": x, "batches": [x], "example": x, "tasks": [(x, y)]})


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("goal", GOALS)
def test_what_is_expected_was_measured(goal: str, kind: str) -> None:
    for sentence in advise(SHAPES[kind][0](), goal).expect:
        places = re.findall(r"docs/results/[\w-]+", sentence) or ["docs/images"]
        numbers = [number for place in places for number in evidence(ROOT / place)]
        text = re.sub(r"α = [\d.]+", "", sentence)
        assert all(stands_in(each, numbers) for each in DECIMAL.findall(text)), sentence


def test_layers_decide() -> None:
    assert "alpha=1.5" in advise(convolutional(), "smaller file").code
    assert "recalibrate" in advise(convolutional(), "smaller file").code
    assert "recalibrate" not in advise(perceptron(), "smaller file").code
    assert "sparse_compute" in advise(perceptron(), "train within memory").code
    assert "sparse_compute" not in advise(convolutional(), "train within memory").code


def test_what_cannot_be_advised() -> None:
    with pytest.raises(ValueError, match="goal must be one of 'smaller file', .* got 'fame'"):
        advise(perceptron(), "fame")
    with pytest.raises(ValueError, match="no weight"):
        advise(nn.ReLU(), "smaller file")


def test_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("import torch\ndef build(): return torch.nn.Linear(400, 300)\n")
    assert main(["advise", "net.py:build", "--goal", "many tasks"]) == 0
    assert "Take EfficientPackNet." in capsys.readouterr().out
    for model, goal, said in (
        ("net.py:build", "fame", "invalid choice: 'fame'"),
        ("gone.py:build", "many tasks", "gone.py"),
        ("net.py", "many tasks", "--model must be package.module:function or file.py:function"),
    ):
        assert main(["advise", model, "--goal", goal]) == 2
        assert said in capsys.readouterr().err
