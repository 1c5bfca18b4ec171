"""Tables of continual-learning methods: every method at smoke scale, resumed runs, tuning, published values."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import standin
from powerprop import data
from powerprop.cli import main
from powerprop.commands.options import with_strategies
from powerprop.continual import SCENARIOS, STRATEGIES, Scenario
from powerprop.experiments import EXPERIMENTS
from powerprop.experiments.continual.baselines.arms import Arm, Choice, arms, choices, chosen, jobs, trainings
from powerprop.experiments.continual.baselines.config import Config
from powerprop.experiments.continual.baselines.measured import Comparison, comparisons, measure_all
from powerprop.experiments.continual.baselines.network import build
from powerprop.experiments.continual.baselines.protocol import (
    OF_THE_STREAM,
    PROTOCOLS,
    TASK_GIVEN_ONLY,
    Plan,
    arguments,
    outputs_of,
    steps_of,
    strength_of,
)
from powerprop.experiments.continual.baselines.published import PRINTED, PUBLISHED, Value
from powerprop.experiments.continual.baselines.report import Story, findings, headline, run_note
from powerprop.experiments.continual.baselines.train import make_learner, make_stream, plan_of, run_job
from powerprop.experiments.harness.rates import equal_rate
from powerprop.experiments.harness.runner import run
from powerprop.optim import Powerprop
from powerprop.report import Mean, method_look, write_page

TABLES = [name for name, experiment in EXPERIMENTS.items() if experiment.config is Config]
SMOKE = EXPERIMENTS["split-mnist-strategies"].presets["smoke"]
PLAN = Plan(tasks=5, steps=90, epochs=4, examples=1000, width=400)


def load(name: str) -> data.Images:
    """The stand-in images; CIFAR-100 is made up of ten patterns in a hundred classes."""
    images = standin.load("mnist") if name == "mnist" else standin.made_up("cifar10", 2000, 400)
    if name == "mnist":
        return images
    extra = [10 * (torch.arange(len(labels)) % 10) for labels in (images.train_y, images.test_y)]
    labels = images.train_y + extra[0], images.test_y + extra[1]
    return data.Images(
        name, images.train_x, labels[0], images.test_x, labels[1], tuple(map(str, range(100))), "half of it"
    )


@pytest.fixture(autouse=True)
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", load)


@pytest.mark.filterwarnings("ignore:.*for the tasks to come")  # a network of this size is soon full
@pytest.mark.filterwarnings("ignore:.*(all gates of|fell to|no sub-network)")  # after so few steps
@pytest.mark.parametrize("name", TABLES)
def test_smoke(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]
    config = experiment.presets["smoke"]
    run(experiment, "smoke", config, tmp_path, 1, Console(file=io.StringIO()))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [row["label"] for row in summary["rows"]] == [arm.label for arm in arms(config)]
    for row in summary["rows"]:
        own = [s for kinds in outputs_of(config.benchmark, row["strategy"], config.columns()).values() for s in kinds]
        for scenario, value in row["accuracy"].items():
            assert (value is not None) == (scenario in own)
            assert value is None or 0 <= value["mean"] <= 1
        assert row["memory_bytes"] >= 0
        assert row["diverged"] == 0
    html = (tmp_path / "report.html").read_text()
    assert all(scenario in html for scenario in config.columns())
    assert ("half of it" in html) == (config.benchmark == "split-cifar100")


def test_smoke_has_every_method() -> None:
    assert {arm.name for arm in arms(SMOKE)} == set(STRATEGIES)


def test_the_command_line_leads_to_the_table(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    command = ["run", "split-mnist", "--strategy", "Naive", "ER", "--preset", "smoke", "--workers", "1", "--out", out]
    assert main(command) == 0
    rows = json.loads((tmp_path / "run" / "summary.json").read_text())["rows"]
    assert [row["label"] for row in rows] == ["ER", "Naive"]
    assert "powerprop run split-mnist-strategies --preset smoke --strategy Naive ER" in (
        tmp_path / "run" / "report.html"
    ).read_text(encoding="utf-8")


def test_strategy_is_redirected_only_where_there_is_a_table() -> None:
    asked = ["run", "split-mnist", "--strategy=EWC", "--preset", "cpu"]
    assert with_strategies(asked) == ["run", "split-mnist-strategies", *asked[2:]]
    for plain in (["run", "split-mnist"], ["run", "mnist-oneshot", "--strategy", "EWC"], ["list"], []):
        assert with_strategies(plain) == plain


def test_a_method_that_is_not_known_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "split-mnist", "--strategy", "EWCC"]) == 2
    assert "strategy must be one of all," in (said := capsys.readouterr().err)
    assert "'EWCC'" in said


SMALL = replace(SMOKE, tasks=3)


@pytest.mark.parametrize("name", ["Naive", "ER", "SI", "EfficientPackNet"])
@pytest.mark.filterwarnings("ignore:.*for the tasks to come")
def test_stopped_after_any_task_and_resumed(name: str, tmp_path: Path) -> None:
    job = Arm(name, 1.0).job("stream", 0)
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    whole = run_job(SMALL, job, tmp_path / "whole", lambda *_: None)

    def stop(at: int, done: float, numbers: dict[str, float]) -> None:
        if numbers["task"] == at:
            raise KeyboardInterrupt

    for at in (2, 3):
        with pytest.raises(KeyboardInterrupt):
            run_job(SMALL, job, tmp_path / "parts", partial(stop, at))
    parts = run_job(SMALL, job, tmp_path / "parts", lambda *_: None)
    assert {**parts, "seconds": 0} == {**whole, "seconds": 0}


def result(accuracy: float, **changes: Any) -> dict[str, Any]:
    """What a job finds that learned two tasks."""
    rows = [[accuracy], [accuracy, accuracy]]
    accuracies = dict.fromkeys(SCENARIOS, rows)
    found = {"accuracies": accuracies, "validation": dict.fromkeys(SCENARIOS, accuracy), "memory_bytes": 2_000_000}
    return {**found, "seconds": 3.0, "together": None, "note": "", **changes}


def test_strengths_are_chosen_on_validation_data_for_each_power_by_itself() -> None:
    config = replace(
        SMOKE,
        strategy=("EWC", "Naive"),
        powerprop=("EWC",),
        scenarios=("task-incremental",),
        strengths=(0.1, 1.0),
        seeds=2,
    )
    first = jobs(config, {})
    plain, power = Arm("EWC", 1.0), Arm("EWC", config.alpha)
    assert [job.key for job in first] == [
        arm.job("heads", 0, Choice(each)).key for arm in (plain, power) for each in (0.1, 1.0)
    ]
    results = {job.key: result(0.5) for job in first}
    results[plain.job("heads", 0, Choice(1.0)).key] = result(0.9)
    results[power.job("heads", 0, Choice(0.1)).key] = result(0.9)
    assert [chosen(config, arm, "heads", results) for arm in (plain, power)] == [Choice(1.0), Choice(0.1)]
    later = {job.key for job in jobs(config, results)} - results.keys()
    assert later == {
        plain.job("heads", 1, Choice(1.0)).key,
        power.job("heads", 1, Choice(0.1)).key,
        *(Arm("Naive", 1.0).job("heads", seed).key for seed in range(2)),
    }


def test_a_strength_is_a_factor_of_the_published_one() -> None:
    settings = {"strategy": "EWC", "alpha": 1.0, "outputs": "heads", "seed": 0}
    images = load("mnist")
    published = STRATEGIES["EWC"].PUBLISHED["split-mnist/task-incremental"]["strength"]
    for factor in (1.0, 0.1):
        learner: Any = make_learner(SMOKE, {**settings, "strength": factor, "rate": 1.0}, images, torch.device("cpu"))
        assert learner.strength == pytest.approx(factor * published)


@pytest.mark.parametrize(("name", "default"), [("EWC", 100.0), ("Laplace", 100.0), ("MAS", 1.0)])
def test_without_a_published_strength_it_is_the_default(name: str, default: float) -> None:
    assert strength_of(name, {}) == default
    assert strength_of(name, {"strength": 7}) == 7.0


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Adam])
def test_a_typical_weight_learns_equally_fast_under_alpha(base: Any) -> None:
    """The optimiser's step counts times the slope of w(φ) in φ, and once more in w, whatever the optimiser."""
    moved = {}
    for alpha in (1.0, 1.5):
        weight = torch.nn.Parameter(torch.full((1, 3), 0.03, dtype=torch.float64))
        model = torch.nn.Linear(3, 1, bias=False)
        model.weight = weight
        rate = equal_rate(1e-5, 0.03, alpha)
        optimizer = Powerprop(base(model.parameters(), lr=rate), model, alpha=alpha)
        model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        optimizer.step()
        moved[alpha] = float(0.03 - weight.detach()[0, 0])
    assert moved[1.5] == pytest.approx(moved[1.0], rel=1e-3)


