"""Tables of continual-learning methods: every method at smoke scale, resumed runs, tuning, published values."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import runs
import standin
from powerprop.continual import SCENARIOS, STRATEGIES, Scenario
from powerprop_paper import data
from powerprop_paper.cli import main
from powerprop_paper.experiments.baselines.learners import build, make_learner, make_stream, plan_of
from powerprop_paper.experiments.baselines.protocol import (
    OF_THE_STREAM,
    PROTOCOLS,
    TASK_GIVEN_ONLY,
    Plan,
    arguments,
    outputs_of,
    steps_of,
    strength_of,
)
from powerprop_paper.experiments.baselines.published import PRINTED, PUBLISHED, Value
from powerprop_paper.experiments.baselines.published_settings import SETTINGS
from powerprop_paper.experiments.baselines.strategies import (
    EXPERIMENTS,
    SPLIT_MNIST,
    Choice,
    Comparison,
    Config,
    Method,
    Story,
    choices,
    choose,
    comparisons,
    headline,
    learn,
    make_page,
    measure,
    run_note,
    settings_of,
    trainings,
    twins_headline,
)
from powerprop_paper.models import mlp, replay_vae
from powerprop_paper.report import Mean, method_look
from powerprop_paper.run import Row, Rows

SMOKE = SPLIT_MNIST["smoke"]
CPU = torch.device("cpu")
PLAN = Plan(tasks=5, steps=90, epochs=4, examples=1000, width=400)


def load(name: str) -> data.Images:
    """The stand-in images, all of them; CIFAR-100 is made up of ten patterns in a hundred classes."""
    return standin.load(name) if name == "mnist" else runs.digits_or_hundred(name)


@pytest.fixture(autouse=True)
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", load)


@pytest.mark.filterwarnings("ignore:.*for the tasks to come")  # a network of this size is soon full
@pytest.mark.filterwarnings("ignore:.*(all gates of|fell to|no sub-network)")  # after so few steps
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_smoke(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]
    cfg = experiment.presets["smoke"]
    summary = runs.run_smoke(experiment, tmp_path)
    methods = list(dict.fromkeys(method for method, _ in trainings(cfg)))
    rows = runs.table(summary, cfg.benchmark)
    assert [row["0"] for row in rows] == [method.label for method in methods]
    for method, row in zip(methods, rows, strict=True):
        own = [s for kinds in outputs_of(cfg.benchmark, method.strategy, cfg.columns).values() for s in kinds]
        for scenario in cfg.columns:
            assert (row[scenario] is not None) == (scenario in own)
            assert row[scenario] is None or 0 <= row[scenario]["mean"] <= 1
        assert row["kept (MB)"] >= 0
    assert not summary["jobs"]["diverged"]
    html = (tmp_path / "report.html").read_text()
    assert all(scenario in html for scenario in cfg.columns)
    assert ("half of it" in html) == (cfg.benchmark == "split-cifar100")


def test_smoke_has_every_method() -> None:
    assert set(SMOKE.names) == set(STRATEGIES)


def test_some_methods_from_the_command_line(tmp_path: Path) -> None:
    command = ["run", "split-mnist-strategies", "--strategies", "Naive", "ER", "--preset", "smoke", "--workers", "1"]
    for name in ("run", "again"):
        assert main([*command, "--out", str(tmp_path / name)]) == 0
    first, second = ((tmp_path / name / "summary.json").read_bytes() for name in ("run", "again"))
    assert first == second, "no number depends on the clock"
    html = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "powerprop run split-mnist-strategies --preset smoke --strategies Naive ER" in html


def test_a_method_that_is_not_known_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "split-mnist-strategies", "--strategies", "EWCC"]) == 2
    said = capsys.readouterr().err
    assert "strategies on split-mnist must be all, or some of" in said
    assert "'EWCC'" in said


SMALL = replace(SMOKE, tasks=3)


@pytest.mark.parametrize("name", ["Naive", "ER", "SI", "EfficientPackNet"])
@pytest.mark.filterwarnings("ignore:.*for the tasks to come")
def test_stopped_after_any_task_and_resumed(name: str, tmp_path: Path) -> None:
    settings = {**settings_of(Method(name, 1.0), "stream", Choice()), "seed": 0}
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    whole = learn(SMALL, tmp_path / "whole", lambda *_: None, **settings)

    def stop(at: int, done: float, numbers: dict[str, float]) -> None:
        if numbers["task"] == at:
            raise KeyboardInterrupt

    for at in (2, 3):
        with pytest.raises(KeyboardInterrupt):
            learn(SMALL, tmp_path / "parts", partial(stop, at), **settings)
    assert learn(SMALL, tmp_path / "parts", lambda *_: None, **settings) == whole
    first, second = ((tmp_path / folder / "metrics.jsonl").read_bytes() for folder in ("whole", "parts"))
    assert first == second


def fake_rows(cfg: Config, folder: Path, accuracy: float, seeds: int = 1, **changes: Any) -> Rows:
    """What the jobs of all trainings found that learned two tasks, as published."""
    values = [[accuracy], [accuracy, accuracy]]
    found = {
        "accuracies": dict.fromkeys(SCENARIOS, values), "validation": dict.fromkeys(SCENARIOS, accuracy),
        "memory_bytes": 2_000_000, "group_accuracy": None, "note": "", **changes,
    }  # fmt: skip
    every = [settings_of(*pair, Choice()) for pair in trainings(cfg)]
    return Rows(Row({**settings, "seed": seed, **found}, folder) for seed in range(seeds) for settings in every)


def tried(
    method: Method, values: dict[Choice, float], seeds: int = 1, diverged: Choice | None = None, outputs: str = "heads"
) -> Rows:
    """Rows of tuning."""
    rows = [
        {**settings_of(method, outputs, choice), "seed": seed, "validation": {"task-incremental": value}}
        for seed in range(seeds)
        for choice, value in values.items()
    ]
    found = runs.rows_of(rows)
    for row in found:
        if diverged and (row["strength"], row["rate"]) == diverged and row["seed"] == seeds - 1:
            row["diverged"] = "task 1: the loss is nan"
    return found


def test_strengths_are_chosen_on_validation_data_for_each_power_by_itself() -> None:
    cfg = replace(SMOKE, strategies=("EWC",), powerprop=("EWC",), scenarios=("task-incremental",), strengths=(0.1, 1.0))
    plain, power = Method("EWC", 1.0), Method("EWC", cfg.alpha)
    assert trainings(cfg) == [(plain, "heads"), (power, "heads")]
    rows = Rows([
        *tried(plain, {Choice(0.1): 0.5, Choice(1.0): 0.9}), *tried(power, {Choice(0.1): 0.9, Choice(1.0): 0.5})
    ])  # fmt: skip
    assert [choose(cfg, method, "heads", rows) for method in (plain, power)] == [Choice(1.0), Choice(0.1)]


def test_choices_are_made_by_all_tuning_seeds() -> None:
    cfg, ewc = replace(SMOKE, strengths=(0.1, 1.0), tuning_seeds=2), Method("EWC", 1.0)
    first = tried(ewc, {Choice(0.1): 0.6, Choice(1.0): 0.5})  # which alone would take 0.1
    second = tried(ewc, {Choice(0.1): 0.6, Choice(1.0): 0.8})
    assert choose(cfg, ewc, "heads", first) == Choice(0.1)
    assert choose(cfg, ewc, "heads", Rows([*first, *second])) == Choice(1.0)
    lost = tried(ewc, {Choice(0.1): 0.6, Choice(1.0): 0.8}, seeds=2, diverged=Choice(1.0))
    assert choose(cfg, ewc, "heads", lost) == Choice(0.1)
    with pytest.raises(ValueError, match="tuning_seeds"):
        replace(cfg, tuning_seeds=0)


def test_rates_are_chosen_together_with_strengths() -> None:
    cfg = replace(SMOKE, strengths=(0.1, 1.0), rates=(1.0, 3.0))
    ewc, naive = Method("EWC", 1.0), Method("Naive", 1.0)
    assert choices(cfg, ewc) == [Choice(0.1, 1.0), Choice(0.1, 3.0), Choice(1.0, 1.0), Choice(1.0, 3.0)]
    values = dict.fromkeys(choices(cfg, ewc), 0.5) | {Choice(0.1, 3.0): 0.9}
    assert choose(cfg, ewc, "heads", tried(ewc, values)) == Choice(0.1, 3.0)
    values = {Choice(1.0, 1.0): 0.5, Choice(1.0, 3.0): 0.9}
    assert choose(cfg, naive, "heads", tried(naive, values)) == Choice(1.0, 3.0)


def test_si_may_have_strengths_of_its_own() -> None:
    cfg = replace(SMOKE, strengths=(0.5, 1.0), si_strengths=(32.0,), rates=(1.0,))
    si, ewc = Method("SI", 1.0), Method("EWC", 1.0)
    assert choices(cfg, si) == [Choice(32.0)]
    assert choose(cfg, si, "heads", Rows()) == Choice(32.0)
    assert choices(cfg, ewc) == [Choice(0.5), Choice(1.0)]
    assert choices(replace(cfg, si_strengths=()), si) == choices(cfg, ewc)
    assert choices(cfg, Method("Naive", 1.0)) == [Choice()]
    with pytest.raises(ValueError, match=r"si_strengths must be above 0, got 0\.0"):
        replace(cfg, si_strengths=(0.0,))
    with pytest.raises(ValueError, match=r"si_strengths must be none or some, each once, got \(1\.0, 1\.0\)"):
        replace(cfg, si_strengths=(1.0, 1.0))


def test_a_strength_is_a_factor_of_the_published_one() -> None:
    published = SETTINGS["EWC"]["split-mnist/task-incremental"]["strength"]
    for factor in (1.0, 0.1):
        learner: Any = make_learner(SMOKE, load("mnist"), "EWC", 1.0, "heads", factor, 1.0, 0, CPU)
        assert learner.strength == pytest.approx(factor * published)


@pytest.mark.parametrize(("name", "default"), [("EWC", 100.0), ("Laplace", 100.0), ("MAS", 1.0)])
def test_without_a_published_strength_it_is_the_default(name: str, default: float) -> None:
    assert strength_of(name, {}) == default
    assert strength_of(name, {"strength": 7}) == 7.0


def test_the_rate_is_a_factor_of_the_protocol_s() -> None:
    for alpha, rate in ((1.0, 1.0), (1.0, 3.0), (1.5, 3.0)):
        learner = make_learner(SMOKE, load("mnist"), "Naive", alpha, "heads", 1.0, rate, 0, CPU)
        assert learner.optimizer.param_groups[0]["lr"] == rate * 1e-3
        assert learner.optimizer.rate == "matched"


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
    cfg = replace(SMOKE, strategies=("HAT", "Naive"))
    assert [(method.strategy, kind) for method, kind in trainings(cfg)] == [
        ("HAT", "heads"),
        ("Naive", "heads"),
        ("Naive", "shared"),
        ("Naive", "stream"),
    ]
    assert {"HAT"} == TASK_GIVEN_ONLY


def test_every_row_can_be_drawn_and_every_published_value_is_of_a_method() -> None:
    for method, _ in trainings(Config("split-mnist", epochs=1, seeds=1, powerprop=tuple(STRATEGIES))):
        method_look(method.label)
    for values in (*PUBLISHED.values(), *PRINTED.values()):
        assert {name.removeprefix("Powerprop + ") for name in values} <= set(STRATEGIES)


def test_the_papers_domain_incremental_values_stand_in_the_right_row(tmp_path: Path) -> None:
    cfg = replace(SMOKE, strategies=("GEM",), seeds=2)
    measured = measure(cfg, fake_rows(cfg, tmp_path, 0.92, seeds=2), {pair: Choice() for pair in trainings(cfg)})
    found = {c.scenario: c for c in comparisons(cfg, measured)}
    assert str(found["domain-incremental"].printed) == "96.16 ± 0.35"
    assert found["class-incremental"].printed is None
    assert str(found["class-incremental"].published) == "92.20 ± 0.12"
    assert found["class-incremental"].away == pytest.approx((92 - 92.2) / 0.12)
    (near,) = [c.away for c in found.values() if c.away is not None and abs(c.away) <= 2]
    head = headline(list(found.values()))
    assert head is not None
    assert (near, head.ours) == (found["class-incremental"].away, "1 of 3")


def test_what_powerprop_adds(tmp_path: Path) -> None:
    cfg = replace(SMOKE, strategies=("EWC", "SI"), powerprop=("EWC",), scenarios=("task-incremental",))
    rows = fake_rows(cfg, tmp_path, 0.5)
    for row in rows.where(alpha=cfg.alpha):
        row["accuracies"] = {"task-incremental": [[0.6], [0.6, 0.7]]}
    head = twins_headline(cfg, measure(cfg, rows, {pair: Choice() for pair in trainings(cfg)}), "")
    assert head is not None
    assert head.ours == "EWC +15.00 points"


def test_a_page_with_empty_columns_and_runs_that_diverged(tmp_path: Path) -> None:
    cfg = replace(SMOKE, strategies=("HAT", "SI", "EfficientPackNet"), powerprop=(), seeds=1)
    rows = fake_rows(cfg, tmp_path, 0.5, group_accuracy=0.9)
    for row in rows.where(strategy="SI"):
        row["diverged"] = "task 1: the loss is nan"
    page = make_page(cfg, Story("Title", "Section 5.3", "Intro."), rows, {pair: Choice() for pair in trainings(cfg)})
    assert "SI, class-incremental, seed 0: task 1: the loss is nan" in page.sections[-1].text
    assert len(page.sections[-1].text.split("\n\n")) == 3
    (table,) = page.sections[0].tables
    found = {row[0]: row[1:] for row in table.rows}
    assert found["HAT"] == [Mean.of([0.5]), None, None, Mean.of([0.9]), 2.0]
    assert found["SI"] == [None] * 5
    assert "class-incremental, 16 images" in table.to_markdown()


def test_bad_settings() -> None:
    for change, message in (
        ({"strategies": ("Ewc",)}, "strategies on split-mnist must be all, or some of .*, got 'Ewc'"),
        ({"powerprop": ("Ewc",)}, "powerprop must be some of .*, got 'Ewc'"),
        ({"economy": False, "generator_steps": 9}, "generator_steps are the published ones without economy, got 9"),
        ({"tasks": 6}, "tasks must be at most the 5 of split-mnist, got 6"),
        ({"images": 200}, "validation must be below the 200 images, got 200"),
        ({"benchmark": "split-cifar100", "width": 16}, "width is of fully connected networks, .* got 16"),
        (
            {"benchmark": "split-cifar100", "width": 0, "strategies": ("DGR",)},
            "strategies on split-cifar100 .*, got 'DGR'",
        ),
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
    cfg = EXPERIMENTS["permuted-mnist-strategies"].presets["cpu"]
    note = run_note(replace(cfg, images=25_000))
    assert "of the last 25,000 training images, the first 2,000 test images" in note
    assert not any(name in note for name in ("RtF", "GEM", "PackNet", "pixels"))
    note = run_note(EXPERIMENTS["split-mnist-strategies"].presets["cpu"])
    assert "GEM with rehearsed 128" in note
    assert "DGR with 1,500 steps per task in the class-incremental scenario; RtF with 2,000" in note
    assert "A third of the steps of PackNet and EfficientPackNet are retraining" in note
    assert "rounded to bfloat16" in note


@pytest.mark.parametrize("name", SETTINGS)
def test_published_settings_make_the_learner(name: str) -> None:
    kind: Any = STRATEGIES[name]
    for settings in SETTINGS[name].values():
        arguments = {key: value for key, value in settings.items() if key != "reference"}
        assert len(settings["reference"]) > 10
        needed = {"VCL": {"examples": 100}}.get(name, {})
        sizes = [12, 16, 16]
        model = replay_vae(sizes, 3) if name == "RtF" else mlp([*sizes, 3], generator=torch.Generator().manual_seed(0))
        kind(model, lambda p: torch.optim.SGD(p, lr=0.1), **needed, **arguments)
