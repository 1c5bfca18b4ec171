"""The experiments of task after task at smoke scale, whole and killed, and their parts worked out by hand."""

from __future__ import annotations

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

import runs
import standin
from powerprop.continual import Classification, load_learner
from powerprop_paper import data
from powerprop_paper.cli import main
from powerprop_paper.experiments import split
from powerprop_paper.experiments.split import (
    EXPERIMENTS,
    PERMUTED,
    Config,
    Method,
    Story,
    choose,
    make_page,
    needed,
)
from powerprop_paper.packing import LogitsChangedError, Measures, OfImages, build, make_learner, make_stream
from powerprop_paper.pages import Page
from powerprop_paper.run import Row, RunError
from powerprop_paper.train.log import StepCount

STANDIN = Path(__file__).parent / "standin.py"
METHOD = Method("efficient-packnet", 1.5)
SMALL = Config(
    tasks=2, alphas=(1.5,), lr=0.3, seeds=1, steps=6, retrain_steps=2, gamma=0.1, clip=1.0, width=20, validation=200,
    test=50, groups=(16,), probe_images=32,
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", runs.digits_or_hundred)


def small_learner(cfg: Config = SMALL, method: str = METHOD.method) -> Any:
    return make_learner(cfg, method, 1.5, 0, CPU)


@pytest.mark.filterwarnings("ignore:.*for the tasks to come")  # a network of this size is soon full
@pytest.mark.filterwarnings("ignore:.*from now on a task learns a mask")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_smoke(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]
    cfg = experiment.presets["smoke"]
    summary = runs.run_smoke(experiment, tmp_path)
    rows = [row for row in runs.table(summary, "All tasks") if "(paper)" not in row["0"]]
    assert [row["0"] for row in rows] == [Method(m, a).label for m in cfg.methods for a in cfg.alphas]
    inferred = f"class-incremental, {max(cfg.groups)} images"
    for row in rows:
        means = {column: value["mean"] for column, value in row.items() if isinstance(value, dict)}
        assert 0 <= means["worst task"] <= means["task-incremental"] <= 1
        assert 0 <= means[inferred] <= 1
        if cfg.matrix:  # otherwise the two are measured on different images
            assert means[inferred] <= means["task-incremental"]
            assert means["forgetting"] == means["backward transfer"] == 0
    curves = {figure["file"]: figure["series"][0] for figure in summary["sections"][0]["figures"]}
    for average, used in zip(curves["average.svg"], curves["used.svg"], strict=True):
        assert len(average["mean"]) == len(used["mean"]) == cfg.tasks
        assert used["mean"] == sorted(used["mean"])
    probed = runs.table(summary, "Right task from")
    assert list(probed[0])[1:] == [f"{tasks} tasks" for tasks in (*cfg.infer_at, cfg.tasks)]
    html = (tmp_path / "report.html").read_text()
    assert ("half of it" in html) == (name == "split-cifar100")
    for folder in tmp_path.glob("jobs/*/*"):
        assert {path.name for path in folder.iterdir()} == {"learner.safetensors", "row.json", "metrics.jsonl"}


def test_the_paper_s_rows_are_those_of_its_table() -> None:
    known = {name: split.paper_rows(split.STORIES.get(name, split.LONG_STORY)) for name in EXPERIMENTS}
    assert [(label, str(value)) for label, _, value in known["split-mnist"]] == [
        ("EPN", "99.42 ± 0.15"), ("Powerprop + EPN", "99.71 ± 0.04"),
    ]  # fmt: skip
    assert [scenario for _, scenario, _ in known["split-cifar100"]] == ["task-incremental"] * 3 + ["class-incremental"]
    assert known["rotated-mnist"] == known["long-permuted-mnist"] == []


# --- images and their precision -----------------------------------------------------------------------------------


def test_training_in_half_precision_is_measured_in_full() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3))
    batch = torch.randn(64, 3, 4, 4), torch.randint(0, 3, (64,))
    full, half = (OfImages(each, CPU) for each in ("float32", "bfloat16"))
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
    objective = OfImages("float32", CPU, shift=1, seed=5)
    objective.begin(0, None)
    first, second = (objective.loss(model, batch, 0) for _ in range(2))
    assert len({as_they_are.item(), first.item(), second.item()}) == 3
    assert objective.score(model, [batch], 0) == Classification().score(model, [batch], 0)
    objective.begin(1, None)
    other = objective.loss(model, batch, 1)
    objective.begin(0, None)
    assert torch.equal(objective.loss(model, batch, 0), first)
    assert not torch.equal(other, first)


# --- learners -----------------------------------------------------------------------------------------------------


def test_the_learner_of_a_run_is_made_from_its_file(tmp_path: Path) -> None:
    small_learner().save(tmp_path / "learner.safetensors")
    made = load_learner(tmp_path / "learner.safetensors", build(SMALL, 1), schedule=None)
    assert type(made.objective) is Classification