def test_the_rate_is_a_factor_of_the_protocol_s() -> None:
    settings = {"strategy": "Naive", "outputs": "heads", "seed": 0, "strength": 1.0}
    for alpha, rate in ((1.0, 1.0), (1.0, 3.0), (1.5, 3.0)):
        learner = make_learner(SMOKE, {**settings, "alpha": alpha, "rate": rate}, load("mnist"), torch.device("cpu"))
        assert learner.optimizer.param_groups[0]["lr"] == equal_rate(rate * 1e-3, SMOKE.magnitude, alpha)


def test_si_may_have_strengths_of_its_own() -> None:
    config = replace(SMOKE, strengths=(0.5, 1.0), si_strengths=(32.0,), rates=(1.0,))
    assert choices(config, Arm("SI", 1.0)) == [Choice(32.0)]
    assert choices(config, Arm("EWC", 1.0)) == [Choice(0.5), Choice(1.0)]
    assert choices(replace(config, si_strengths=()), Arm("SI", 1.0)) == choices(config, Arm("EWC", 1.0))
    assert choices(config, Arm("Naive", 1.0)) == [Choice()]
    for wrong in ((0.0,), (1.0, 1.0)):
        with pytest.raises(ValueError, match="si_strengths must be"):
            replace(config, si_strengths=wrong)


