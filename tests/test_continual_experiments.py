"""The continual-learning experiments at smoke scale, whole and killed, and their parts worked out by hand."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import standin
from powerprop import data
from powerprop.cli import main
from powerprop.experiments import EXPERIMENTS
from powerprop.experiments.continual import Arm, Config, arms, jobs, make_learner, make_stream, rate
from powerprop.experiments.continual_measure import LogitsChangedError, Measures
from powerprop.experiments.runner import run

STANDIN = Path(__file__).parent / "standin.py"
CONTINUAL = [name for name, experiment in EXPERIMENTS.items() if experiment.config is Config]
SMALL = Config(
    data="mnist",
    stream="permuted",
    tasks=2,
    alphas=(1.5,),
    lr=0.3,
    seeds=1,
    steps=6,
    retrain_steps=2,
    gamma=0.1,
    clip=1.0,
    width=20,
    validation=200,
    test=50,
    groups=(16,),
    probe=32,
)


def load(name: str) -> data.Images:
    """The stand-in images, small; CIFAR-100 is made up of ten patterns in a hundred classes."""
    images = standin.load("mnist") if name == "mnist" else standin.made_up("cifar10", 2000, 400)
    x, y, test_x, test_y = images.train_x[:3000], images.train_y[:3000], images.test_x[:600], images.test_y[:600]
    if name == "mnist":
        return data.Images(name, x, y, test_x, test_y, images.class_names)
    extra = [10 * (torch.arange(len(labels)) % 10) for labels in (y, test_y)]
    return data.Images(name, x, y + extra[0], test_x, test_y + extra[1], tuple(map(str, range(100))), "half of it")


@pytest.fixture(autouse=True)
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", load)


@pytest.mark.parametrize("name", CONTINUAL)
def test_smoke(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]
    config = experiment.presets["smoke"]
    findings = run(experiment, "smoke", config, tmp_path, 1, Console(file=io.StringIO()))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [arm["label"] for arm in summary["arms"]] == [arm.label for arm in arms(config)]
    for arm in summary["arms"]:
        assert len(arm["accuracy"]) == len(arm["used_weights"]) == config.tasks
        assert arm["used_weights"] == sorted(arm["used_weights"])
        assert 0 <= arm["class-incremental"] <= 1
        assert 0 <= arm["task-incremental"] <= 1
        if config.matrix:  # otherwise the two are measured on different images
            assert arm["class-incremental"] <= arm["task-incremental"]
        assert [probe["tasks"] for probe in arm["inference"]] == [*config.infer_at, config.tasks]
    assert len(findings.table.rows) >= len(arms(config))
    html = (tmp_path / "report.html").read_text()
    assert "task-incremental" in html
    assert "class-incremental" in html
    assert ("half of it" in html) == (name == "split-cifar100")
    for folder in (tmp_path / "jobs").iterdir():
        assert {path.name for path in folder.iterdir()} == {"learner.safetensors", "result.json"}


def command(out: Path) -> list[str]:
    return ["run", "long-permuted-mnist", "--preset", "smoke", "--workers", "1", "--out", str(out)]


@pytest.mark.skipif(sys.platform != "linux", reason="sends SIGKILL")
def test_killed_and_resumed_is_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", standin.load)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(command(whole)) == 0
    process = subprocess.Popen(
        [sys.executable, str(STANDIN), *command(parts)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    deadline = time.monotonic() + 120
    while not any(parts.glob("jobs/*/learner.safetensors")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not list(parts.glob("jobs/*1.5*/result.json"))
    assert main(command(parts)) == 0
    names = sorted(os.listdir(whole / "jobs"))
    assert names == sorted(os.listdir(parts / "jobs"))
    for name in names:
        for file in ("result.json", "learner.safetensors"):
            assert (whole / "jobs" / name / file).read_bytes() == (parts / "jobs" / name / file).read_bytes(), file


def test_a_changed_logit_is_noticed() -> None:
    stream = make_stream(SMALL, data.load("mnist"), 0)
    learner = make_learner(SMALL, SMALL_JOB, torch.device("cpu"))
    measures = Measures(SMALL, learner, stream)
    learner.learn(stream[0])
    measures.after_task(stream[0])
    measures.check([0])
    for name, master in learner.nets.masters.items():
        master.put(learner.nets.masks.mask(0)[name], master.theta() * 1.0001)
    learner.nets.show(0)
    with pytest.raises(LogitsChangedError, match="the logits of task 0 are no longer those"):
        measures.check([0])


SMALL_JOB = Arm("efficient-packnet", 1.5).job(0).settings


def test_the_learning_rate_grows_with_alpha() -> None:
    config = replace(SMALL, lr=0.5, magnitude=0.03)
    assert rate(config, 1.0) == 0.5
    for alpha in (1.125, 1.375, 1.5, 2.0):
        assert rate(config, alpha) * alpha**2 * 0.03 ** (2 - 2 / alpha) == pytest.approx(0.5)
    assert rate(replace(config, scale_lr=False), 1.5) == 0.5


def test_jobs_and_labels() -> None:
    config = replace(SMALL, methods=("efficient-packnet", "packnet"), alphas=(1.0, 1.5), seeds=2)
    assert [arm.label for arm in arms(config)] == [
        "EPN",
        "Powerprop + EPN, α=1.5",
        "PackNet",
        "Powerprop + PackNet, α=1.5",
    ]
    assert len({job.key for job in jobs(config, {})}) == 8


def test_bad_settings() -> None:
    for change, message in (
        ({"alphas": (0.5,)}, r"alpha must be at least 1, got 0\.5"),
        ({"stream": "rotated"}, "stream must be one of permuted, split, got 'rotated'"),
        ({"methods": ("ewc",)}, "method must be one of .*, got 'ewc'"),
        ({"tasks": 0}, "tasks must be at least 1, got 0"),
        ({"grid": (0.1, 0.2)}, "falling fractions"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(SMALL, **change)  # type: ignore[arg-type]
