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
from typing import Any

import pytest
import torch
from rich.console import Console

import standin
from powerprop import data
from powerprop.cli import main
from powerprop.continual import Classification, load_learner
from powerprop.experiments import EXPERIMENTS
from powerprop.experiments.continual.arms import Arm, arms, chosen_candidate, jobs
from powerprop.experiments.continual.candidates import Tried, choose, parse
from powerprop.experiments.continual.measure import LogitsChangedError, Measures
from powerprop.experiments.continual.report import Story
from powerprop.experiments.continual.report import findings as write_findings
from powerprop.experiments.continual.tasklog import StepCount
from powerprop.experiments.continual.train import Config, OfImages, build, make_learner, make_stream, rate
from powerprop.experiments.harness.experiment import Findings
from powerprop.experiments.harness.runner import run
from powerprop.report import write_page

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


@pytest.mark.filterwarnings("ignore:.*for the tasks to come")  # a network of this size is soon full
@pytest.mark.filterwarnings("ignore:.*from now on a task learns a mask")
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
        kept = {"learner.safetensors", "metrics.jsonl", "job.json", "result.json"}
        trial = folder.name.startswith("trial-")
        assert {path.name for path in folder.iterdir()} == (kept - {"metrics.jsonl"} if trial else kept)


def test_training_in_half_precision_is_measured_in_full() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3))
    batch = torch.randn(64, 3, 4, 4), torch.randint(0, 3, (64,))
    full, half = (OfImages(each, torch.device("cpu")) for each in ("float32", "bfloat16"))
    for objective in (full, half):
        objective.begin(0, None)
    exact, rounded = full.loss(model, batch, 0), half.loss(model, batch, 0)
    assert torch.equal(exact, Classification().loss(model, batch, 0))
    assert rounded.dtype == torch.float32
    assert not torch.equal(exact, rounded)
    assert torch.allclose(exact, rounded, rtol=1e-2)
    assert half.score(model, [batch], 0) == full.score(model, [batch], 0)


def test_images_are_moved_while_they_are_learned_and_by_the_task_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3))
    batch = torch.randn(64, 3, 4, 4), torch.randint(0, 3, (64,))
    as_they_are = Classification().loss(model, batch, 0)
    objective = OfImages("float32", torch.device("cpu"), shift=1, seed=5)
    objective.begin(0, None)
    first, second = (objective.loss(model, batch, 0) for _ in range(2))
    assert len({as_they_are.item(), first.item(), second.item()}) == 3
    assert objective.score(model, [batch], 0) == Classification().score(model, [batch], 0)
    objective.begin(1, None)
    other = objective.loss(model, batch, 1)
    objective.begin(0, None)
    assert torch.equal(objective.loss(model, batch, 0), first)
    assert not torch.equal(other, first)


def test_the_learner_of_a_run_is_made_from_its_file(tmp_path: Path) -> None:
    learner = make_learner(SMALL, SMALL_JOB, torch.device("cpu"))
    learner.save(tmp_path / "learner.safetensors")
    made = load_learner(tmp_path / "learner.safetensors", build(SMALL, 1), schedule=None)
    assert type(made.objective) is Classification


def test_candidates_are_tried_before_the_table() -> None:
    slow, fast = "lr=0.1", "lr=0.3 gamma=0.2 clip=2"
    config = replace(SMALL, candidates=(slow, fast), seeds=2)
    (arm,) = arms(config)
    assert [job.key for job in jobs(config, {})] == [
        "trial-efficient-packnet-alpha1.5-lr0.1",
        "trial-efficient-packnet-alpha1.5-lr0.3-gamma0.2-clip2",
    ]
    results = {
        arm.trial(slow).key: {"validation": 0.8, "used": [0.2, 0.3]},
        arm.trial(fast).key: {"validation": 0.9, "used": [0.4, 0.6]},
    }
    assert chosen_candidate(config, arm, results) == fast
    *_, last = jobs(config, results)
    assert (last.key, last.settings["candidate"]) == ("efficient-packnet-alpha1.5-seed1", fast)
    results[arm.trial(fast).key] = {"diverged": "nan"}
    assert chosen_candidate(config, arm, results) == slow


def test_a_candidate_must_leave_room_for_all_tasks() -> None:
    wasteful, frugal, poor = Tried(0.9, [0.3, 0.5]), Tried(0.8, [0.4, 0.45]), Tried(0.7, [0.1, 0.2])
    assert wasteful.needed(10) == pytest.approx(0.3 + 9 * 0.2)
    found = {"wasteful": wasteful, "frugal": frugal, "poor": poor}
    assert choose(found, 10) == "frugal"
    assert choose(found, 3) == "wasteful"
    assert choose({"wasteful": wasteful, "frugal": frugal}, 100) == "frugal"


