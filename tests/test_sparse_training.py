"""The experiments `sparse-training…`: the choice of rates, the methods, the table at smoke scale."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import powerprop as pp
import runs
import standin
from powerprop_paper import data, experiments, models
from powerprop_paper.experiments import sparse
from powerprop_paper.experiments.sparse import (
    CIFAR,
    EXPERIMENTS,
    MNIST,
    Config,
    accuracy_figure,
    choose,
    duels,
    during_training,
    finalists,
    layer_rules,
    load_splits,
    make_optimizer,
    measure,
    prune_at_once,
    rate,
    stats,
)
from powerprop_paper.run import Row, Rows, Run
from powerprop_paper.sparse_methods import METHODS, asked, parse
from powerprop_paper.sparse_tables import cost_figure, exactness, is_exact, job

CONFIG = replace(MNIST["smoke"], methods=("dense", "rigl"), lrs=(0.1, 0.2, 0.4), cycles=(3,))


def trained(settings: dict[str, Any], validation: float) -> Row:
    """The row of a training that came to this accuracy; it diverged at 0."""
    counts = {"kept": {"fc1.weight": 10}, "asked": 10, "sparsity": 0.9, "inference_flops": 0.1, "training_flops": 0.2}
    result = {"test": validation, "validation": validation, **counts} if validation else {"diverged": "nan"}
    return Row({**settings, **result}, Path("nowhere"))


def seeds(method: str, target: str, *values: float, lr: float = 0.1) -> Rows:
    return Rows(trained(job(method, target, lr, seed), value) for seed, value in enumerate(values))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_smoke(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run has the sparsity asked to the weight; the page names every method, summary.json has the numbers."""
    monkeypatch.setattr(data, "load", standin.load)
    config = EXPERIMENTS[name].presets["smoke"]
    summary = runs.run_smoke(EXPERIMENTS[name], tmp_path)
    html = (tmp_path / "report.html").read_text()
    assert all(METHODS[method].label in html for method in config.methods)
    found = [json.loads(path.read_text()) for path in tmp_path.glob("jobs/**/row.json")]
    assert all(is_exact(each["result"]) for each in found)
    dense = [each["result"]["test"] for each in found if each["settings"]["method"] == "dense"]
    first, *_ = runs.table(summary, "Test accuracy by method and sparsity")
    assert first["dense"]["mean"] == pytest.approx(sum(dense) / len(dense))
    exact = runs.table(summary, "Exact counts")
    assert [row["runs"] == row["exact"] > 0 for row in exact] == [True] * len(config.sparsities)
    assert {f"{each}.svg" for each in ("sparsity", "cost", "training-90")} <= {
        path.name for path in (tmp_path / "figures").iterdir()
    }


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the middle of the second training: the same bytes in every row as without."""
    monkeypatch.setattr(data, "load", standin.load)
    config = replace(
        MNIST["smoke"], methods=("rigl", "pp-topkast-50"), sparsities=("uniform 0.9",), seeds=1, steps=8, extended=(),
        checkpoint_every=2,
    )  # fmt: skip

    def rows(out: Path) -> dict[str, bytes]:
        with Run(EXPERIMENTS["sparse-training"], "smoke", config, out, workers=1, console=Console(quiet=True)) as run:
            sparse.main(config, run)
        return {str(path.relative_to(out)): path.read_bytes() for path in out.glob("jobs/**/row.json")}

    fit, times = experiments.fit, iter(range(100))

    def killed(*arguments: Any, **options: Any) -> None:
        if next(times) == 1:
            fit(*arguments, **{**options, "progress": stop})
        fit(*arguments, **options)

    def stop(step: int, values: dict[str, float]) -> None:
        if step >= 4:
            raise KeyboardInterrupt

    whole = rows(tmp_path / "whole")
    monkeypatch.setattr(experiments, "fit", killed)
    with pytest.raises(KeyboardInterrupt):
        rows(tmp_path / "killed")
    monkeypatch.setattr(experiments, "fit", fit)
    assert len(list((tmp_path / "killed").glob("jobs/**/row.json"))) == 1
    assert len(list((tmp_path / "killed").glob("jobs/**/checkpoint.pt"))) == 2
    assert rows(tmp_path / "killed") == whole


class Plan:
    """Stands in for a run: trains nothing, notes what is asked for, and answers with given accuracies."""

    def __init__(self, scores: dict[tuple[str, float], list[float]]) -> None:
        self.scores, self.asked = scores, list[list[str]]()

    def prepare(self, find: Any) -> None:
        pass

    def map(self, train: Any, settings: Any) -> Rows:
        self.asked.append([f"{s['method']} {s['target']} x{s['cycles']} {s['lr']} {s['seed']}" for s in settings])
        return Rows(trained(s, self.scores[s["method"], s["lr"]][s["seed"]]) for s in settings)


def test_the_rate_of_a_method_is_chosen_in_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """dense: 0.2 is best at first; 0.4 comes near enough for a second round and wins it. rigl: 0.4 diverges."""
    scores = {("dense", 0.1): [0.95], ("dense", 0.2): [0.98, 0.96], ("dense", 0.4): [0.978, 0.97]}
    scores |= {("rigl", 0.1): [0.97, 0.97], ("rigl", 0.2): [0.96], ("rigl", 0.4): [0.0]}
    monkeypatch.setattr(sparse, "during_training", lambda cfg, rows, target: [])
    plan: Any = Plan(scores)
    page = sparse.main(CONFIG, plan)
    first, second, third = map(set, plan.asked)
    targets = {"dense": "uniform 0", "rigl": "uniform 0.9"}
    assert first == {f"{name} {target} x1 {lr} 0" for name, target in targets.items() for lr in CONFIG.lrs}
    assert second == {
        f"{name} {targets[name]} x1 {lr} {seed}"
        for name, lr in (("dense", 0.2), ("dense", 0.4), ("rigl", 0.1))
        for seed in (0, 1)
    }
    cells = [("dense", "uniform 0 x1 0.4"), *(("rigl", f"{t} 0.1") for t in ("uniform 0.9 x1", "erk 0.9 x1"))]
    cells.append(("rigl", "uniform 0.9 x3 0.1"))
    assert third == {f"{name} {cell} {seed}" for name, cell in cells for seed in (0, 1)}
    assert [table for s in page.sections for table in s.tables][-1].rows == [["Dense", 0.4], ["RigL", 0.1]]


def test_a_rate_near_the_best_gets_all_seeds_and_one_that_diverged_does_not() -> None:
    first = Rows(trained(job("rigl", "uniform 0.9", lr, 0), v) for lr, v in ((0.1, 0.95), (0.2, 0.952), (0.4, 0.0)))
    assert finalists(first) == [0.1, 0.2]
    final = seeds("rigl", "uniform 0.9", 0.95, 0.97) + seeds("rigl", "uniform 0.9", 0.99, 0.0, lr=0.2)
    assert choose(Rows(final)) == 0.1


def test_extended_training_of_the_dense_row_is_dense() -> None:
    config = replace(CONFIG, methods=("dense",), extended=("dense",), cycles=(2,), lrs=(0.1,), seeds=1)
    plan: Any = Plan({("dense", 0.1): [0.9]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "during_training", lambda cfg, rows, target: [])
        sparse.main(config, plan)
    assert set(plan.asked[-1]) == {"dense uniform 0 x1 0.1 0", "dense uniform 0 x2 0.1 0"}


@pytest.mark.parametrize(("config", "steps"), [(MNIST["cpu"], 25), (MNIST["paper"], 100)])
def test_random_growth_has_an_interval_of_its_own(config: Config, steps: int) -> None:
    """Shorter in a short training, the papers' 100 steps in a full one; where gradients choose it is always these."""
    for method, interval in {"set": steps, "pp-set": steps, "dsr": steps, "rigl": 100, "snfs": 100}.items():
        optimizer = make_optimizer(config, models.lenet_300_100(), method, "uniform 0.9", 0.1, 0, 1000)
        assert optimizer.sparsify.interval == interval, method