def test_choices_are_made_by_all_tuning_seeds() -> None:
    config = replace(SMOKE, strategy=("EWC",), powerprop=(), scenarios=("task-incremental",), strengths=(0.1, 1.0))
    config, arm = replace(config, seeds=2, tuning_seeds=2), Arm("EWC", 1.0)
    tried = [arm.job("heads", seed, Choice(each)).key for seed in range(2) for each in (0.1, 1.0)]
    assert [job.key for job in jobs(config, {})] == tried
    values = dict(zip(tried, (0.6, 0.5, 0.6, 0.8), strict=True))  # the first seed alone would take 0.1
    results = {key: result(value) for key, value in values.items()}
    assert chosen(config, arm, "heads", results) == Choice(1.0)
    assert chosen(replace(config, tuning_seeds=1), arm, "heads", results) == Choice(0.1)
    results[tried[3]] = {"diverged": "task 1: the loss is nan"}
    assert chosen(config, arm, "heads", results) == Choice(0.1)
    with pytest.raises(ValueError, match="tuning_seeds"):
        replace(config, tuning_seeds=0)


def test_rates_are_chosen_together_with_strengths() -> None:
    config = replace(SMOKE, strategy=("EWC", "Naive"), powerprop=(), strengths=(0.1, 1.0), rates=(1.0, 3.0), seeds=1)
    config = replace(config, scenarios=("task-incremental",))
    first = jobs(config, {})
    assert len(first) == 4 + 2
    results = {job.key: result(0.5) for job in first}
    results[Arm("EWC", 1.0).job("heads", 0, Choice(0.1, 3.0)).key] = result(0.9)
    results[Arm("Naive", 1.0).job("heads", 0, Choice(1.0, 3.0)).key] = result(0.9)
    assert chosen(config, Arm("EWC", 1.0), "heads", results) == Choice(0.1, 3.0)
    assert chosen(config, Arm("Naive", 1.0), "heads", results) == Choice(1.0, 3.0)
    assert {job.key for job in jobs(config, results)} == set(results)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_outputs_are_those_of_the_scenario(name: str) -> None:
    config = Config(name, epochs=1, seeds=1)
    classes, tasks = (100, 10) if name == "split-cifar100" else (10, PROTOCOLS[name].tasks)
    own = classes // tasks if PROTOCOLS[name].stream == "split" else classes
    for kind in set(PROTOCOLS[name].outputs.values()):
        model = build(config, "Naive", kind, classes, 0)
        x = torch.zeros(1, *((3, 32, 32) if name == "split-cifar100" else (1, 28, 28)))
        found = model(x, tasks - 1) if kind == "heads" else model(x)
        assert found.shape == (1, own * tasks if kind == "stream" else own)