@pytest.mark.parametrize("bad", ["", "lr", "lr=fast", "rate=0.1", "lr=0.1 lr=0.2", "lr:0.1"])
def test_bad_candidates(bad: str) -> None:
    with pytest.raises(ValueError, match=f"a candidate must look like .*, got '{bad}'"):
        parse(bad)


def test_the_settings_of_a_candidate_are_checked() -> None:
    with pytest.raises(ValueError, match=r"gamma must be in \(0, 1\], got 1\.5"):
        replace(SMALL, candidates=("gamma=1.5",))
    with pytest.raises(ValueError, match="tuning_tasks must be at most the 2 tasks, got 3"):
        replace(SMALL, candidates=("lr=0.1", "lr=0.2"), tuning_tasks=3)


def command(out: Path) -> list[str]:
    return ["run", "long-permuted-mnist-300", "--preset", "smoke", "--workers", "1", "--out", str(out)]


@pytest.mark.filterwarnings("ignore:.*for the tasks to come")  # a network of this size is soon full
@pytest.mark.filterwarnings("ignore:.*from now on a task learns a mask")
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
    assert not list(parts.glob("jobs/efficient-packnet*/result.json"))
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
        used = learner.nets.masks.mask(0)[name]
        master.put(used, master.theta()[used] * 1.0001)
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
        ({"stream": "mixed"}, "stream must be one of permuted, rotated, split, got 'mixed'"),
        ({"methods": ("ewc",)}, "methods must be one of .*, got 'ewc'"),
        ({"tasks": 0}, "tasks must be at least 1, got 0"),
        ({"methods": ()}, r"methods must be some, each once, got \(\)"),
        ({"alphas": (1.5, 1.5)}, r"alphas must be some, each once, got \(1\.5, 1\.5\)"),
        ({"gamma": 1.2}, r"gamma must be in \(0, 1\], got 1\.2"),
        ({"gamma": 0.0}, r"gamma must be in \(0, 1\], got 0\.0"),
        ({"groups": ()}, r"groups must be some, each once, got \(\)"),
        ({"groups": (0, 4)}, "group must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"retrain_steps": -1}, "retrain_steps must be at least 0, got -1"),
        ({"validation": -1}, "validation must be at least 0, got -1"),
        ({"images": 200}, "validation must be below the 200 images, got 200"),
        ({"test": -1}, "test must be at least 0, got -1"),
        ({"clip": -1.0}, r"clip must be at least 0, got -1\.0"),
        ({"lr": 0.0}, r"lr must be above 0, got 0\.0"),
        ({"lr": float("nan")}, "lr must be finite, got nan"),
        ({"magnitude": 0.0}, r"magnitude must be above 0, got 0\.0"),
        ({"spread": float("inf")}, "spread must be finite, got inf"),
        ({"infer_at": (3,)}, "infer_at must be in 1..2, the tasks, got 3"),
        ({"infer_at": (0,)}, "infer_at must be in 1..2, the tasks, got 0"),
        ({"model": "alexnet"}, "model alexnet is for a split stream, got stream 'permuted'"),
        ({"grid": (0.1, 0.2)}, "falling fractions"),
        ({"reuse": "none"}, "reuse must be one of all, output, got 'none'"),
        ({"share": 0.0}, r"share must be in \(0, 1\], got 0\.0"),
        ({"frugal_gamma": 1.5}, r"frugal_gamma must be in \(0, 1\], got 1\.5"),
        ({"pruning_steps": 0}, "pruning_steps must be at least 1, got 0"),
        ({"methods": ("frugal-packnet",)}, "must be at most 2, the retrain_steps, got 300"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(SMALL, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stream": "split", "tasks": 4}, "tasks must divide the 10 classes of mnist, got 4"),
        ({"stream": "split", "tasks": 20}, "tasks must divide the 10 classes of mnist, got 20"),
        ({"data": "cifar100"}, r"model mlp is for images \(1, 28, 28\) of 10 classes, got cifar100 with \(3, 32, 32\)"),
        ({"validation": 3_000}, r"n_last must be in 0..2999 \(training images of mnist\), got 3000"),
        ({"validation": 0}, "validation must be at least 1, which efficient-packnet decides by, got 0"),
    ],
)
def test_settings_that_do_not_fit_the_data_are_found_before_the_jobs(change: dict[str, object], message: str) -> None:
    experiment = EXPERIMENTS["permuted-mnist"]
    experiment.prepare(SMALL)
    with pytest.raises(ValueError, match=message):
        experiment.prepare(replace(SMALL, **change))  # type: ignore[arg-type]


def test_the_settings_of_frugal_packnet_reach_the_learner() -> None:
    config = replace(
        SMALL, methods=("frugal-packnet", "efficient-packnet"), prunings=2, pruning_steps=1, share=0.5, gamma=0.9,
        frugal_gamma=0.8, grid=(0.5, 0.001),
    )  # fmt: skip
    found = [make_learner(config, arm.job(0).settings, torch.device("cpu")) for arm in arms(config)]
    seen = [(each.gamma, each.grid, each.prunings, each.pruning_steps, each.reuse, each.share) for each in found]
    assert seen == [
        (0.8, (0.5, 0.001, 0.0007, 0.0005), 2, 1, "output", 0.5),
        (0.9, (0.5, 0.001), 0, 100, "all", 1.0),
    ]


def test_steps_are_counted_over_all_phases() -> None:
    steps = StepCount()
    phases = [("training", 5), ("training", 7), ("pruning", 2), ("pruning", 2), ("retraining", 5), ("retraining", 6)]
    assert [steps.after(*each) for each in phases] == [5, 7, 9, 11, 16, 17]
    assert [steps.after(*each) for each in (("training", 7), ("retraining", 8))] == [7, 15]
    assert [steps.after(*each) for each in (("training", 7), ("training", 7))] == [7, 7]


def test_packnet_needs_no_validation_data() -> None:
    EXPERIMENTS["permuted-mnist"].prepare(replace(SMALL, methods=("packnet",), validation=0))


def fake_run(matrix: list[list[float]]) -> dict[str, Any]:
    """The result of a job with two tasks."""
    probe = {"tasks": 2, "rates": {"shortlist": {"16": [1.0, 0.9]}, "exhaustive": {"16": [1.0, 0.9]}}}
    whole = {"group": 16, "accuracy": [0.8, 0.9], "confusion": [[1.0, 0.0], [0.0, 1.0]]}
    records = {"accuracy": [row[-1] for row in matrix], "used": [0.1, 0.2], "inference": [probe], "matrix": matrix}
    return {"note": "", **records, "class_incremental": whole}


def composed(config: Config, results: dict[str, dict[str, Any]], out: Path) -> Findings:
    (out / "versions.json").write_text("{}")
    (out / "config.json").write_text('{"experiment": "permuted-mnist", "preset": "cpu", "config": {}}')
    return write_findings(
        config, results, out, Story("Title", "Section 5.3", "Intro.", (("EPN (paper)", "", "97.09", ""),))
    )


def test_forgetting_is_worked_out_from_the_matrix(tmp_path: Path) -> None:
    config = replace(SMALL, seeds=2)
    keys = [job.key for job in jobs(config, {})]
    runs = [fake_run([[0.9], [0.8, 0.95]]), fake_run([[0.7], [0.9, 0.95]])]
    findings = composed(config, dict(zip(keys, runs, strict=True)), tmp_path)
    (arm,) = findings.summary["arms"]
    assert arm["forgetting"] == pytest.approx((0.1 - 0.2) / 2)
    assert arm["backward_transfer"] == pytest.approx((-0.1 + 0.2) / 2)
    markdown = findings.table.to_markdown()
    assert "| forgetting | backward transfer |" in markdown
    assert "-5.00 ± 21.21 | 5.00 ± 21.21 |" in markdown


@pytest.mark.parametrize("change", [{"matrix": False}, {"tasks": 1}])
def test_no_forgetting_without_a_matrix_of_two_tasks(change: dict[str, Any], tmp_path: Path) -> None:
    config = replace(SMALL, **change)
    run = fake_run([[0.9]] if config.matrix else [])
    run |= {"accuracy": [0.9], "used": [0.1]}
    findings = composed(config, {jobs(config, {})[0].key: run}, tmp_path)
    assert findings.summary["arms"][0]["forgetting"] is None
    assert findings.summary["arms"][0]["backward_transfer"] is None
    assert "forgetting" not in findings.table.to_markdown()


def test_a_report_of_runs_that_all_diverged(tmp_path: Path) -> None:
    config = replace(SMALL, seeds=2)
    lost = {job.key: {"diverged": "task 1: the loss is nan", "note": "half of it"} for job in jobs(config, {})}
    findings = composed(config, lost, tmp_path)
    write_page(findings.page, tmp_path)
    html = (tmp_path / "report.html").read_text()
    assert html.count("task 1: the loss is nan") == 2
    assert "Powerprop + EPN, α=1.5, seed 1" in html
    assert "half of it" in html
    assert "2 runs diverged" in html
    assert [(arm["label"], arm["diverged"]) for arm in findings.summary["arms"]] == [("Powerprop + EPN, α=1.5", 2)]


def test_a_report_of_runs_of_which_one_diverged(tmp_path: Path) -> None:
    config = replace(SMALL, alphas=(1.0, 1.5))
    keys = [job.key for job in jobs(config, {})]
    lost = {"diverged": "task 0: the loss is inf", "note": ""}
    findings = composed(config, {keys[0]: fake_run([[0.9], [0.9, 0.9]]), keys[1]: lost}, tmp_path)
    assert [arm["label"] for arm in findings.summary["arms"]] == ["EPN", "Powerprop + EPN, α=1.5"]
    assert findings.page.sections[-1].text == "Powerprop + EPN, α=1.5, seed 0: task 0: the loss is inf"