def test_what_a_method_is_made_with() -> None:
    config = replace(CONFIG, topkast_decay=0.002, topkast_every=7, alpha=1.5)
    optimizer = make_optimizer(config, models.lenet_300_100(), "pp-topkast-50", "uniform 0.9", 0.1, 0, 1000)
    method = optimizer.sparsify
    assert (method.decay, method.interval, method.backward_sparsity) == (0.002, 7, 0.5)
    assert {master.alpha for master in optimizer.masters.values()} == {1.5}
    plain = make_optimizer(config, models.lenet_300_100(), "topkast-50", "uniform 0.9", 0.1, 0, 1000)
    assert {master.alpha for master in plain.masters.values()} == {1.0}


def test_the_rate_rises_and_falls() -> None:
    assert [rate(done, 0.0) for done in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.5, 0.0])
    assert [rate(done, 0.5) for done in (0.0, 0.25, 0.5)] == pytest.approx([0.0, 0.5 * rate(0.25, 0.0), 0.5])


def test_pairs_are_compared_seed_by_seed() -> None:
    """0.5 - 0.4 and 0.9 - 0.6: the mean is 0.2, with their spread; a seed that diverged has no pair."""
    config = replace(CONFIG, methods=("rigl", "static"), seeds=3)
    rows = Rows(seeds("rigl", "uniform 0.9", 0.5, 0.9, 0.0) + seeds("static", "uniform 0.9", 0.4, 0.6, 0.8))
    rows += seeds("rigl", "erk 0.9", 0.0, 0.0, 0.5) + seeds("static", "erk 0.9", 0.5, 0.6, 0.0)
    [[name, uniform, erk]] = duels(config, rows).rows
    assert (name, erk) == ("RigL - Static", "diverged")
    assert (uniform.mean, uniform.std, uniform.n) == pytest.approx((0.2, 0.1 * 2**0.5, 2))


