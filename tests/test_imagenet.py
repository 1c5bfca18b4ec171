"""ImageNet: the paper's protocol, and the whole experiment at smoke scale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from powerprop.cli import main
from powerprop.data import DataNotFound
from powerprop.experiments import EXPERIMENTS
from powerprop.experiments.harness import runner
from powerprop.experiments.harness.experiment import RunError
from powerprop.experiments.imagenet import train as imagenet
from powerprop.experiments.imagenet.cells import EXTREME, TABLE_1, TABLE_2, Cell, cell
from powerprop.experiments.imagenet.costs import Costs
from powerprop.experiments.imagenet.figures import curves
from powerprop.experiments.imagenet.measured import collect
from powerprop.experiments.imagenet.report import diverged, summary, table_one
from powerprop.experiments.imagenet.train import (
    EPOCHS,
    EXPERIMENT,
    PRESETS,
    Config,
    build,
    cells_of,
    jobs,
    make_optimizer,
    prepare,
    rate_factor,
    run_job,
)
from powerprop.models import resnet50
from powerprop.train.distributed import Ranks

# --- the protocol -----------------------------------------------------------------------------------------------

PAPER = PRESETS["paper"]


def test_the_paper_preset_is_the_papers_table() -> None:
    assert (PAPER.model, PAPER.width, PAPER.crop, PAPER.batch, PAPER.steps) == ("resnet50", 64, 224, 4096, 32_000)
    assert (PAPER.momentum, PAPER.weight_decay, PAPER.smoothing) == (0.9, 1e-4, 0.1)
    assert (PAPER.warmup, PAPER.drops, PAPER.seeds) == (5, (30, 70, 90), 3)
    assert PAPER.alphas == (1.125, 1.25, 1.375, 1.5)
    names = {each.name for each in cells_of(PAPER)}
    assert {*TABLE_1, *TABLE_2, *EXTREME} < names
    assert len(TABLE_1) == 46
    assert len(jobs(PAPER, {})) == 3 * len(names)


def test_the_learning_rate_warms_up_and_drops() -> None:
    """102.3 epochs: full after 5 of them, a tenth from 30, a hundredth from 70, a thousandth from 90."""

    def at(epoch: float, times: float = 1.0) -> float:
        steps = round(32_000 * times)
        return rate_factor(PAPER, round(epoch * times * 32_000 / EPOCHS), steps)

    assert pytest.approx(102.307, abs=1e-3) == EPOCHS
    assert at(0) == pytest.approx(1 / 1564, rel=1e-3)
    assert at(2.5) == pytest.approx(0.5, abs=1e-3)
    for times in (1, 5):
        assert [at(e, times) for e in (5, 29.9, 30.1, 69.9, 70.1, 89.9, 90.1)] == pytest.approx(
            [1, 1, 0.1, 0.1, 0.01, 0.01, 0.001]
        )
    assert rate_factor(replace(PAPER, warmup=0.0), 0, 100) == 1.0


def narrow(cells: tuple[str, ...]) -> Config:
    return replace(PRESETS["smoke"], cells=cells, steps=320, batch=4096)


@pytest.mark.parametrize(
    ("name", "rate", "alpha", "decay", "zero"),
    [
        ("dense", 1.6, 1.0, 1e-4, True),
        ("powerprop 1.25", 1.6, 1.25, 1e-4, False),
        ("rigl uniform 0.9", 1.6, 1.0, 1e-4, True),
        ("snip uniform 0.9", 1.6, 1.0, 1e-4, False),
        ("iterative uniform 0.9", 1.6, 1.0, 1e-4, True),
        ("pp-iterative uniform 0.9", 6.4, 1.375, 1e-4, False),
        ("topkast-0 uniform 0.9", 1.6, 1.0, 0.0, False),
        ("pp-topkast-50 erk 0.9", 1.6, 1.375, 0.0, False),
    ],
)
def test_each_row_has_the_papers_settings(name: str, rate: float, alpha: float, decay: float, zero: bool) -> None:
    """η = η_b·4096/256; the last layer starts at zero except for Powerprop, Top-KAST and SNIP."""
    config, this = narrow((name,)), cell(name)
    model = build(config, this, seed=0)
    optimizer = make_optimizer(config, this, 0, model)
    weights, rest = optimizer.param_groups
    assert weights["lr"] == rest["lr"] == pytest.approx(rate)
    assert weights["nesterov"]
    assert (weights["momentum"], weights["weight_decay"], rest["weight_decay"]) == (0.9, decay, 0.0)
    assert {m.alpha for m in optimizer.masters.values()} == {alpha}
    assert bool(model.fc.weight.any()) != zero or this.sparsity > 0
    assert (not build(config, this, 0).fc.weight.any()) == zero
    if this.row.endswith("topkast-50"):
        assert optimizer.trainable.sparsity() == pytest.approx(0.5, abs=0.01)
        assert optimizer.sparsify.decay == 1e-4


def test_first_and_last_layer() -> None:
    """Uniform: first dense, last at most 80%; ERK: the asked sparsity over all layers, no exception."""
    for name in ("rigl uniform 0.9", "topkast-0 uniform 0.9"):
        active = make_optimizer(narrow((name,)), cell(name), 0, build(narrow((name,)), cell(name), 0)).active
        assert active["conv1.weight"].all()
        assert active["fc.weight"].float().mean() == pytest.approx(0.2, abs=0.01)
        assert active["layer1.0.conv1.weight"].float().mean() == pytest.approx(0.1, abs=0.01)
    erk = make_optimizer(narrow(()), cell("rigl erk 0.9"), 0, build(narrow(()), cell("rigl erk 0.9"), 0)).active
    assert erk.sparsity() == pytest.approx(0.9, abs=1e-4)


def test_iterative_pruning_runs_from_20_to_80_percent_every_2000_of_32000() -> None:
    this = cell("pp-iterative uniform 0.9")
    method = make_optimizer(replace(narrow((this.name,)), steps=32_000), this, 0, build(narrow(()), this, 0)).sparsify
    assert (method.first, method.last, method.every) == (6_400, 25_600, 2_000)


@pytest.mark.parametrize("row", ["set", "dsr", "snfs", "rigl"])
def test_masks_move_every_100_steps(row: str) -> None:
    this = cell(f"{row} uniform 0.9")
    assert make_optimizer(narrow((this.name,)), this, 0, build(narrow(()), this, 0)).sparsify.interval == 100


@pytest.mark.parametrize("name", TABLE_2)
def test_brackets_of_table_2(name: str, costs: Costs) -> None:
    """Ours within 3% of the printed FLOPs; uniform 90% as printed counts the first convolution as sparse.

    The 1.5x row of iterative pruning has a schedule that is not printed: ours costs less, a later one as much.
    """
    this, printed = cell(name), TABLE_2[name][1]
    if this.row == "iterative":
        ours = {0.8: 0.781, 0.9: 0.691}[this.sparsity]
        later = costs.flops.gradual(costs.densities(this, this.sparsity), 10 / 32, 25 / 32, interval=1e-4)
        assert costs.training(this) == pytest.approx(ours, abs=5e-4)
        assert this.times * later == pytest.approx(printed, rel=0.03)
    else:
        assert costs.training(this, sparse_stem=name == "rigl uniform 0.9 x5") == pytest.approx(printed, rel=0.03)


@pytest.fixture(scope="module")
def costs() -> Costs:
    return Costs(resnet50(), 224)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adam uniform 0.9", "a cell must begin with dense, powerprop, .*, got 'adam uniform 0.9'"),
        ("rigl uniform", "a column must look like 'uniform 0.95' or 'erk 0.9', got 'uniform'"),
        ("rigl uniform 0.9 xlong", "expected a number, got 'long' in 'rigl uniform 0.9 xlong'"),
        ("rigl uniform 0.9 x0", "training must be longer than nothing, got x0"),
        ("powerprop", "expected a number, got '' in 'powerprop'"),
    ],
)
def test_bad_cells_are_repeated(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cell(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "vgg"}, "model must be one of resnet18, resnet50, got 'vgg'"),
        ({"precision": "int8"}, "precision must be one of float32, bfloat16, float16, got 'int8'"),
        ({"width": 4}, "width must be a multiple of 8, got 4"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"alphas": (1.0,)}, r"alpha must be above 1 \(the baseline is 'dense'\), got 1"),
        ({"only": ("vgg*",)}, r"only=\('vgg\*',\) matches none of the trainings: dense, rigl uniform 0.9, "),
    ],
)
def test_bad_settings_are_repeated(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PRESETS["smoke"], **change)


# --- the whole --------------------------------------------------------------------------------------------------


def test_smoke(at_pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From JPEG files to the report: every kind of cell, one-shot curves, FLOPs, resumed by doing nothing."""
    arguments = ["run", "imagenet", "--preset", "smoke", "--workers", "1", "--out", str(tmp_path)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "Powerprop + Iterative pruning" in shown
    summary = json.loads((tmp_path / "summary.json").read_text())
    found = {each["cell"]: each for each in summary["cells"]}
    assert list(found) == [each.name for each in cells_of(PRESETS["smoke"])]
    assert found["rigl uniform 0.9"]["paper"] == "72.0 ± 0.05"
    erk = found["pp-topkast-0 erk 0.9 x2"]
    assert erk["sparsity"][0] == pytest.approx(0.9, abs=1e-4)
    assert 1 < erk["training_flops"] < 2
    assert found["dense"]["sparsity"][0] < 0.01
    assert found["dense"]["training_flops"] == 1
    dense = json.loads((tmp_path / "jobs" / "dense-seed0" / "result.json").read_text())
    assert len(dense["grid"]) == len(dense["oneshot"]) == len(dense["recalibrated"]) == 3
    assert dense["oneshot"][-1] == dense["accuracy"]
    assert {path.name for path in (tmp_path / "figures").iterdir()} >= {"training.svg", "oneshot.svg", "smallest.svg"}
    assert "This is not ImageNet" in (tmp_path / "report.html").read_text()
    before = (tmp_path / "jobs" / "dense-seed0" / "result.json").stat().st_mtime_ns
    assert main(arguments) == 0
    assert (tmp_path / "jobs" / "dense-seed0" / "result.json").stat().st_mtime_ns == before


ITERATIVE = replace(PRESETS["smoke"], cells=("iterative uniform 0.9",), alphas=(), seeds=2, every=100)


def test_a_job_that_diverged_is_done(at_pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the ranking of weights meets the NaN before the training loop looks for one."""

    def broken(config: Config, this: Cell, seed: int) -> nn.Module:
        model = build(config, this, seed)
        nn.init.constant_(model.layer1[0].conv1.weight, torch.nan)
        return model

    monkeypatch.setattr(imagenet, "build", broken)
    result = run_job(ITERATIVE, jobs(ITERATIVE, {})[0], tmp_path, lambda done, values: None)
    assert result.keys() == {"diverged"}
    assert "NaN among its weights, so that no mask can be chosen" in result["diverged"]


def test_the_report_shows_what_diverged(tmp_path: Path, costs: Costs) -> None:
    """Every reason is on the page; a cell without any seed left says so in the table."""
    good, lost = {"accuracy": 0.5, "sparsity": 0.9, "kept": {}}, {"diverged": "the loss is nan at step 7"}
    first, second = (job.key for job in jobs(ITERATIVE, {}))
    one, all_ = (
        collect(ITERATIVE, cell("iterative uniform 0.9"), {first: seed, second: lost}, tmp_path)
        for seed in (good, lost)
    )
    assert (one.accuracy, one.folders) == (0.5, [tmp_path / "jobs" / first])
    assert diverged([one])[0].text == "iterative uniform 0.9, seed 1: the loss is nan at step 7"
    assert len(all_.diverged) == 2
    assert diverged([]) == []
    assert table_one([all_]).rows == [["Iterative pruning", "diverged", "73.7 ± 0.14"]]
    assert curves([all_], tmp_path) == []
    assert [(c["runs"], c["diverged"]) for c in summary([one, all_], costs)["cells"]] == [(1, 1), (0, 2)]


def test_jobs_with_worker_processes_run_in_turn() -> None:
    assert EXPERIMENT.in_turn is not None
    assert EXPERIMENT.in_turn(PAPER)
    assert not EXPERIMENT.in_turn(PRESETS["cpu"])


def test_one_command_on_two_ranks(at_pictures: Path, tmp_path: Path, run_script: Callable[..., str]) -> None:
    """`torchrun -m powerprop run imagenet`: one run, one set of files, one report."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "powerprop",
    ]
    wanted = ["--preset", "smoke", "--only", "dense", "--out", str(tmp_path)]
    done = run_script([*launcher, "run", "imagenet", *wanted])
    assert done.count("[1/1] dense-seed0: done") == 1
    assert done.count("Report:") == 1
    assert json.loads((tmp_path / "summary.json").read_text())["cells"][0]["runs"] == 1


@pytest.fixture
def run_script() -> Callable[..., str]:
    def run(command: list[str]) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_other_experiments_refuse_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "process_group", lambda: nullcontext(Ranks(0, 2)))
    other = EXPERIMENTS["mnist-oneshot"]
    with pytest.raises(RunError, match="mnist-oneshot trains on one process per job, got 2 ranks; leave torchrun out"):
        runner.run(other, "smoke", other.presets["smoke"], tmp_path, 1, Console(quiet=True))


def test_a_network_too_small_for_the_data_is_an_error(at_pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tiny-imagenet-10 has a label 9, but the network has 5 classes"):
        prepare(replace(PRESETS["smoke"], classes=5))
    with pytest.raises(DataNotFound, match="'imagenet' was not found"):
        prepare(PAPER)