def test_the_settings_of_frugal_packnet_reach_the_learner() -> None:
    cfg = replace(SMALL, prunings=2, pruning_steps=1, gamma=0.9, frugal_gamma=0.8, grid=(0.5, 0.001))
    found = [small_learner(cfg, method) for method in ("frugal-packnet", "efficient-packnet")]
    seen = [(each.gamma, each.grid, each.prunings, each.pruning_steps, each.reuse) for each in found]
    assert seen == [(0.8, (0.5, 0.001, 0.0007, 0.0005), 2, 1, "output"), (0.9, (0.5, 0.001), 0, 100, "all")]


@pytest.mark.parametrize("rate", ["matched", "paper"])
def test_every_power_has_one_learning_rate(rate: Any) -> None:
    optimizer = small_learner(replace(SMALL, lr=0.5, rate=rate)).optimizer
    assert (optimizer.param_groups[0]["lr"], optimizer.rate) == (0.5, rate)


def test_steps_are_counted_over_all_phases() -> None:
    steps = StepCount()
    phases = [("training", 5), ("training", 7), ("pruning", 2), ("pruning", 2), ("retraining", 5), ("retraining", 6)]
    assert [steps.after(*each) for each in phases] == [5, 7, 9, 11, 16, 17]
    assert [steps.after(*each) for each in (("training", 7), ("retraining", 8))] == [7, 15]
    assert [steps.after(*each) for each in (("training", 7), ("training", 7))] == [7, 7]


def test_a_changed_logit_is_noticed() -> None:
    stream, learner = make_stream("permuted", data.load("mnist"), 2, 0, SMALL.validation), small_learner()
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


# --- killed and resumed -------------------------------------------------------------------------------------------


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
    while not any(parts.glob("jobs/learn/*/learner.safetensors")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not list(parts.glob("jobs/learn/method=efficient-packnet*/row.json"))
    assert main(command(parts)) == 0
    names = sorted(os.listdir(whole / "jobs/learn"))
    assert names == sorted(os.listdir(parts / "jobs/learn"))
    for name in names:
        for file in ("row.json", "learner.safetensors", "metrics.jsonl"):
            first, second = ((out / "jobs/learn" / name / file).read_bytes() for out in (whole, parts))
            assert first == second, file


# --- candidates ---------------------------------------------------------------------------------------------------


def tried(**found: tuple[float, list[float]]) -> Any:
    return runs.rows_of({"candidate": name, "validation": v, "used": used} for name, (v, used) in found.items())


def test_a_candidate_must_leave_room_for_all_tasks() -> None:
    rows = tried(wasteful=(0.9, [0.3, 0.5]), frugal=(0.8, [0.4, 0.45]), poor=(0.7, [0.1, 0.2]))
    assert needed(rows[0], 10) == pytest.approx(0.3 + 9 * 0.2)
    assert choose(METHOD, rows, 10) == "frugal"
    assert choose(METHOD, rows, 3) == "wasteful"
    assert choose(METHOD, tried(wasteful=(0.9, [0.3, 0.5]), frugal=(0.8, [0.4, 0.45])), 100) == "frugal"


def test_candidates_that_diverged_are_not_chosen() -> None:
    rows = tried(slow=(0.8, [0.1]), fast=(0.9, [0.1]))
    rows[1]["diverged"] = "nan"
    assert choose(METHOD, rows, 10) == "slow"
    rows[0]["diverged"] = "nan"
    with pytest.raises(RunError, match=r"Powerprop \+ EPN, α=1\.5 diverged with every candidate: slow, fast"):
        choose(METHOD, rows, 10)


def test_the_settings_of_a_candidate() -> None:
    cfg = replace(SMALL, candidates=("lr=0.1", "lr=0.3 gamma=0.2 clip=2"))
    found = cfg.with_candidate("lr=0.3 gamma=0.2 clip=2")
    assert (found.lr, found.gamma, found.frugal_gamma, found.clip, found.candidates) == (0.3, 0.2, 0.2, 2.0, ())
    assert cfg.with_candidate(None) == cfg
    with pytest.raises(ValueError, match=r"gamma must be at most 1, got 1\.5"):
        replace(SMALL, candidates=("gamma=1.5",))
    with pytest.raises(ValueError, match="tuning_tasks must be at most the 2 tasks, got 3"):
        replace(SMALL, candidates=("lr=0.1", "lr=0.2"), tuning_tasks=3)


@pytest.mark.parametrize("bad", ["", "lr", "lr=fast", "rate=0.1", "lr=0.1 lr=0.2", "lr:0.1"])
def test_bad_candidates(bad: str) -> None:
    with pytest.raises(ValueError, match=f"a candidate must look like .*, got '{bad}'"):
        replace(SMALL, candidates=(bad,))


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": 200}, "validation must be below the 200 images, got 200"),
        ({"infer_at": (3,)}, r"infer_at must be in 1\.\.2, the tasks, got 3"),
        ({"model": "alexnet"}, "model alexnet is for a split stream, got stream 'permuted'"),
        ({"shift": 2}, "shift moves images of networks of convolutions, got 2 with mlp"),
        ({"grid": (0.1, 0.2)}, "falling fractions"),
        ({"methods": ("frugal-packnet",)}, "must be at most 2, the retrain_steps, got 300"),
    ],
)
def test_bad_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


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
def test_settings_that_do_not_fit_the_data_are_found_before_the_jobs(change: dict[str, Any], message: str) -> None:
    split.find_data(SMALL)
    with pytest.raises(ValueError, match=message):
        split.find_data(replace(SMALL, **change))


