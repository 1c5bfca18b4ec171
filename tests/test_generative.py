"""Continual generative modelling: the model, the strategies on it, and the experiment at smoke scale."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import runs
import standin
from powerprop.continual import EWC, SI, VCL, EfficientPackNet, Elbo, Laplace, Naive, Strategy, load_learner
from powerprop_paper import data
from powerprop_paper.cli import main
from powerprop_paper.data import Images
from powerprop_paper.experiments import generative
from powerprop_paper.experiments.generative import (
    EXPERIMENTS,
    METHODS,
    MNIST,
    PAPER,
    Choice,
    Config,
    Method,
    MethodRows,
    choose,
    draw,
    learn,
    likelihoods,
    make_learner,
    some,
    stream_of,
    tune,
)
from powerprop_paper.models import TaskVAE, task_vae
from powerprop_paper.report import Curve, Grid, image_grids, panels
from powerprop_paper.run import Row, Rows, RunError

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

EIGHT = replace(SMOKE, test=8)
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
    return stream_of(SMOKE, made_up("mnist"), 3)


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
        rows.append(likelihoods(EIGHT, learner, tasks, 6))
        drawn.append(draw(learner, learner.current, 3))
    for j in range(3):
        assert {row[j] for row in rows[j:]} == {rows[j][j]}
    assert torch.equal(drawn[-1][:1], drawn[0])
    assert torch.equal(drawn[-1][:2], drawn[1])


def test_naive_training_does_change_them() -> None:
    learner, tasks = learner_of("naive"), stream()
    learner.learn(tasks[0])
    first = likelihoods(EIGHT, learner, tasks, 6)
    learner.learn(tasks[1])
    assert likelihoods(EIGHT, learner, tasks, 6)[0] != first[0]


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
    assert likelihoods(EIGHT, learner, tasks, 6) == likelihoods(EIGHT, again, tasks, 6)


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


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_smoke(name: str, tmp_path: Path, images: None) -> None:
    config = EXPERIMENTS[name].presets["smoke"]
    sections = runs.run_smoke(EXPERIMENTS[name], tmp_path)["sections"]
    [table], [choices] = sections[0]["tables"], sections[3]["tables"]
    rows = {row[0]: row for row in table["rows"]}
    assert list(rows) == [Method(each).label for each in METHODS]
    for method in map(Method, METHODS):
        label, _, likelihood, printed, _, _, used = rows[method.label]
        assert -784 < likelihood["mean"] < 0
        assert printed == PAPER[config.data][method.name]
        assert (used is not None) == ("EPN" in label)
    assert "Of EPN and Powerprop + EPN every task's likelihood is, to the bit, what it was" in sections[0]["text"]
    tried = [(strength, damping) for label, _, strength, damping, *_ in choices["rows"] if label == "EWC"]
    assert tried == [("1", "0"), ("1", "0.5"), ("10", "0"), ("10", "0.5")]
    assert [row[-1] for row in choices["rows"]].count("chosen") == 4  # EWC and Laplace with and without Powerprop
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"average.svg", "samples.svg", "tasks.svg"}
    files = {path.name for path in (tmp_path / "jobs/learn/strategy=Naive,alpha=1,damping=0,seed=0").iterdir()}
    assert files == {"row.json", "metrics.jsonl", "learner.safetensors", "samples.safetensors"}


class StoppedError(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("name", ["VCL", "SI", "Powerprop+EWC", "Powerprop+EfficientPackNet"])
def test_stopped_in_any_task_and_resumed(name: str, tmp_path: Path, images: None) -> None:
    method, config = Method(name), replace(SMOKE, strengths=(10.0,), dampings=(0.5,))
    settings = method.job(method.choices(config)[0], 0)

    def stop(task: int, done: float, values: dict[str, float]) -> None:
        if values["task"] > task:
            raise StoppedError

    def ends(folder: Path) -> tuple[Any, ...]:
        found = learn(config, folder, lambda done, values: None, **settings)
        return found, *((folder / name).read_bytes() for name in ("samples.safetensors", "metrics.jsonl"))

    for task in (1, 2):
        with pytest.raises(StoppedError):
            learn(config, tmp_path / "parts", partial(stop, task), **settings)
    assert ends(tmp_path / "parts") == ends(tmp_path / "whole")


def test_notmnist_that_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_data_places: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "load", partial(data.load, download=False))
    assert main(["run", "generative-notmnist", "--preset", "smoke", "--out", str(tmp_path / "run")]) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "notMNIST_small.tar.gz" in said
    assert "POWERPROP_DATA" in said or str(tmp_path / "cache") in said


def tried(config: Config, method: Method, **values: float) -> Rows:
    """The rows of a method's tuning, -100 each but for those named by the number of their choice: `_2=-90`."""
    found = [values.get(f"_{i}", -100.0) for i in range(len(method.choices(config)))]
    return Rows(
        Row({**method.job(each, 0), **({"diverged": "by hand"} if value > 0 else {"validation": value})}, Path("none"))
        for each, value in zip(method.choices(config), found, strict=True)
    )


