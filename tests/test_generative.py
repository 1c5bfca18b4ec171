"""Continual generative modelling: the model, the strategies on it, and the experiment at smoke scale."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import standin
from powerprop import data
from powerprop.cli import main
from powerprop.commands.options import with_dataset
from powerprop.continual import EWC, SI, VCL, EfficientPackNet, Elbo, Laplace, Naive, Strategy, load_learner
from powerprop.data import Images
from powerprop.experiments import EXPERIMENTS
from powerprop.experiments.generative.arms import Choice, arms, chosen, jobs, tuning_jobs
from powerprop.experiments.generative.config import METHODS, MNIST
from powerprop.experiments.generative.learner import make_learner, make_stream
from powerprop.experiments.generative.measure import draw, likelihoods, some
from powerprop.experiments.generative.measured import PAPER, measure_all
from powerprop.experiments.generative.results import Learned
from powerprop.experiments.generative.train import run_job
from powerprop.experiments.harness.experiment import Job, RunError
from powerprop.experiments.harness.runner import run
from powerprop.models import TaskVAE, task_vae
from powerprop.report import Curve, Grid, image_grids, panels

SMOKE = MNIST["smoke"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*for the tasks to come"),
    pytest.mark.filterwarnings("ignore:.*it has too few weights of its own"),
    pytest.mark.filterwarnings("ignore:.*the densest is taken"),
]


def made_up(name: str) -> Images:
    images = standin.made_up("mnist")
    return replace(images, name=name, class_names=tuple("ABCDEFGHIJ") if name == "notmnist" else images.class_names)


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", made_up)


def quiet() -> Console:
    return Console(file=io.StringIO())


# --- the model ----------------------------------------------------------------------------------------------------


def test_the_paper_s_widths() -> None:
    model = task_vae(tasks=2, generator=torch.Generator().manual_seed(0))
    shapes = {name: tuple(p.shape[::-1]) for name, p in model.named_parameters() if name.endswith("weight")}
    encoder = [(784, 500), (500, 500), (500, 500), (500, 100)]
    for task in range(2):
        assert [shapes[f"parts.{task}.encoder.{2 * i}.weight"] for i in range(4)] == encoder
        assert [shapes[f"parts.{task}.head.{2 * i}.weight"] for i in range(2)] == [(50, 500), (500, 500)]
    assert [shapes[f"shared.{2 * i}.weight"] for i in range(2)] == [(500, 500), (500, 784)]
    logits, mean, log_variance = model(torch.rand(3, 1, 28, 28), 1)
    assert (logits.shape, mean.shape, log_variance.shape) == ((3, 784), (3, 50), (3, 50))


def test_tasks_have_parts_of_their_own() -> None:
    model = task_vae(8, 6, 2, tasks=1, generator=torch.Generator().manual_seed(0))
    model.parts.add(torch.Generator().manual_seed(1))
    z = torch.randn(4, 2)
    assert not torch.equal(model.decode(z, 0), model.decode(z, 1))
    with pytest.raises(ValueError, match=r"task must be in 0\.\.1 \(a part for each\), got 2"):
        model.decode(z, 2)
    with pytest.raises(ValueError, match=r"expected encoder \[inputs, …, 2·latent\].*got \[8, 6, 3\]"):
        TaskVAE([8, 6, 3], [2, 6], [6, 8])


# --- the strategies on it -----------------------------------------------------------------------------------------

OWN: dict[str, tuple[type[Strategy], float, dict[str, Any]]] = {
    "naive": (Naive, 1.0, {}),
    "laplace": (Laplace, 1.0, {"strength": 10.0, "protect": "shared.*"}),
    "ewc": (EWC, 1.0, {"strength": 10.0, "protect": ("shared.*",)}),
    "si": (SI, 1.0, {"strength": 1.0, "protect": "shared.*"}),
    "vcl": (VCL, 1.0, {"examples": 60, "samples": 2, "protect": "shared.*"}),
    "epn": (EfficientPackNet, 1.0, {"retrain_steps": 4}),
    "powerprop-laplace": (Laplace, 1.5, {"strength": 10.0, "protect": "shared.*"}),
    "powerprop-ewc": (EWC, 1.5, {"strength": 10.0, "protect": "shared.*"}),
    "powerprop-epn": (EfficientPackNet, 1.5, {"retrain_steps": 4}),
}


def learner_of(name: str) -> Strategy:
    kind, alpha, options = OWN[name]
    model = task_vae(784, 12, 4, generator=torch.Generator().manual_seed(0))
    return kind(
        model, partial(torch.optim.Adam, lr=1e-2, weight_decay=1e-3), objective=Elbo(), alpha=alpha, steps=10,
        batch_size=16, heads="parts", where="shared.*.weight", **options,
    )  # fmt: skip


def stream() -> list[data.Task]:
    return make_stream(SMOKE, made_up("mnist"), 3)


@pytest.mark.parametrize("name", OWN)
def test_parts_of_other_tasks_do_not_change(name: str) -> None:
    learner, tasks = learner_of(name), stream()
    learner.learn(tasks[0])
    before = {n: p.clone() for n, p in learner.model.named_parameters()}
    learner.learn(tasks[1])
    after = dict(learner.model.named_parameters())
    for parameter, value in before.items():
        if parameter.startswith("parts."):
            assert torch.equal(after[parameter], value), parameter
    own = [n for n, t in after.items() if n not in before or not torch.equal(t, before[n])]
    assert any(n.startswith("parts.1.") for n in own)
    assert any(n.startswith("shared.") for n in own)


@pytest.mark.parametrize("name", ["epn", "powerprop-epn"])
def test_packed_tasks_keep_their_likelihood_to_the_bit(name: str) -> None:
    learner, tasks = learner_of(name), stream()
    rows, drawn = [], []
    for task in tasks:
        learner.learn(task)
        rows.append(likelihoods(learner, tasks, 8, 6))
        drawn.append(draw(learner, learner.current, 3))
    for j in range(3):
        assert {row[j] for row in rows[j:]} == {rows[j][j]}
    assert torch.equal(drawn[-1][:1], drawn[0])
    assert torch.equal(drawn[-1][:2], drawn[1])


def test_naive_training_does_change_them() -> None:
    learner, tasks = learner_of("naive"), stream()
    learner.learn(tasks[0])
    first = likelihoods(learner, tasks, 8, 6)
    learner.learn(tasks[1])
    assert likelihoods(learner, tasks, 8, 6)[0] != first[0]


@pytest.mark.parametrize("name", ["laplace", "ewc", "si", "vcl", "powerprop-ewc"])
def test_only_what_is_protected_is_kept(name: str, tmp_path: Path) -> None:
    learner, tasks = learner_of(name), stream()
    for task in tasks[:2]:
        learner.learn(task)
    kept = [key for part in learner.parts.values() for key in part.state()[0]]
    assert kept
    assert all("shared." in key for key in kept)
    learner.save(tmp_path / "learner.safetensors")
    model = task_vae(784, 12, 4, generator=torch.Generator().manual_seed(9))
    again = load_learner(tmp_path / "learner.safetensors", model, where="shared.*.weight")
    assert again.protect == ["shared.*"]  # type: ignore[attr-defined]
    for each in (learner, again):
        each.learn(tasks[2])
    assert likelihoods(learner, tasks, 8, 6) == likelihoods(again, tasks, 8, 6)


@pytest.mark.parametrize("name", ["ewc", "vcl"])
def test_patterns_that_fit_nothing_are_named(name: str) -> None:
    kind, _, options = OWN[name]
    model = task_vae(8, 6, 2)
    with pytest.raises(ValueError, match=r"protect must be patterns of parameters' names, got \['shard\.\*'\]"):
        kind(model, partial(torch.optim.Adam, lr=1e-2), **(options | {"protect": "shard.*"}))


def test_vcl_draws_only_what_is_protected() -> None:
    learner, tasks = learner_of("vcl"), stream()
    learner.begin(tasks[0])
    with learner.viewing(0):
        drawn = {n for n, p in learner.model.named_parameters() if not p.is_leaf}
        assert drawn == {f"shared.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}


# --- the experiment -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["generative", "generative-notmnist"])
def test_smoke(name: str, tmp_path: Path, images: None) -> None:
    experiment = EXPERIMENTS[name]
    config = experiment.presets["smoke"]
    findings = run(experiment, "smoke", config, tmp_path, 1, quiet())
    assert findings is not None
    assert len(findings.table.rows) == len(METHODS)
    rows = {row["name"]: row for row in json.loads((tmp_path / "summary.json").read_text())["rows"]}
    assert list(rows) == list(METHODS)
    for row in rows.values():
        assert -784 < row["log_likelihood"]["mean"] < 0
        assert row["paper"] == PAPER[config.dataset][row["name"]]
        assert row["unchanged"] == (row["used"] is not None) == ("EfficientPackNet" in row["name"])
    tried = [(each["strength"], each["damping"]) for each in rows["EWC"]["tried"]]
    assert tried == [(1.0, 0.0), (1.0, 0.5), (10.0, 0.0), (10.0, 0.5)]
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"average.svg", "samples.svg", "tasks.svg"}
    html = (tmp_path / "report.html").read_text()
    assert "every task&#x27;s likelihood is, to the bit, what it was" in html
    files = {path.name for path in (tmp_path / "jobs" / "Naive-seed0").iterdir()}
    assert files == {"job.json", "metrics.jsonl", "learner.safetensors", "result.json", "samples.safetensors"}


class StoppedError(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("method", ["VCL", "SI", "Powerprop+EWC", "Powerprop+EfficientPackNet"])
def test_stopped_in_any_task_and_resumed(method: str, tmp_path: Path, images: None) -> None:
    config = replace(SMOKE, methods=(method,), strengths=(10.0,), dampings=(0.5,))
    job = jobs(config, {})[0]

    def stop(task: int, done: float, values: dict[str, float]) -> None:
        if values["task"] > task:
            raise StoppedError

    whole = run_job(config, job, tmp_path / "whole", lambda done, values: None)
    for task in (1, 2):
        with pytest.raises(StoppedError):
            run_job(config, job, tmp_path / "parts", partial(stop, task))
    parts = run_job(config, job, tmp_path / "parts", lambda done, values: None)
    assert whole.pop("seconds") > 0 < parts.pop("seconds")
    assert parts == whole
    for name in ("samples.safetensors", "metrics.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


def test_notmnist_that_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_data_places: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "load", partial(data.load, download=False))
    asked = ["run", "generative", "--dataset", "notmnist", "--preset", "smoke", "--out", str(tmp_path / "run")]
    assert main(asked) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "notMNIST_small.tar.gz" in said
    assert "POWERPROP_DATA" in said or str(tmp_path / "cache") in said


def test_a_data_set_has_presets_of_its_own() -> None:
    for asked in (["--dataset", "notmnist"], ["--dataset=notmnist"]):
        assert with_dataset(["run", "generative", *asked]) == ["run", "generative-notmnist", *asked]
    for plain in (["run", "generative"], ["run", "generative", "--dataset", "mnist"], ["list"], []):
        assert with_dataset(plain) == plain


def test_strengths_are_chosen_for_each_power() -> None:
    config = replace(SMOKE, strengths=(1.0, 10.0), si_strengths=(1.0, 5.0), dampings=(0.0,))
    rows = {arm.name: arm for arm in arms(config)}
    first = jobs(config, {})
    assert len(first) == 2 * 5
    assert all(job.settings["tuning"] for job in first)
    values = dict(zip((job.key for job in first), range(-50, 0), strict=False))
    values[tuning_jobs(config, rows["EWC"])[0].key] = 0
    found = {key: {"validation": float(value)} for key, value in values.items()}
    assert chosen(config, rows["EWC"], found) == Choice(1.0, 1.0)
    assert chosen(config, rows["Powerprop+EWC"], found) == Choice(1.5, 10.0)
    assert chosen(config, rows["SI"], found) == Choice(1.0, 5.0)
    assert chosen(config, rows["Naive"], found) == Choice()
    table = jobs(config, found)[len(first) :]
    assert [job.settings["strength"] for job in table] == [None, 10.0, 1.0, 5.0, None, None, 10.0, 10.0, None]
    found[tuning_jobs(config, rows["EWC"])[0].key] = {"diverged": "by hand"}
    assert chosen(config, rows["EWC"], found) == Choice(1.0, 10.0)


def test_dampings_are_chosen_together_with_strengths() -> None:
    config = replace(SMOKE, methods=("Laplace", "SI"), strengths=(1.0, 10.0), si_strengths=(1.0,), dampings=(0.0, 0.5))
    first = jobs(config, {})
    assert len({job.key for job in first}) == len(first) == 4
    held, path = arms(config)
    found = {job.key: {"validation": -100.0} for job in first}
    found[held.tuning_job(Choice(1.0, 1.0, 0.5)).key] = {"validation": -90.0}
    assert [chosen(config, arm, found) for arm in (held, path)] == [Choice(1.0, 1.0, 0.5), Choice(1.0, 1.0)]
    made = [make_learner(config, job.settings, torch.device("cpu")) for job in jobs(config, found)[len(first) :]]
    assert isinstance(made[0], Laplace)
    assert made[0].damping == 0.5


def test_powers_are_chosen_together_with_strengths_and_without() -> None:
    config = replace(SMOKE, methods=("EWC", "Powerprop+EWC", "Powerprop+EfficientPackNet"), alphas=(1.5, 2.0))
    config = replace(config, dampings=(0.0,))
    first = jobs(config, {})
    assert len({job.key for job in first}) == len(first) == 2 + 4 + 2
    found = {job.key: {"validation": -100.0} for job in first}
    plain, power, packed = arms(config)
    found[power.tuning_job(Choice(2.0, 1.0)).key] = found[packed.tuning_job(Choice(2.0)).key] = {"validation": -90.0}
    assert [chosen(config, arm, found).alpha for arm in (plain, power, packed)] == [1.0, 2.0, 2.0]
    assert [job.settings["alpha"] for job in jobs(config, found)[len(first) :]] == [1.0, 2.0, 2.0]
    lost = {job.key: {"diverged": "by hand"} for job in first}
    with pytest.raises(RunError, match=r"Powerprop \+ EPN diverged with .*alpha1.5, alpha2"):
        chosen(config, packed, lost)


def test_optimisers_and_rates() -> None:
    settings = {"strategy": "EfficientPackNet", "alpha": 2.0, "strength": None, "damping": 0.0, "seed": 0}
    ours = make_learner(replace(SMOKE, momentum_lr=0.0, magnitude=0.0625), settings, torch.device("cpu"))
    assert [group["lr"] for group in ours.optimizer.param_groups] == [1e-3, pytest.approx(4e-3)]
    assert list(ours.optimizer.masters) == ["shared.0.weight", "shared.2.weight"]
    paper = make_learner(replace(SMOKE, momentum_lr=0.5, magnitude=0.0), settings, torch.device("cpu"))
    assert isinstance(paper.optimizer.base, torch.optim.SGD)
    assert [group["lr"] for group in paper.optimizer.param_groups] == [0.5, 0.5]
    plain = make_learner(
        replace(SMOKE, momentum_lr=0.5), {**settings, "strategy": "Naive", "alpha": 1.0}, torch.device("cpu")
    )
    assert isinstance(plain.optimizer.base, torch.optim.Adam)


def test_the_table_by_hand() -> None:
    config = replace(SMOKE, methods=("Naive", "EfficientPackNet"), tasks=2)
    naive = {"curve": [[-100.0], [-180.0, -90.0]], "final": [-170.0, -80.0], "used": None}
    packed = {"curve": [[-100.0], [-100.0, -95.0]], "final": [-96.0, -94.0], "used": [0.1, 0.2]}
    rest = {"memory_bytes": 0, "seconds": 1.0}
    measured = measure_all(config, {"Naive-seed0": naive | rest, "EfficientPackNet-seed0": packed | rest})
    values = [(m.average(), m.learned(), m.forgotten(), m.unchanged()) for m in measured]
    assert [(a.mean, b.mean, c.mean, d) for a, b, c, d in values if a and b and c] == [
        (-125.0, -95.0, 80.0, False),
        (-95.0, -97.5, 0.0, True),
    ]
    used = measured[1].used()
    assert used is not None
    assert used.mean == 0.2


def test_curves_have_a_row_for_each_task() -> None:
    with pytest.raises(ValueError, match=r"'curve' must have rows of 1\.\.2 values"):
        Learned([[-1.0]], [-1.0, -2.0], None, 0, 1.0)


def test_test_images_are_the_same_for_all() -> None:
    part = stream()[1].test()
    assert torch.equal(some(part, 5, 1), some(part, 9, 1)[:5])
    assert not torch.equal(some(part, 5, 1), part.x[:5])
    assert len(some(part, 0, 1)) == len(part.x)


def test_tuning_looks_at_the_first_tasks_alone(tmp_path: Path, images: None) -> None:
    config = replace(SMOKE, methods=("EWC",), tuning_tasks=2)
    found = run_job(config, jobs(config, {})[0], tmp_path, lambda done, values: None)
    assert set(found) == {"validation", "note"}
    assert found["validation"] < 0


def test_bad_settings() -> None:
    for change, message in (
        ({"dataset": "cifar10"}, "dataset must be one of mnist, notmnist, got 'cifar10'"),
        ({"methods": ("EWCC",)}, "methods must be one of all, Naive"),
        ({"alphas": (1.0, 2.0)}, "alphas must be above 1"),
        ({"alphas": (2.0, 2.0)}, "alphas must be some, each once"),
        ({"precision": "float8"}, "precision must be one of float32, bfloat16, got 'float8'"),
        ({"strengths": ()}, "strengths must be some, each once"),
        ({"strengths": (0.0,)}, "strengths must be above 0"),
        ({"dampings": (0.0, -1.0)}, "dampings must not be negative"),
        ({"tuning_tasks": 4}, "tuning_tasks must be at most the 3 tasks, got 4"),
        ({"tasks": 11}, "tasks must be at most 10, got 11"),
        ({"gamma": 1.5}, "gamma must be at most 1, got 1.5"),
        ({"spread": 0.0}, "spread must be above 0"),
        ({"validation": 1_200}, "validation must be below the 1200 images, got 1200"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(SMOKE, **change)  # type: ignore[arg-type]


def test_a_character_without_images_is_an_error(images: None) -> None:
    few = replace(SMOKE, images=4, validation=2)
    with pytest.raises(ValueError, match="no .* image is of"):
        EXPERIMENTS["generative"].prepare(few)


# --- the picture --------------------------------------------------------------------------------------------------


def test_grids_of_images(tmp_path: Path) -> None:
    grids = [Grid(f"method {i}", np.full((2, 3, 4, 4), i / 10), "-9 nats") for i in range(7)]
    image = image_grids(grids, ["0", "1"], tmp_path / "grids.svg", "Samples")
    assert image.path.read_text().count("<image ") == 7
    assert "method 6 (-9 nats)" in image.alt
    with pytest.raises(ValueError, match=r"needs grids of one shape with 3 rows"):
        image_grids(grids, ["0", "1", "2"], tmp_path / "grids.svg", "Samples")
    with pytest.raises(ValueError, match=r"grid 'dark' needs images \(rows, columns, height, width\) in \[0, 1\]"):
        Grid("dark", np.full((2, 3, 4, 4), 255.0))


def test_jobs_have_names_of_their_own() -> None:
    found = [job.key for job in jobs(replace(SMOKE, strengths=(1.0,), dampings=(0.0,)), {})]
    assert len(set(found)) == len(found) == len(METHODS)
    assert isinstance(jobs(SMOKE, {})[0], Job)


def test_panels_show_what_they_are_asked_to(tmp_path: Path) -> None:
    flat = [Curve("Naive", None, [1, 2], [-100.0, -100.0], method="Naive")]
    fallen = [*flat, Curve("EWC", None, [1, 2], [-90.0, -500.0], method="EWC", plain=True)]
    image = panels({"task 1": flat, "task 2": fallen}, tmp_path / "panels.svg", "Tasks", "tasks", "nats", span=40.0)
    assert "task 2: Naive -100, EWC -500" in image.alt
    assert image.path.exists()
    with pytest.raises(ValueError, match="figure 'task 1' needs at least one curve"):
        panels({"task 1": []}, tmp_path / "panels.svg", "Tasks", "tasks", "nats")