def test_packnet_needs_no_validation_data() -> None:
    split.find_data(replace(SMALL, methods=("packnet",), validation=0))


# --- the page -----------------------------------------------------------------------------------------------------


def fake_row(method: Method, seed: int, matrix: list[list[float]], **changes: Any) -> Row:
    """What a job says of two tasks."""
    probe = {"tasks": 2, "rates": {"shortlist": {"16": [1.0, 0.9]}, "exhaustive": {"16": [1.0, 0.9]}}}
    found = {
        **method._asdict(), "seed": seed, "candidate": None, "note": "", "accuracy": [row[-1] for row in matrix],
        "used": [0.1, 0.2], "inference": [probe], "matrix": matrix,
        "class_incremental": {"group": 16, "accuracy": [0.8, 0.9], "confusion": [[1.0, 0.0], [0.0, 1.0]]},
    }  # fmt: skip
    return Row(found | changes, Path())


def composed(cfg: Config, rows: list[Row]) -> Page:
    methods: dict[Method, str | None] = {Method(row["method"], row["alpha"]): None for row in rows}
    story = Story("Title", "Section 5.3", "Intro.", PERMUTED["paper"], ("permuted-mnist", "EfficientPackNet"))
    return make_page(cfg, story, runs.rows_of([]), split.Rows(rows), methods)


def test_forgetting_is_worked_out_from_the_matrix() -> None:
    matrices = [[0.9], [0.8, 0.95]], [[0.7], [0.9, 0.95]]
    page = composed(replace(SMALL, seeds=2), [fake_row(METHOD, i, each) for i, each in enumerate(matrices)])
    markdown = page.sections[0].tables[0].to_markdown()
    assert "| forgetting | backward transfer |" in markdown
    assert "-5.00 ± 21.21 | 5.00 ± 21.21 |" in markdown
    assert "| EPN (paper) |  |  |  | 97.09 ± 0.08 |" in markdown
    assert page.headline is not None
    assert page.headline.paper == "97.09 ± 0.08 (50,000 + 50,000 steps)"


@pytest.mark.parametrize("change", [{"matrix": False}, {"tasks": 1}])
def test_no_forgetting_without_a_matrix_of_two_tasks(change: dict[str, Any]) -> None:
    cfg = replace(SMALL, **change)
    row = fake_row(METHOD, 0, [[0.9]] if cfg.matrix else [], accuracy=[0.9], used=[0.1])
    assert "forgetting" not in composed(cfg, [row]).sections[0].tables[0].to_markdown()


def test_a_page_of_runs_that_all_diverged() -> None:
    lost = [
        Row({**METHOD._asdict(), "seed": seed, "diverged": "task 1: the loss is nan", "note": "half of it"}, Path())
        for seed in range(2)
    ]
    page = composed(replace(SMALL, seeds=2), lost)
    assert page.sections[0].text == "No run came to its end."
    assert "2 runs diverged" in page.sections[0].tables[0].to_markdown()
    assert "half of it" in page.intro
    reason = "Powerprop + EPN, α=1.5, seed {}: task 1: the loss is nan"
    assert page.sections[-1].text.split("\n\n") == [reason.format(seed) for seed in range(2)]
    assert page.headline is None


def test_a_page_of_runs_of_which_one_diverged() -> None:
    plain = Method("efficient-packnet", 1.0)
    lost = Row({**METHOD._asdict(), "seed": 0, "diverged": "task 0: the loss is inf", "note": ""}, Path())
    page = composed(replace(SMALL, alphas=(1.0, 1.5)), [fake_row(plain, 0, [[0.9], [0.9, 0.9]]), lost])
    assert [row[0] for row in page.sections[0].tables[0].rows] == ["EPN", "EPN (paper)"]
    assert page.sections[-1].text == "Powerprop + EPN, α=1.5, seed 0: task 0: the loss is inf"