def test_powers_strengths_and_dampings_are_chosen_for_each_method() -> None:
    config = replace(SMOKE, alphas=(1.5, 2.0), strengths=(1.0, 10.0), si_strengths=(1.0, 5.0), dampings=(0.0, 0.5))
    plain, power, path, packed = map(Method, ("EWC", "Powerprop+EWC", "SI", "Powerprop+EfficientPackNet"))
    assert [len(each.choices(config)) for each in (Method("Naive"), plain, power, path, packed)] == [1, 4, 8, 2, 2]
    assert choose(config, Method("Naive"), Rows()) == Choice()
    assert choose(config, plain, tried(config, plain, _1=-90)) == Choice(1.0, 1.0, 0.5)
    assert choose(config, power, tried(config, power, _6=-90)) == Choice(2.0, 10.0, 0.0)
    assert choose(config, path, tried(config, path, _1=-90)) == Choice(1.0, 5.0)
    assert choose(config, packed, tried(config, packed, _1=-90)) == Choice(2.0)
    assert choose(config, packed, tried(config, packed, _0=1)) == Choice(2.0)  # the first diverged
    with pytest.raises(RunError, match=r"Powerprop \+ EPN diverged with .*alpha=1.5, .*alpha=2.0"):
        choose(config, packed, tried(config, packed, _0=1, _1=1))
    damped = make_learner(config, torch.device("cpu"), **plain.job(Choice(1.0, 1.0, 0.5), 0))
    assert isinstance(damped, EWC)
    assert damped.damping == 0.5


def test_a_run_trains_with_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: None) -> None:
    monkeypatch.setattr(generative, "tune", lambda cfg, folder, progress, strength, **_: {"validation": strength - 99})
    config = replace(SMOKE, methods=("EWC",), strengths=(1.0, 7.0, 3.0), dampings=(0.0,), tasks=1)
    runs.run_smoke(EXPERIMENTS["generative"], tmp_path, config)
    assert [path.name for path in (tmp_path / "jobs/learn").iterdir()] == [
        "strategy=EWC,alpha=1,strength=7,damping=0,seed=0"
    ]


def test_optimisers_and_rates() -> None:
    device, job = torch.device("cpu"), Method("Powerprop+EfficientPackNet").job(Choice(2.0), 0)
    ours = make_learner(replace(SMOKE, momentum_lr=0.0), device, **job)
    assert [group["lr"] for group in ours.optimizer.param_groups] == [1e-3]
    assert ours.optimizer.rate == "matched"
    assert list(ours.optimizer.masters) == ["shared.0.weight", "shared.2.weight"]
    paper = make_learner(replace(SMOKE, momentum_lr=0.5, rate="paper"), device, **job)
    assert isinstance(paper.optimizer.base, torch.optim.SGD)
    assert [group["lr"] for group in paper.optimizer.param_groups] == [0.5]
    assert paper.optimizer.rate == "paper"
    plain = make_learner(replace(SMOKE, momentum_lr=0.5), device, **Method("Naive").job(Choice(), 0))
    assert isinstance(plain.optimizer.base, torch.optim.Adam)