@pytest.mark.parametrize("methods", [("dense",), ("rigl",)])
def test_a_table_with_nothing_in_it(methods: tuple[str, ...]) -> None:
    """Nothing was trained, or all of it diverged: no figure, no best method."""
    config = replace(CONFIG, methods=methods, sparsities=("uniform 0.9",))
    for rows in (Rows(), seeds(methods[0], "uniform 0.9", 0.0, 0.0)):
        assert exactness(config, rows).tables[0].rows == [["90%", 0, 0, None, None, None, None]]
        assert stats(config, rows) == []
        assert accuracy_figure(config, rows) == []
        assert cost_figure(config, rows, config.methods, "Accuracy") == []
        assert during_training(config, rows, "uniform 0.9") == []


def test_a_run_that_misses_the_sparsity_is_counted() -> None:
    config = replace(CONFIG, methods=("rigl",), sparsities=("uniform 0.9",))
    rows = seeds("rigl", "uniform 0.9", 0.5, 0.6)
    rows[0]["asked"] = {"fc1.weight": 11}
    assert exactness(config, rows).tables[0].rows[0][1:3] == [2, 1]


def test_static_stands_alone_where_it_would_hide_the_others() -> None:
    config = replace(CONFIG, methods=("static", "rigl"), sparsities=("uniform 0.9",))
    for static, drawn in ((0.80, ["RigL"]), (0.88, ["Static", "RigL"])):
        rows = Rows(seeds("rigl", "uniform 0.9", 0.9, 0.9) + seeds("static", "uniform 0.9", static, static))
        [figure] = accuracy_figure(config, rows)
        assert [curve.label for curve in figure.data[0]] == drawn


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(data, "load", standin.load)
    return load_splits(MNIST["smoke"])


@pytest.mark.parametrize(
    ("method", "training"),
    [
        # LeNet-300-100: 235,200 + 30,000 + 1,000 weights; 10% kept, the last layer 20%: 26,720 of 266,200
        ("static", 26_720 / 266_200),
        ("topkast-0", (2 * 26_720 + 266_200) / 3 / 266_200),
        ("one-shot", 1.0),
    ],
)
def test_what_a_training_costs(method: str, training: float, splits: Any) -> None:
    config, model = MNIST["smoke"], models.lenet_300_100()
    optimizer = make_optimizer(config, model, method, "uniform 0.9", 0.1, 0, 10)
    masks = prune_at_once(config, model, "uniform 0.9", splits) if method == "one-shot" else optimizer.active
    found = measure(config, model, optimizer, masks, splits, method, "uniform 0.9")
    assert found["inference_flops"] == pytest.approx(26_720 / 266_200)
    assert found["training_flops"] == pytest.approx(training)


@pytest.mark.parametrize("distribution", ["uniform", "erk"])
@pytest.mark.parametrize("method", ["static", "snip", "snfs", "dsr"])
def test_exact_counts_where_layers_round_otherwise_than_their_sum(method: str, distribution: str) -> None:
    """The layers of this network add up to another number at 95% than all of its weights at once."""
    config, model, target = CIFAR["smoke"], models.fast_cifar(), f"{distribution} 0.95"
    optimizer = make_optimizer(config, model, method, target, 0.1, 0, 10)
    model(torch.rand(4, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    kept = {name: int(mask.count_nonzero()) for name, mask in optimizer.active.items()}
    expected = asked(optimizer.active, METHODS[method], target, layer_rules(config, distribution))
    assert (kept if isinstance(expected, dict) else sum(kept.values())) == expected


def test_first_and_last_layer() -> None:
    """Uniform: the first convolution dense, the last layer at most 80%; ERK: both pruned."""
    config = CIFAR["smoke"]
    uniform = make_optimizer(config, models.fast_cifar(), "static", "uniform 0.9", 0.1, 0, 10).active
    assert uniform["stem.weight"].all()
    assert uniform["fc.weight"].float().mean() == pytest.approx(0.2, abs=0.01)
    assert layer_rules(config, "erk") == {}


def test_targets() -> None:
    assert parse("erk 0.9") == ("erk", 0.9)
    for bad in ("erk", "global 0.9", "uniform 1.2", "uniform -1"):
        with pytest.raises(ValueError, match=f"a sparsity must look like 'uniform 0.95' or 'erk 0.9', got '{bad}'"):
            parse(bad)


def test_every_method_of_the_paper_can_be_made() -> None:
    for name, method in METHODS.items():
        made = method.make(0.9, "erk", 100, {}, seed=0)
        assert (made is None) == (method.kind in ("dense", "oneshot")), name
        assert made is None or isinstance(made, pp.sparsify.Method)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("lottery",)}, "method must be one of dense, .*, got 'lottery'"),
        ({"extended": ("lottery",)}, "method must be one of dense, .*, got 'lottery'"),
        ({"sparsities": ("0.9",)}, "a sparsity must look like 'uniform 0.95' or 'erk 0.9', got '0.9'"),
    ],
)
def test_bad_settings_are_repeated(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)