def test_every_method_has_the_same_number_of_steps() -> None:
    for name in ("PackNet", "EfficientPackNet"):
        settings = OF_THE_STREAM[name](PLAN)
        assert settings["steps"] + settings["retrain_steps"] == PLAN.steps
    plan = plan_of(Config("split-mnist", epochs=4, seeds=1, images=2_000, validation=1_000), load("mnist"))
    assert plan.examples == (len(load("mnist").train_x) - 1_000) // 5
    assert plan.steps == round(4 * plan.examples / 128)


def test_published_settings_are_taken_and_economy_saves() -> None:
    gem = arguments("split-mnist", "GEM", "class-incremental", PLAN, economy=False)
    assert gem["margin"] == 0.5
    assert "rehearsed" not in gem
    assert arguments("split-mnist", "GEM", "class-incremental", PLAN, economy=True)["rehearsed"] == 128
    assert (
        not {"reference", "lr", "optimizer"} & arguments("split-mnist", "HAT", "task-incremental", PLAN, False).keys()
    )


def test_generators_have_their_published_steps_or_those_asked_for() -> None:
    def steps(name: str, scenario: Scenario, asked: int | None) -> int:
        return steps_of("split-mnist", name, scenario, 350, asked)

    assert [steps(name, "task-incremental", None) for name in ("DGR", "LwF", "EWC")] == [2_000, 2_000, 350]
    assert [steps(name, "class-incremental", 1_000) for name in ("RtF", "DGR", "LwF")] == [1_000, 750, 350]
    assert [steps("DGR", "class-incremental", 0), steps("DGR", "task-incremental", 1_000)] == [350, 350]


def test_images_are_normalised_but_for_methods_of_pixels() -> None:
    images = load("mnist")
    for name, centred in (("GEM", True), ("DGR", False)):
        x = torch.cat([task.train().x for task in make_stream(replace(SMOKE, tasks=0, validation=1), images, name, 0)])
        assert (abs(float(x.mean())) < 0.01 and abs(float(x.std()) - 1) < 0.01) == centred
        assert (float(x.min()) == 0 and float(x.max()) == 1) != centred


def test_methods_that_need_the_task_have_one_column() -> None:
    config = replace(SMOKE, strategy=("HAT", "Naive"))
    assert [(arm.name, kind) for arm, kind in trainings(config)] == [
        ("HAT", "heads"),
        ("Naive", "heads"),
        ("Naive", "shared"),
        ("Naive", "stream"),
    ]
    assert {"HAT"} == TASK_GIVEN_ONLY


def test_every_row_can_be_drawn_and_every_published_value_is_of_a_method() -> None:
    for arm in arms(Config("split-mnist", epochs=1, seeds=1, powerprop=tuple(STRATEGIES))):
        method_look(arm.label)
    for values in (*PUBLISHED.values(), *PRINTED.values()):
        assert {name.removeprefix("Powerprop + ") for name in values} <= set(STRATEGIES)


def test_the_papers_domain_incremental_values_stand_in_the_right_row(tmp_path: Path) -> None:
    config = replace(SMOKE, strategy=("GEM",), seeds=2)
    keys = [job.key for job in jobs(config, {})]
    measured = measure_all(config, {key: result(0.92) for key in keys})
    found = {c.scenario: c for c in comparisons(config, measured)}
    assert str(found["domain-incremental"].printed) == "96.16 ± 0.35"
    assert found["class-incremental"].printed is None
    assert str(found["class-incremental"].published) == "92.20 ± 0.12"
    assert found["class-incremental"].away == pytest.approx((92 - 92.2) / 0.12)
    (near,) = [c.away for c in found.values() if c.away is not None and abs(c.away) <= 2]
    head = headline(list(found.values()))
    assert head is not None
    assert (near, head.ours) == (found["class-incremental"].away, "1 of 3")