@pytest.mark.parametrize("name", ["EfficientPackNet", "Powerprop+EfficientPackNet"])
def test_packing_is_the_published_algorithm(name: str) -> None:
    """A full network is trained on, as the paper does; it does not turn to masks over frozen weights."""
    method = Method(name)
    learner = make_learner(SMOKE, torch.device("cpu"), **method.job(method.choices(SMOKE)[0], 0))
    assert isinstance(learner, EfficientPackNet)
    assert (learner.when_full, learner.gamma, learner.prunings, learner.reuse) == ("train", 0.95, 0, "all")


def test_the_table_by_hand() -> None:
    naive = {"curve": [[-100.0], [-180.0, -90.0]], "final": [-170.0, -80.0], "used": None}
    packed = {"curve": [[-100.0], [-100.0, -95.0]], "final": [-96.0, -94.0], "used": [0.1, 0.2]}
    measured = [
        MethodRows(method, Choice(), Rows([Row({**method.job(Choice(), 0), **found}, Path("nowhere"))]))
        for method, found in ((Method("Naive"), naive), (Method("EfficientPackNet"), packed))
    ]
    values = [(m.average, m.learned, m.forgotten, m.unchanged) for m in measured]
    assert [(a.mean, b.mean, c.mean, d) for a, b, c, d in values if a and b and c] == [
        (-125.0, -95.0, 80.0, False),
        (-95.0, -97.5, 0.0, True),
    ]
    assert measured[1].used is not None
    assert measured[1].used.mean == 0.2


def test_test_images_are_the_same_for_all() -> None:
    part = stream()[1].test()
    assert torch.equal(some(part, 5, 1), some(part, 9, 1)[:5])
    assert not torch.equal(some(part, 5, 1), part.x[:5])
    assert len(some(part, 0, 1)) == len(part.x)


def test_tuning_looks_at_the_first_tasks_alone(tmp_path: Path, images: None) -> None:
    config, method = replace(SMOKE, tuning_tasks=2), Method("EWC")
    found = tune(config, tmp_path, lambda done, values: None, **method.job(Choice(1.0, 1.0), 0))
    assert set(found) == {"validation"}
    assert found["validation"] < 0
    assert len(load_learner(tmp_path / "learner.safetensors", task_vae(784, 12, 4), where="shared.*.weight").tasks) == 2


def test_bad_settings() -> None:
    for change, message in (
        ({"tuning_tasks": 4}, "tuning_tasks must be at most the 3 tasks, got 4"),
        ({"validation": 1_200}, "validation must be below the 1200 images, got 1200"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(SMOKE, **change)  # type: ignore[arg-type]


def test_a_character_without_images_is_an_error(tmp_path: Path, images: None) -> None:
    with pytest.raises(RunError, match="no .* image is of"):
        runs.run_smoke(EXPERIMENTS["generative"], tmp_path / "run", replace(SMOKE, images=4, validation=2))
    assert not (tmp_path / "run").exists()


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


def test_panels_show_what_they_are_asked_to(tmp_path: Path) -> None:
    flat = [Curve("Naive", None, [1, 2], [-100.0, -100.0], method="Naive")]
    fallen = [*flat, Curve("EWC", None, [1, 2], [-90.0, -500.0], method="EWC", plain=True)]
    image = panels({"task 1": flat, "task 2": fallen}, tmp_path / "panels.svg", "Tasks", "tasks", "nats", span=40.0)
    assert "task 2: Naive -100, EWC -500" in image.alt
    assert image.path.exists()
    with pytest.raises(ValueError, match="figure 'task 1' needs at least one curve"):
        panels({"task 1": []}, tmp_path / "panels.svg", "Tasks", "tasks", "nats")
