"""One-shot pruning: the experiments at smoke scale, and their parts worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import runs
import standin
from powerprop import Powerprop
from powerprop_paper import data, experiments, pruning
from powerprop_paper.experiments import oneshot
from powerprop_paper.experiments.oneshot import (
    CIFAR,
    EXPERIMENTS,
    MNIST,
    OPTIMISERS,
    Candidate,
    Config,
    Method,
    MethodRows,
)
from powerprop_paper.run import Row, Rows, RunError
from powerprop_paper.train import NonFiniteError, triangle

SMALL = Config(alphas=(1.0, 2.0), lrs=(0.1, 0.5), seeds=2, steps=5, points=3, band=(0.05, 0.2))
PLAIN, SQUARE, LASSO = Method(1.0, "targets"), Method(2.0, "targets"), Method(1.0, "lasso")
WEIGHTS = ("sign_changes", "sign_changes_of_survivors", "near_zero_before", "near_zero_after")


def row(method: Method, candidate: Candidate, seed: int, validation: list[float] | None, test: Any = None) -> Row:
    """What a job found; without validation accuracies it diverged."""
    settings = {**method._asdict(), **candidate._asdict(), "seed": seed}
    if validation is None:
        return Row({**settings, "diverged": "the loss is nan"}, Path(f"{method}{candidate}{seed}"))
    curves = {"kept": SMALL.grid, "validation": validation, "test": test or validation, "overlap": validation}
    return Row({**settings, **curves, **dict.fromkeys(WEIGHTS, 0.1)}, Path(f"{method}{candidate}{seed}"))


def rate(lr: float) -> Candidate:
    return Candidate(lr, 0.0)


@pytest.fixture(autouse=True)
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", standin.load)


# --- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_smoke(name: str, tmp_path: Path) -> None:
    config = EXPERIMENTS[name].presets["smoke"]
    summary = runs.run_smoke(EXPERIMENTS[name], tmp_path)
    (table,) = summary["sections"][0]["tables"]
    assert [each[0] for each in table["rows"]] == [
        MethodRows(config, method, rate(0.1), Rows()).label for method in config.methods
    ]
    dense = [column["name"] for column in table["columns"]].index("dense")
    assert all(0 <= each[dense]["mean"] <= 1 and each[dense]["n"] == config.seeds for each in table["rows"])
    assert isinstance(summary["numbers"]["gain"], float)
    folders = list(tmp_path.glob("jobs/train/*"))
    assert summary["jobs"] == {"done": len(folders), "diverged": {}, "failed": {}}
    curves = summary["sections"][0]["figures"][0]["series"][0]
    assert [len(curve["mean"]) for curve in curves] == [config.points] * len(config.methods)
    for folder in folders:
        names = {path.name for path in folder.iterdir()}
        assert names == {"row.json", "metrics.jsonl", "checkpoint.pt", "weights.safetensors"}


def test_presets() -> None:
    for presets in (MNIST, OPTIMISERS, CIFAR):
        assert presets["paper"].seeds == 5
        assert 1.0 in presets["cpu"].alphas
    grid = MNIST["cpu"].grid
    assert len(grid) == 20
    assert (grid[0], grid[-1]) == (pytest.approx(0.01), 1.0)
    assert len(MNIST["cpu"].band_points) == 6


def test_divergence_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = experiments.fit

    def diverging(model: nn.Module, optimizer: Any, *arguments: Any, **options: Any) -> None:
        if isinstance(optimizer, Powerprop) and optimizer.alpha == 2.0:
            raise NonFiniteError("the loss is nan at step 3")
        real(model, optimizer, *arguments, **options)

    monkeypatch.setattr(experiments, "fit", diverging)
    config = replace(MNIST["smoke"], lrs=(0.5,), seeds=1)
    summary = runs.run_smoke(EXPERIMENTS["mnist-oneshot"], tmp_path, config)
    assert list(summary["jobs"]["diverged"].values()) == ["the loss is nan at step 3"]
    assert [each[0] for each in summary["sections"][0]["tables"][0]["rows"]] == ["baseline (α = 1)"]


# --- candidates, and the choice among them --------------------------------------------------------------------------


def test_candidates_at_which_a_weight_of_some_size_learns_and_decays_equally_fast() -> None:
    config = replace(SMALL, lrs=(0.1, 0.1), decays=(5e-4, 1e-3), magnitude=0.1)
    assert config.candidates(SQUARE) == ((0.1, 5e-4), (0.1, 1e-3))  # virtual targets have matched rates
    direct = replace(config, parametrization=("direct",))
    assert direct.candidates(PLAIN) == ((0.1, 5e-4), (0.1, 1e-3))
    assert direct.candidates(Method(2.0, "direct")) == ((0.25, 1e-4), (0.25, 2e-4))
    phi = 0.1**0.5  # decays by lr·λ·φ, and w = φ² by 2φ times that
    assert 0.25 * 1e-4 * phi * 2 * phi == pytest.approx(0.1 * 5e-4 * 0.1)
    assert direct.methods == [PLAIN, Method(2.0, "direct")]


def test_jobs_are_methods_with_candidates_from_every_seed() -> None:
    config = replace(SMALL, lrs=(0.5,), parametrization=("targets", "direct"), lassos=(1e-4,))
    assert config.methods == [PLAIN, SQUARE, Method(2.0, "direct"), LASSO]
    assert config.candidates(LASSO) == ((0.5, 1e-4),)
    found = oneshot.jobs([(PLAIN, rate(0.5)), (LASSO, Candidate(0.5, 1e-4))], 2)
    assert [tuple(each.values()) for each in found] == [
        (1.0, "targets", 0.5, 0.0, 0), (1.0, "targets", 0.5, 0.0, 1), (1.0, "lasso", 0.5, 1e-4, 0),
        (1.0, "lasso", 0.5, 1e-4, 1),
    ]  # fmt: skip


def test_a_rate_that_spoils_the_dense_network_is_passed_over() -> None:
    tuning = Rows([row(PLAIN, rate(0.1), 0, [0.1, 0.5, 0.98]), row(PLAIN, rate(0.5), 0, [0.6, 0.9, 0.974])])
    assert oneshot.average(oneshot.rows_of(tuning, PLAIN, rate(0.5))) == pytest.approx((0.6 + 0.9 + 0.974) / 3)
    assert oneshot.choose(SMALL, PLAIN, tuning).lr == 0.1
    assert oneshot.choose(replace(SMALL, tolerance=0.007), PLAIN, tuning).lr == 0.5


def test_all_methods_are_held_to_the_best_dense_network_of_the_table() -> None:
    near, far = row(SQUARE, rate(0.1), 0, [0.1, 0.5, 0.978]), row(SQUARE, rate(0.5), 0, [0.6, 0.9, 0.974])
    plain = row(PLAIN, rate(0.1), 0, [0.1, 0.5, 0.98])
    assert oneshot.choose(SMALL, SQUARE, Rows([near, far])).lr == 0.5, "within half a point of its own best"
    assert oneshot.choose(SMALL, SQUARE, Rows([plain, near, far])).lr == 0.1, "not of the table's"
    worse = row(PLAIN, rate(0.1), 0, [0.1, 0.5, 0.999])
    assert oneshot.choose(SMALL, SQUARE, Rows([worse, near, far])).lr == 0.1, "none is near: its own best dense one"


def test_diverged_candidates_are_not_chosen() -> None:
    tuning = Rows([row(PLAIN, rate(0.1), 0, None), row(PLAIN, rate(0.5), 0, [0.1, 0.1, 0.1])])
    assert oneshot.choose(SMALL, PLAIN, tuning).lr == 0.5
    with pytest.raises(RunError, match=r"for alpha = 1 diverged with everything .*: lr 0\.1 with decay 0, lr 0\.5"):
        oneshot.choose(SMALL, PLAIN, Rows([row(PLAIN, rate(lr), 0, None) for lr in (0.1, 0.5)]))


def test_a_row_of_ordinary_weights_under_a_penalty() -> None:
    config = replace(SMALL, lrs=(0.1,), lassos=(1e-4, 1e-3), seeds=1)
    weak, strong = config.candidates(LASSO)
    tuning = Rows([row(LASSO, weak, 0, [0.1, 0.2, 0.9]), row(LASSO, strong, 0, [0.4, 0.5, 0.9])])
    assert oneshot.choose(config, LASSO, tuning) == strong
    penalised = MethodRows(config, LASSO, strong, Rows(tuning[1:]))
    assert (penalised.label, penalised.plain) == ("α = 1 with an L1 penalty", True)
    base = MethodRows(config, PLAIN, rate(0.1), Rows([row(PLAIN, rate(0.1), 0, [0.1, 0.2, 0.9])]))
    best = MethodRows(config, SQUARE, rate(0.1), Rows([row(SQUARE, rate(0.1), 0, [0.1, 0.2, 0.9])]))
    _, head, _ = oneshot.verdict_of([base, penalised, best], "")
    assert head is not None
    assert head.what.startswith("α = 2 against baseline (α = 1)")
    assert head.ours.endswith("(α = 1 with an L1 penalty: +30.0)")


def test_measured_methods_leave_out_diverged_seeds() -> None:
    config = replace(SMALL, lrs=(0.5,))
    first = [row(PLAIN, rate(0.5), 0, [0.1, 0.2, 0.9], [0.1, 0.3, 0.9]), row(PLAIN, rate(0.5), 1, None)]
    second = [row(SQUARE, rate(0.5), 0, [0.2, 0.6, 0.9]), row(SQUARE, rate(0.5), 1, [0.2, 0.8, 0.9], [0.4, 0.8, 0.9])]
    base, best = (
        MethodRows(config, method, rate(0.5), Rows(found)) for method, found in ((PLAIN, first), (SQUARE, second))
    )
    assert (len(base.rows.finished), base.rows.lost) == (1, 1)
    assert best.at([1]).mean == pytest.approx(0.7)
    assert best.at([0, 1]).mean == pytest.approx(0.5)
    stats, _, numbers = oneshot.verdict_of([base, best], "")
    assert numbers["gain"] == pytest.approx(0.4)
    assert stats[1] == ("largest gain", "+40.0 points", "at 10.0% kept")
    caption = oneshot.accuracy_section(config, [base, best]).tables[0].caption
    assert caption.endswith("1 runs diverged.")


def test_the_frontier_names_what_diverged_and_what_learned_too_little() -> None:
    low, high = rate(0.1), rate(0.5)
    every = Rows([row(PLAIN, low, seed, [0.2, 0.5, 0.9]) for seed in (0, 1)])
    every += [row(PLAIN, high, 0, None), row(SQUARE, high, 0, [0.1, 0.1, 0.11])]
    every += [row(SQUARE, low, seed, [0.4, 0.7, 0.86]) for seed in (0, 1)]
    section = oneshot.frontier_section(SMALL, Rows(every))
    assert "diverged are left out: α = 1, 0.5 (1 of 1)." in section.text
    assert "below the best dense accuracy: α = 2, 0.5 (11.0%)." in section.text
    (points,) = section.figures[0].data  # type: ignore[union-attr]
    assert [(point.method, point.x, point.y.mean) for point in points] == [
        ("α = 1, 0.1", 90.0, pytest.approx(0.5)), ("α = 2, 0.1", 86.0, pytest.approx(0.7)),
    ]  # fmt: skip


# --- networks and optimisers ----------------------------------------------------------------------------------------


def test_optimisers() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2))

    sgd = oneshot.make_optimizer(replace(SMALL, momentum=0.9), net(), 2.0, "targets", 0.1, 0.0)
    assert isinstance(sgd, Powerprop)
    assert (sgd.alpha, sgd.param_groups[0]["momentum"]) == (2.0, 0.9)
    direct = net()
    adam = oneshot.make_optimizer(replace(SMALL, optimiser="adam"), direct, 2.0, "direct", 0.1, 1e-4)
    assert type(adam) is torch.optim.Adam
    assert adam.param_groups[0]["weight_decay"] == 1e-4
    assert "0.parametrizations.weight.original" in dict(direct.named_parameters())


def test_the_penalty_pulls_every_weight_by_its_sign() -> None:
    net = nn.Sequential(nn.Linear(2, 1))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[0.5, -0.5]]))
        net[0].bias.fill_(0.5)
    optimizer = oneshot.make_optimizer(SMALL, net, 1.0, "lasso", 0.1, 0.2)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert net[0].weight.tolist() == [pytest.approx([0.5 - 0.1 * 0.2, -0.5 + 0.1 * 0.2])]
    assert net[0].bias.item() == 0.5


def test_a_triangular_learning_rate() -> None:
    assert [triangle(done, 0.25) for done in (0.0, 0.125, 0.25, 0.625, 1.0)] == [0.0, 0.5, 1.0, 0.5, 0.0]


def test_splits_and_pixels() -> None:
    splits = data.load_splits("mnist", "unit", 100, 50, 30)
    assert [len(part.x) for part in splits] == [50, 100, 30]
    assert 0 <= float(splits.train.x.min()) <= float(splits.train.x.max()) <= 1
    standard = data.load_splits("mnist", "standard", 100, 50, 30)
    assert float(standard.train.x.mean()) == pytest.approx(0, abs=1e-4)
    assert float(standard.train.x.std()) == pytest.approx(1, abs=1e-3)
    assert torch.equal(standard.validation.y, splits.validation.y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lrs": (0.1, 0.1)}, r"learning rates must be different, got \(0\.1, 0\.1\)"),
        (
            {"lrs": (0.1, 0.1001), "magnitude": 0.1, "parametrization": ("direct",)},
            r"learning rates must be different, got \(0\.1, 0\.1001\)",
        ),
        ({"lrs": (0.1, 0.5), "decays": (1e-4,)}, r"decays must be as many as the 2 learning rates, or none, got \("),
        ({"band": (0.2, 0.3)}, r"no point of the grid lies in \(0\.2, 0\.3\)"),
        ({"shift": 2}, "shift moves images of networks of convolutions, got 2 with lenet-300-100"),
        ({"nesterov": True}, "nesterov needs a momentum above 0, got 0"),
    ],
)
def test_bad_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"validation": 3_000_000}, "n_last must be in 0.."),
        ({"data": "cifar10"}, r"model lenet-300-100 is for images \(1, 28, 28\) of 10 classes, got cifar10"),
    ],
)
def test_settings_that_the_data_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        oneshot.find_data(replace(SMALL, **change))


# --- pruning, by hand -----------------------------------------------------------------------------------------------

BEFORE = {"hidden": torch.tensor([0.1, -0.2, 0.3, -0.4]), "out": torch.tensor([0.5, -0.6, 0.7, 0.8])}
AFTER = {"hidden": torch.tensor([-0.9, -0.8, 0.1, 0.0005]), "out": torch.tensor([0.5, 0.6, 0.7, 0.0])}


def test_masks_keep_int_p_n_and_twice_as_many_at_the_output() -> None:
    masks = pruning.layerwise_masks(BEFORE, 0.3)  # int(1.2) = 1 of 4, int(2.4) = 2 of 4
    assert masks["hidden"].tolist() == [False, False, False, True]
    assert masks["out"].tolist() == [False, False, True, True]
    assert pruning.layerwise_masks(BEFORE, 0.5)["out"].all()
    # hidden: {3} before, {0} after; out: {2, 3} before, {1, 2} after. One of three is shared.
    assert pruning.layerwise_masks(AFTER, 0.3).overlap(masks) == pytest.approx(1 / 3)


def test_one_ranking_of_all_layers() -> None:
    masks = pruning.global_masks(BEFORE, 0.4)  # int(3.2) = 3 of 8
    assert not masks["hidden"].any()
    assert masks["out"].tolist() == [False, True, True, True]


def test_movement() -> None:
    survivors = pruning.layerwise_masks(AFTER, 0.3)  # weights 0 | 1, 2
    moved = pruning.movement(BEFORE, AFTER, survivors)
    # Signs differ at hidden 0 and 3, out 1, and out 3, which went to zero.
    assert moved["sign_changes"] == pytest.approx(4 / 8)
    assert moved["sign_changes_of_survivors"] == pytest.approx(2 / 3)
    assert moved["near_zero_before"] == 0
    assert moved["near_zero_after"] == pytest.approx(2 / 8)


def test_sample_takes_the_same_weights_before_and_after() -> None:
    survivors = pruning.layerwise_masks(AFTER, 0.3)
    drawn = pruning.sample(BEFORE, AFTER, survivors, 5, torch.Generator().manual_seed(0))
    pairs = {(round(b, 4), round(a, 4), s) for b, a, s in zip(*(drawn[k].tolist() for k in drawn), strict=True)}
    everything = zip(*(pruning.flattened(part).tolist() for part in (BEFORE, AFTER, survivors)), strict=True)
    assert len(pairs) == 5
    assert pairs <= {(round(b, 4), round(a, 4), s) for b, a, s in everything}


def test_accuracies_prune_from_the_trained_weights_and_put_them_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[2.0, 0.1], [0.2, 3.0]]))
        model[1].weight.copy_(torch.tensor([[1.0, 0.1], [0.2, 1.5]]))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    x, y = torch.eye(2), torch.tensor([0, 1])
    # At 25% only the 3 is left in the first layer: the first input gives zeros and argmax 0, still right.
    # At 10% nothing is left and everything is class 0.
    found = pruning.accuracies(model, {"test": data.Part(x, y)}, [0.1, 0.25, 1.0], "layerwise", [])
    assert found == {"test": [0.5, 1.0, 1.0]}
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_norms_are_measured_again_for_the_pruned_network_and_put_back() -> None:
    """All of the first layer is pruned away: as they were, norms divide zeros; measured again, they know of them."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    x, y = torch.randn(64, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(64, dtype=torch.long)
    means = []
    model[1].register_forward_hook(lambda norm, *_: means.append(norm.running_mean.abs().sum().item()))
    model[1].running_mean.fill_(7.0)
    for mode in ("layerwise", "layerwise recalibrated"):
        pruning.accuracies(model, {"test": data.Part(x, y)}, [0.01], mode, [x])
    assert means[0] == 14.0
    assert means[-1] == 0.0
    assert model[1].running_mean.tolist() == [7.0, 7.0]
