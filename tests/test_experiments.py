"""The experiments: every one at smoke scale, and their parts worked out by hand."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from rich.console import Console
from torch import nn

import standin
from powerprop import Powerprop, data
from powerprop.cli import main
from powerprop.experiments import EXPERIMENTS, Experiment
from powerprop.experiments.harness.experiment import Job, RunError
from powerprop.experiments.harness.folder import locked, prepare
from powerprop.experiments.harness.runner import JobsFailedError, run, run_jobs
from powerprop.experiments.oneshot import pruning
from powerprop.experiments.oneshot.config import Candidate, Config
from powerprop.experiments.oneshot.frontier import frontier_section
from powerprop.experiments.oneshot.measured import baseline, best_arm, largest_gain, measure
from powerprop.experiments.oneshot.mnist import PRESETS
from powerprop.experiments.oneshot.train import Arm, arms, load_splits, make_optimizer, triangle
from powerprop.experiments.oneshot.tuning import chosen, jobs, tuning_score
from powerprop.files import read_sealed_json, write_sealed_json
from powerprop.train import NonFiniteError

ONESHOT = [name for name, experiment in EXPERIMENTS.items() if experiment.config is Config]
SMALL = Config(
    data="mnist",
    model="lenet-300-100",
    alphas=(1.0, 2.0),
    lrs=(0.1, 0.5),
    seeds=2,
    steps=5,
    points=3,
    band=(0.05, 0.2),
)


def quiet() -> Console:
    return Console(file=io.StringIO())


def result(validation: list[float], test: list[float] | None = None) -> dict[str, Any]:
    weights = ("sign_changes", "sign_changes_of_survivors", "near_zero_before", "near_zero_after")
    curves = {"kept": SMALL.grid, "validation": validation, "test": test or validation, "overlap": validation}
    return curves | dict.fromkeys(weights, 0.1)


@pytest.fixture(autouse=True)
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", standin.load)


# --- every experiment ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONESHOT)
def test_smoke(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]
    findings = run(experiment, "smoke", experiment.presets["smoke"], tmp_path, 1, quiet())
    assert len(findings.table.rows) == len(arms(experiment.presets["smoke"]))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["experiment"] == name
    assert all(0 <= accuracy <= 1 for arm in summary["arms"] for accuracy in arm["test"])
    assert summary["gain"] is not None
    assert (tmp_path / "report.html").stat().st_size > 10_000
    for folder in (tmp_path / "jobs").iterdir():
        assert {path.name for path in folder.iterdir()} == {
            "job.json",
            "metrics.jsonl",
            "checkpoint.pt",
            "result.json",
            "weights.safetensors",
        }


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_presets_are_complete(name: str) -> None:
    experiment = EXPERIMENTS[name]
    assert experiment.name == name
    assert {"smoke", "cpu", "paper"} <= experiment.presets.keys()
    if name in ONESHOT:
        assert experiment.presets["paper"].seeds == 5
        assert 1.0 in experiment.presets["cpu"].alphas


def test_the_notebook_s_grid_has_six_points_in_the_band() -> None:
    config = PRESETS["cpu"]
    assert len(config.grid) == 20
    assert config.grid[0] == pytest.approx(0.01)
    assert config.grid[-1] == 1.0
    assert sum(config.band[0] <= kept <= config.band[1] for kept in config.grid) == 6


# --- the runner ---------------------------------------------------------------------------------------------------


def toy(run_job: Any) -> Experiment:
    """Two jobs, and a third that is known only when they are done; no report."""

    def toy_jobs(config: Config, results: Any) -> list[Job]:
        first = [Job("a", {"x": 1}), Job("b", {"x": 2})]
        return [*first, Job("c", {"x": results["a"]["y"]})] if {"a", "b"} <= results.keys() else first

    return Experiment("toy", "", "", {}, lambda config: None, toy_jobs, run_job, None)  # type: ignore[arg-type]


def test_stages_follow_each_other_and_finished_jobs_are_skipped(tmp_path: Path) -> None:
    ran = []

    def run_job(config: Config, job: Job, folder: Path, report: Any) -> dict[str, Any]:
        ran.append(job.key)
        return {"y": 10 * job.settings["x"]}

    run_jobs(toy(run_job), SMALL, tmp_path, 1, quiet())
    assert ran == ["a", "b", "c"]
    assert json.loads((tmp_path / "jobs/c/result.json").read_text()) == {"x": 10, "y": 100}
    (tmp_path / "jobs/b/result.json").unlink()
    run_jobs(toy(run_job), SMALL, tmp_path, 1, quiet())
    assert ran == ["a", "b", "c", "b"]


def test_a_failing_job_does_not_stop_the_others(tmp_path: Path) -> None:
    def run_job(config: Config, job: Job, folder: Path, report: Any) -> dict[str, Any]:
        if job.key == "a":
            raise ZeroDivisionError("by hand")
        return {}

    with pytest.raises(JobsFailedError, match="1 jobs failed: a") as error:
        run_jobs(toy(run_job), SMALL, tmp_path, 1, quiet())
    assert "ZeroDivisionError: by hand" in error.value.failures["a"].traceback
    assert (tmp_path / "jobs/b/result.json").exists()


def test_failed_jobs_are_shown_with_their_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("by hand")

    monkeypatch.setattr("powerprop.experiments.oneshot.train.fit", broken)
    arguments = ["run", "mnist-oneshot", "--preset", "smoke", "--seeds", "1", "--workers", "1", "--out", str(tmp_path)]
    assert main(arguments) == 1
    errors = capsys.readouterr().err
    assert "Traceback" in errors
    assert errors.strip().endswith("error: 4 jobs failed: " + ", ".join(job.key for job in jobs(PRESETS["smoke"], {})))


def test_a_folder_is_used_by_one_process_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(RunError, match="in use by another process"), locked(tmp_path):
        pass


def test_a_setting_newer_than_the_folder_counts_with_its_default(tmp_path: Path) -> None:
    experiment = EXPERIMENTS["mnist-oneshot"]
    prepare(tmp_path, experiment, "smoke", PRESETS["smoke"])
    saved = read_sealed_json(tmp_path / "config.json")
    del saved["config"]["momentum"]
    write_sealed_json(tmp_path / "config.json", saved)
    prepare(tmp_path, experiment, "smoke", PRESETS["smoke"])
    with pytest.raises(RunError, match=r"momentum is 0\.0 there and 0\.9 here, width is 1\.0 there and 2\.0 here"):
        prepare(tmp_path, experiment, "smoke", replace(PRESETS["smoke"], momentum=0.9, width=2.0))
    with pytest.raises(RunError, match="preset is 'smoke' there and 'cpu' here"):
        prepare(tmp_path, experiment, "cpu", PRESETS["smoke"])


# --- jobs and the choice of the learning rate ---------------------------------------------------------------------


def test_tuning_first_then_all_seeds_at_the_chosen_rate() -> None:
    first = jobs(SMALL, {})
    assert [job.key for job in first] == [
        "alpha1-lr0.1-seed0",
        "alpha1-lr0.5-seed0",
        "alpha2-lr0.1-seed0",
        "alpha2-lr0.5-seed0",
    ]
    results = {
        "alpha1-lr0.1-seed0": result([0.1, 0.8, 0.98]),
        "alpha1-lr0.5-seed0": result([0.1, 0.7, 0.98]),
        "alpha2-lr0.1-seed0": result([0.2, 0.7, 0.97]),
        "alpha2-lr0.5-seed0": result([0.3, 0.8, 0.97]),
    }
    assert jobs(SMALL, {key: results[key] for key in list(results)[:3]}) == first
    assert [job.key for job in jobs(SMALL, results)][4:] == ["alpha1-lr0.1-seed1", "alpha2-lr0.5-seed1"]


def test_candidates_at_which_a_weight_of_some_size_learns_and_decays_equally_fast() -> None:
    config = replace(SMALL, lrs=(0.1, 0.4), magnitude=0.1)
    assert config.candidates(1.0) == ((0.1, 0), (0.4, 0))
    assert config.candidates(2.0) == ((0.25, 0), (1.0, 0))  # lr / (α²|w|) = 0.1 / 0.4 and 0.4 / 0.4
    assert [job.settings["lr"] for job in jobs(config, {})] == [0.1, 0.4, 0.25, 1.0]
    decayed = replace(config, lrs=(0.1, 0.1), decays=(5e-4, 1e-3), weight_decay=5e-4)
    assert decayed.candidates(2.0) == ((0.25, 5e-4), (0.25, 1e-3))  # the wrapper decays w as it is
    direct = replace(decayed, forms=("direct",))
    assert direct.candidates(1.0) == ((0.1, 5e-4), (0.1, 1e-3))
    assert direct.candidates(2.0) == (
        (0.25, 1e-4),
        (0.25, 2e-4),
    )
    phi = 0.1**0.5  # decays by lr·λ·φ, and w = φ² by 2φ times that
    assert 0.25 * 1e-4 * phi * 2 * phi == pytest.approx(0.1 * 5e-4 * 0.1)
    assert [job.key for job in jobs(direct, {})] == [
        "alpha1-lr0.1-seed0",
        "alpha1-lr0.1-decay0.001-seed0",
        "direct-alpha2-lr0.25-decay0.0001-seed0",
        "direct-alpha2-lr0.25-decay0.0002-seed0",
    ]


def test_a_row_of_ordinary_weights_under_a_penalty() -> None:
    config = replace(SMALL, lrs=(0.1,), lassos=(1e-4, 1e-3), seeds=1)
    assert arms(config)[-1] == Arm(1.0, "lasso")
    assert config.candidates(1.0, "lasso") == ((0.1, 1e-4), (0.1, 1e-3))
    tuning = [job.key for job in jobs(config, {})]
    assert tuning[-2:] == ["lasso-alpha1-lr0.1-decay0.0001-seed0", "lasso-alpha1-lr0.1-decay0.001-seed0"]
    results = {key: result([0.1, 0.2, 0.9]) for key in tuning} | {tuning[-1]: result([0.4, 0.5, 0.9])}
    assert chosen(config, Arm(1.0, "lasso"), results) == (0.1, 1e-3)
    base, _, penalised = (measure(config, arm, results) for arm in arms(config))
    assert baseline([base, penalised]) is base
    assert (penalised.label, penalised.plain) == ("α = 1 with an L1 penalty", True)


def test_the_penalty_pulls_every_weight_by_its_sign() -> None:
    net = nn.Sequential(nn.Linear(2, 1))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[0.5, -0.5]]))
        net[0].bias.fill_(0.5)
    optimizer = make_optimizer(SMALL, net, 1.0, "lasso", 0.1, 0.2)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert net[0].weight.tolist() == [pytest.approx([0.5 - 0.1 * 0.2, -0.5 + 0.1 * 0.2])]
    assert net[0].bias.item() == 0.5


def test_a_rate_that_spoils_the_dense_network_is_passed_over() -> None:
    arm = Arm(1.0, "targets")
    results = {"alpha1-lr0.1-seed0": result([0.1, 0.5, 0.98]), "alpha1-lr0.5-seed0": result([0.6, 0.9, 0.974])}
    assert tuning_score(SMALL, arm, Candidate(0.5, 0.0), results) == pytest.approx(((0.6 + 0.9 + 0.974) / 3, 0.974))
    assert chosen(SMALL, arm, results).lr == 0.1
    assert chosen(replace(SMALL, tolerance=0.007), arm, results).lr == 0.5


def test_diverged_candidates_are_not_chosen() -> None:
    arm = Arm(1.0, "targets")
    bad = {"diverged": "the loss is nan"}
    results: dict[str, dict[str, Any]] = {"alpha1-lr0.1-seed0": bad, "alpha1-lr0.5-seed0": result([0.1, 0.1, 0.1])}
    assert chosen(SMALL, arm, results).lr == 0.5
    results["alpha1-lr0.5-seed0"] = bad
    with pytest.raises(RunError, match=r"diverged at every learning rate of 0\.1, 0\.5 for alpha = 1"):
        chosen(SMALL, arm, results)


def test_one_candidate_needs_no_tuning() -> None:
    config = replace(SMALL, lrs=(0.5,), forms=("targets", "direct"))
    assert [job.key for job in jobs(config, {})] == [
        f"{arm}-lr0.5-seed{seed}" for arm in ("alpha1", "alpha2", "direct-alpha2") for seed in (0, 1)
    ]


def test_measured_arms_leave_out_diverged_seeds() -> None:
    config = replace(SMALL, lrs=(0.5,))
    results = {
        "alpha1-lr0.5-seed0": result([0.1, 0.2, 0.9], [0.1, 0.3, 0.9]),
        "alpha1-lr0.5-seed1": {"diverged": "the loss is nan"},
        "alpha2-lr0.5-seed0": result([0.2, 0.6, 0.9], [0.2, 0.6, 0.9]),
        "alpha2-lr0.5-seed1": result([0.2, 0.8, 0.9], [0.4, 0.8, 0.9]),
    }
    base, best = (measure(config, arm, results) for arm in arms(config))
    assert (len(base.runs), base.diverged) == (1, 1)
    assert best.band([1]).mean == pytest.approx(0.7)
    assert best.band([0, 1]).mean == pytest.approx(0.5)
    assert best_arm([base, best]) is best
    assert largest_gain(config, base, best) == (pytest.approx(0.4), 1)


def test_the_frontier_names_what_diverged_and_what_learned_too_little(tmp_path: Path) -> None:
    low, high = SMALL.candidates(1.0, "targets")
    results = {j.key: result([0.2, 0.5, 0.9]) for j in (Arm(1.0, "targets").job(SMALL, low, seed) for seed in (0, 1))}
    results |= {Arm(1.0, "targets").job(SMALL, high, 0).key: {"diverged": "NaN"}}
    results |= {Arm(2.0, "targets").job(SMALL, low, seed).key: result([0.4, 0.7, 0.86]) for seed in (0, 1)}
    results |= {Arm(2.0, "targets").job(SMALL, high, 0).key: result([0.1, 0.1, 0.11])}
    section = frontier_section(SMALL, results, tmp_path, "where it hurts")
    assert "diverged are left out: α = 1, 0.5 (1 of 1)." in section.text
    assert "below the best dense accuracy: α = 2, 0.5 (11.0%)." in section.text
    assert "α = 2, 0.1: 70% at 86" in (alt := section.figures[0].alt)
    assert "α = 2, 0.5" not in alt


def test_divergence_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverging(*arguments: Any, **options: Any) -> None:
        raise NonFiniteError("the loss is nan at step 3")

    monkeypatch.setattr("powerprop.experiments.oneshot.train.fit", diverging)
    config = PRESETS["smoke"]
    found = EXPERIMENTS["mnist-oneshot"].run_job(config, jobs(config, {})[0], tmp_path, lambda done, values: None)
    assert found == {"diverged": "the loss is nan at step 3"}


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alphas": (0.9,)}, r"alpha must be at least 1, got 0\.9"),
        ({"alphas": (float("nan"),)}, "alphas must be finite, got nan"),
        ({"alphas": ()}, r"alphas must be some, each once, got \(\)"),
        ({"lrs": (0.1, 0.1)}, r"learning rates must be different, got \(0\.1, 0\.1\)"),
        ({"lrs": (0.1, 0.1001), "magnitude": 0.1}, r"learning rates must be different, got \(0\.1, 0\.1001\)"),
        ({"lrs": (0.1, 0.5), "decays": (1e-4,)}, r"decays must be as many as the 2 learning rates, or none, got \("),
        ({"lassos": (1e-4, 0.0)}, r"lassos must be above 0, each once, got \(0\.0001, 0\.0\)"),
        ({"lrs": (0.1,), "decays": (-1e-4,)}, r"decays must not be negative, got \(-0\.0001,\)"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"optimiser": "lion"}, "optimiser must be one of sgd, adam, got 'lion'"),
        ({"model": "vgg"}, "model must be one of lenet-300-100, conv6, fast-cifar, resnet20, got 'vgg'"),
        ({"pixels": "raw"}, "pixels must be one of unit, standard, got 'raw'"),
        ({"forms": ("sideways",)}, "forms must be one of targets, direct, got 'sideways'"),
        ({"band": (0.2, 0.3)}, r"no point of the grid lies in \(0\.2, 0\.3\)"),
    ],
)
def test_bad_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def test_splits_and_pixels() -> None:
    config = replace(SMALL, validation=100, train=50, test=30)
    splits = load_splits(config)
    assert [len(part.x) for part in splits] == [50, 100, 30]
    assert 0 <= float(splits.train.x.min()) <= float(splits.train.x.max()) <= 1
    standard = load_splits(replace(config, pixels="standard"))
    assert float(standard.train.x.mean()) == pytest.approx(0, abs=1e-4)
    assert float(standard.train.x.std()) == pytest.approx(1, abs=1e-3)
    assert torch.equal(standard.validation.y, splits.validation.y)


def test_optimisers() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2))

    sgd = make_optimizer(replace(SMALL, momentum=0.9), net(), 2.0, "targets", 0.1)
    assert isinstance(sgd, Powerprop)
    assert sgd.alpha == 2.0
    assert sgd.param_groups[0]["momentum"] == 0.9
    direct = net()
    adam = make_optimizer(replace(SMALL, optimiser="adam"), direct, 2.0, "direct", 0.1)
    assert type(adam) is torch.optim.Adam
    assert "0.parametrizations.weight.original" in dict(direct.named_parameters())
    decayed = make_optimizer(replace(SMALL, weight_decay=5e-4), net(), 2.0, "direct", 0.1, 1e-4)
    assert decayed.param_groups[0]["weight_decay"] == 1e-4


# --- pruning, by hand ---------------------------------------------------------------------------------------------

BEFORE = {"hidden": torch.tensor([0.1, -0.2, 0.3, -0.4]), "out": torch.tensor([0.5, -0.6, 0.7, 0.8])}
AFTER = {"hidden": torch.tensor([-0.9, -0.8, 0.1, 0.0005]), "out": torch.tensor([0.5, 0.6, 0.7, 0.0])}


def test_masks_keep_int_p_n_and_twice_as_many_at_the_output() -> None:
    masks = pruning.layerwise_masks(BEFORE, 0.3)  # int(1.2) = 1 of 4, int(2.4) = 2 of 4
    assert masks["hidden"].tolist() == [False, False, False, True]
    assert masks["out"].tolist() == [False, False, True, True]
    assert pruning.layerwise_masks(BEFORE, 0.5)["out"].all()


def test_overlap() -> None:
    # hidden: {3} before, {0} after; out: {2, 3} before, {1, 2} after. One of three is shared.
    assert pruning.overlaps(BEFORE, AFTER, [0.3, 1.0]) == [pytest.approx(1 / 3), 1.0]


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
    everything = zip(*(pruning.flat(part).tolist() for part in (BEFORE, AFTER, survivors)), strict=True)
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


def test_one_ranking_of_all_layers() -> None:
    masks = pruning.global_masks(BEFORE, 0.4)  # int(3.2) = 3 of 8
    assert not masks["hidden"].any()
    assert masks["out"].tolist() == [False, True, True, True]


def test_norms_are_measured_again_for_the_pruned_network_and_put_back() -> None:
    """All of the first layer is pruned away: as they were, norms divide zeros; measured again, they know of them."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    x, y = torch.randn(64, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(64, dtype=torch.long)
    means = []
    model[1].register_forward_hook(lambda norm, *_: means.append(norm.running_mean.abs().sum().item()))
    model[1].running_mean.fill_(7.0)
    for way in ("layerwise", "layerwise recalibrated"):
        pruning.accuracies(model, {"test": data.Part(x, y)}, [0.01], way, [x])
    assert means[0] == 14.0
    assert means[-1] == 0.0
    assert model[1].running_mean.tolist() == [7.0, 7.0]


def test_a_triangular_learning_rate() -> None:
    assert [triangle(done, 0.25) for done in (0.0, 0.125, 0.25, 0.625, 1.0)] == [0.0, 0.5, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("wrong", ["many", True, None, float("nan"), float("inf"), -1, 10**13])
def test_no_setting_takes_what_is_not_of_its_kind(name: str, wrong: Any) -> None:
    """Numbers are finite, whole ones at least 0, nothing else stands for them."""
    config = EXPERIMENTS[name].presets["smoke"]
    kinds = get_type_hints(type(config))
    for each in (each for each, kind in kinds.items() if kind is int):
        with pytest.raises(ValueError, match=f"{each} must be|expected 1 <= shortest|least must be|validation must be"):
            replace(config, **{each: wrong})
    for each in (each for each, kind in kinds.items() if kind is str):
        with pytest.raises(ValueError, match=f"{each} must be|column must look like"):
            replace(config, **{each: 3})