def test_a_report_with_empty_columns_and_runs_that_diverged(tmp_path: Path) -> None:
    (tmp_path / "versions.json").write_text("{}")
    saved = {"experiment": "split-mnist-strategies", "preset": "cpu", "config": {}}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    config = replace(SMOKE, strategy=("HAT", "SI", "EfficientPackNet"), powerprop=(), seeds=1)
    results = {job.key: result(0.5, together=0.9) for job in jobs(config, {}) if not job.key.startswith("SI")}
    results |= {
        job.key: {"diverged": "task 1: the loss is nan"} for job in jobs(config, {}) if job.key.startswith("SI")
    }
    story = Story("Title", "Section 5.3", "Intro.")
    page = findings(config, results, tmp_path, story)
    write_page(page.page, tmp_path)
    html = (tmp_path / "report.html").read_text()
    assert "SI, class-incremental, seed 0: task 1: the loss is nan" in html
    assert "class-incremental, 16 images" in html
    assert [row["diverged"] for row in page.summary["rows"]] == [0, 0, 3]
    hat = next(row for row in page.table.rows if row[0] == "HAT")
    assert hat[2:5] == [None, None, Mean.of([0.9])]


def test_bad_settings() -> None:
    for change, message in (
        ({"benchmark": "mnist"}, "benchmark must be one of split-mnist, permuted-mnist, split-cifar100, got 'mnist'"),
        ({"strategy": ()}, r"strategy must be some, each once, got \(\)"),
        ({"strategy": ("Ewc",)}, "strategy must be one of all, .*, got 'Ewc'"),
        ({"scenarios": ("stream",)}, "scenarios must be one of task-incremental, .*, got 'stream'"),
        ({"powerprop": ("Ewc",)}, "powerprop must be one of .*, got 'Ewc'"),
        ({"alpha": 1.0}, r"alpha must be above 1, the power of a method by itself, got 1\.0"),
        ({"strengths": (0.0, 1.0)}, r"strengths must be above 0, got \(0\.0, 1\.0\)"),
        ({"epochs": 0.0}, r"epochs must be above 0, got 0\.0"),
        ({"economy": False, "generator_steps": 9}, "generator_steps are the published ones without economy, got 9"),
        ({"tasks": 6}, "tasks must be at most the 5 of split-mnist, got 6"),
        ({"validation": 0}, "validation must be at least 1, got 0"),
        ({"images": 200}, "validation must be below the 200 images, got 200"),
        ({"benchmark": "split-cifar100", "width": 16}, "width is of fully connected networks, .* got 16"),
        ({"benchmark": "split-cifar100", "width": 0, "strategy": ("DGR",)}, "strategy on split-cifar100 .*, got 'DGR'"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(SMOKE, **change)  # type: ignore[arg-type]
    only = {"benchmark": "split-cifar100", "width": 0, "scenarios": ("domain-incremental",)}
    with pytest.raises(
        ValueError, match="scenarios of split-cifar100 are task-incremental, class-incremental, got domain"
    ):
        replace(SMOKE, **only)  # type: ignore[arg-type]


def test_away_is_in_published_deviations() -> None:
    here = Mean.of([0.9, 0.92])
    value = Comparison("EWC", "task-incremental", here, Value(90.0, 0.5, "somebody"), None)
    assert value.away == pytest.approx(2.0)
    assert Comparison("EWC", "task-incremental", here, None, None).away is None


def test_the_note_speaks_of_methods_in_the_table_alone() -> None:
    config = EXPERIMENTS["permuted-mnist-strategies"].presets["cpu"]
    note = run_note(replace(config, images=25_000))
    assert "of the last 25,000 training images, the first 2,000 test images" in note
    assert not any(name in note for name in ("RtF", "GEM", "PackNet", "pixels"))
    note = run_note(EXPERIMENTS["split-mnist-strategies"].presets["cpu"])
    assert "GEM with rehearsed 128" in note
    assert "DGR with 1,500 steps per task in the class-incremental scenario; RtF with 2,000" in note
    assert "A third of the steps of PackNet and EfficientPackNet are retraining" in note
    assert "rounded to bfloat16" in note
