"""Every method of the paper's table 1, with and without Powerprop: the table, extended training, extreme sparsity.

Rows are methods, columns are sparsities with their distribution. All rows share the network, the batches, the optimiser
(SGD with momentum, cosine schedule) and the number of steps; the learning rate of each row is chosen on validation
images at one column, over all seeds of the rates that come near the best. The rules for single layers are the paper's:
a first convolution stays dense and the last layer at most 80% sparse, except under ERK. The paper's own table is of
ResNet-50 on ImageNet (experiment `imagenet`); here the same rows are trained where two cores can do it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import powerprop as pp
from powerprop import data, models
from powerprop.allocate import Layers
from powerprop.experiments.harness.experiment import Experiment, Findings, Job, Results
from powerprop.experiments.harness.parallel import Progress
from powerprop.experiments.sparse.report import compose
from powerprop.experiments.sparse.rows import FULL_STEPS, ROWS, Row, asked, parse
from powerprop.experiments.sparse.tuning import chosen_lr, column_of, job, jobs
from powerprop.flops import count_flops
from powerprop.power import check_alpha
from powerprop.train import MetricsLog, evaluate, fit, read_metrics


class Task(NamedTuple):
    """A data set with the network that learns it."""

    data: str
    build: Callable[[torch.Generator], nn.Module]
    rules: Layers
    augment: bool


LAST = pp.at_most(0.8)
TASKS = {
    "mnist": Task("mnist", lambda g: models.lenet_300_100(generator=g), {"fc3.weight": LAST}, False),
    "cifar10": Task("cifar10", lambda g: models.resnet20(generator=g), {"conv1.weight": 0.0, "fc.weight": LAST}, True),
}


@dataclass(frozen=True)
class Config:
    """The settings of a sparse-training table.

    Args:
        task: "mnist" (LeNet-300-100) or "cifar10" (ResNet-20).
        rows: names of methods, see `sparse_rows.ROWS`.
        columns: such as "uniform 0.95" or "erk 0.9".
        alpha: the power of the Powerprop rows.
        lrs: candidates of the learning rate; each row's is chosen by validation accuracy at `tune_at`.
        tune_at: the column of the choice.
        seeds: runs of each cell.
        steps: of a cycle of training.
        multipliers: extended training: cycles for the rows `extended`, at `tune_at`.
        extended: the rows of the extended-training table.
        batch: images per step.
        momentum, weight_decay: of SGD.
        train, test: only the first so many images; 0 means all.
        validation: the last so many training images choose the learning rate.
        every: steps between checkpoints.
        warmup: the fraction of the steps in which the learning rate rises linearly to its full value.
        refresh: steps between refreshes of Top-KAST, 100 in its paper. In short trainings at high rates it must be
            more often, because weights that are trained but not used drift apart.
        regrow: steps between mask updates where growth is random (SET, DSR), 100 in the papers. A short training needs
            more tries in fewer steps.
    """

    task: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    alpha: float
    lrs: tuple[float, ...]
    tune_at: str
    seeds: int
    steps: int
    multipliers: tuple[int, ...] = ()
    extended: tuple[str, ...] = ()
    batch: int = 100
    momentum: float = 0.9
    weight_decay: float = 1e-4
    train: int = 0
    test: int = 0
    validation: int = 5000
    every: int = 1000
    warmup: float = 0.0
    refresh: int = 5
    regrow: int = 100

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}, got {self.task!r}")
        for row in (*self.rows, *self.extended):
            if row not in ROWS:
                raise ValueError(f"row must be one of {', '.join(ROWS)}, got {row!r}")
        for column in (*self.columns, self.tune_at):
            parse(column)
        check_alpha(self.alpha)
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be in [0, 1), a fraction of the steps, got {self.warmup!r}")

    @property
    def alphas(self) -> tuple[float, ...]:
        """The powers that occur: the baseline's and Powerprop's."""
        return (1.0, self.alpha)


def prepare(config: Config) -> None:
    """Find the data, or download it, before several processes ask for it."""
    data.load(TASKS[config.task].data)


def layer_rules(config: Config, distribution: str) -> Layers:
    """A first convolution stays dense, the last layer at most 80% sparse; ERK prunes them too (appendix C)."""
    return {} if distribution == "erk" else TASKS[config.task].rules


def run_job(config: Config, job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
    """Train one cell of the table and measure it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task, settings = TASKS[config.task], job.settings
    row = ROWS[settings["row"]]
    splits = load_splits(config).to(device)
    # The same seed gives every row the same initial weights and the same batches.
    model = task.build(torch.Generator().manual_seed(settings["seed"])).to(device)
    if config.task == "cifar10":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    steps = config.steps * settings["cycles"]
    optimizer = make_optimizer(config, model, row, settings, steps)
    try:
        train(config, settings, model, optimizer, splits, steps, folder, progress)
    except FloatingPointError as error:
        return {"diverged": str(error)}
    masks = optimizer.active
    if row.method == "oneshot":
        rules = layer_rules(config, settings["distribution"])
        masks = pp.prune(model, settings["sparsity"], settings["distribution"], rules)
        pp.recalibrate(model, (splits.train.x[i : i + 500] for i in range(0, 5000, 500)))
    return measure(config, model, masks, splits, settings)


def make_optimizer(config: Config, model: nn.Module, row: Row, settings: dict[str, Any], steps: int) -> pp.Powerprop:
    """SGD with momentum, the row's method and its α."""
    base = torch.optim.SGD(
        model.parameters(), settings["lr"], momentum=config.momentum, weight_decay=config.weight_decay
    )
    rules = layer_rules(config, settings["distribution"])
    method = row.make(
        settings["sparsity"], settings["distribution"], steps, rules, settings["seed"], config.refresh, config.regrow
    )
    return pp.Powerprop(base, model, config.alpha if row.powerprop else 1.0, sparsify=method)


def train(
    config: Config,
    settings: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    splits: data.Splits,
    steps: int,
    folder: Path,
    progress: Progress,
) -> None:
    """Train to the last step, from the checkpoint in the folder if there is one; cosine schedule."""
    generator = torch.Generator().manual_seed(settings["seed"])
    augment = data.crop_and_flip if TASKS[config.task].augment else None
    batches = data.Batches(*splits.train, config.batch, generator, augment)
    with MetricsLog(folder / "metrics.jsonl") as log:
        fit(
            model,
            optimizer,
            batches,
            steps,
            schedule=lambda step: rate(step / steps, config.warmup),
            checkpoint=folder / "checkpoint.pt",
            checkpoint_every=config.every,
            log=log,
            evaluate=lambda model: {"accuracy": evaluate(model, *splits.validation).accuracy},
            eval_every=config.every,
            progress=lambda step, values: progress(step / steps, {"step": step, **values}),
        )


def rate(done: float, warmup: float) -> float:
    """The learning rate when a fraction of the training is done: a linear rise, and the fall of a cosine over it."""
    rising = min(1.0, done / warmup) if warmup else 1.0
    return rising * (1 + math.cos(math.pi * done)) / 2


def measure(
    config: Config, model: nn.Module, masks: pp.Masks, splits: data.Splits, settings: dict[str, Any]
) -> dict[str, Any]:
    """Accuracies, the sparsity that was reached, and FLOPs relative to dense training."""
    counts = {n: int(m.count_nonzero()) for n, m in masks.items()}
    flops = count_flops(model, tuple(splits.test.x.shape[1:]))
    kept = {n: counts[n] / m.numel() for n, m in masks.items()}
    return {
        "test": evaluate(model, *splits.test).accuracy,
        "validation": evaluate(model, *splits.validation).accuracy,
        "kept": counts,
        "asked": asked(masks, settings, layer_rules(config, settings["distribution"])),
        "sparsity": masks.sparsity(),
        "inference_flops": flops.inference(kept),
    }


def load_splits(config: Config) -> data.Splits:
    """Training, validation and test images as floats; CIFAR's standardised."""
    task = TASKS[config.task]
    train, validation, test = data.load(task.data).split_validation(config.validation)
    splits = data.Splits(_first(train, config.train), validation, _first(test, config.test))
    if config.task == "mnist":
        return splits.map(data.to_float)
    mean, std = data.mean_std(splits.train.x)
    return splits.map(lambda x: data.normalise(x, mean, std))


def _first(part: data.Part, count: int) -> data.Part:
    return data.Part(part.x[:count], part.y[:count]) if count else part


def report(config: Config, results: Results, out: Path) -> Findings:
    """Table 1's rows, extended training and the extreme-sparsity figure."""
    chosen = {row: chosen_lr(config, row, results) for row in dict.fromkeys((*config.rows, *config.extended))}

    def key(row: str, column: str, cycles: int, seed: int) -> str:
        return job(config, row, column_of(row, column), chosen[row], seed, cycles).key

    def found(row: str, column: str, cycles: int = 1) -> list[dict[str, Any]]:
        keys = [key(row, column, cycles, seed) for seed in range(config.seeds)]
        return [results[k] for k in keys if k in results]

    def logged(row: str, column: str) -> list[dict[str, float]]:
        return read_metrics(out / "jobs" / key(row, column, 1, 0) / "metrics.jsonl")

    return compose(config, found, logged, chosen, out)


LEFT_OUT = (
    "pp-dense", "one-shot", "pp-one-shot", *(f"pp-{m}" for m in ("static", "snip", "set", "dsr", "snfs", "rigl"))
)  # fmt: skip
SHORT = tuple(name for name in ROWS if name not in LEFT_OUT)
MAIN = ("dense", "static", "rigl", "iterative", "pp-iterative", "topkast-0", "pp-topkast-0")
TABLE = ("uniform 0.8", "uniform 0.9", "uniform 0.95", "uniform 0.98", "uniform 0.99", "erk 0.8", "erk 0.9")
PAIR = ("rigl", "pp-topkast-0")

MNIST_PRESETS = {
    "smoke": Config(
        task="mnist", rows=("dense", "static", "rigl", "pp-topkast-50", "pp-iterative", "pp-one-shot"),
        columns=("uniform 0.9", "erk 0.9"), alpha=2.0, lrs=(0.05,), tune_at="uniform 0.9", seeds=2, steps=20,
        multipliers=(2,), extended=("rigl",), train=600, validation=300, test=300, every=10,
    ),
    "cpu": Config(
        task="mnist", rows=SHORT, columns=("uniform 0.95", "uniform 0.98", "uniform 0.99"), alpha=1.5,
        lrs=(0.05, 0.1, 0.2, 0.4), tune_at="uniform 0.98", seeds=3, steps=10_000, weight_decay=5e-4,
        refresh=1, regrow=25,
    ),
    "paper": Config(
        task="mnist", rows=tuple(ROWS), columns=TABLE, alpha=1.375, lrs=(0.05, 0.1, 0.2, 0.4),
        tune_at="uniform 0.98", seeds=3, steps=FULL_STEPS["mnist"], multipliers=(2, 3, 5), extended=PAIR,
    ),
}  # fmt: skip

CIFAR_PRESETS = {
    "smoke": Config(
        task="cifar10", rows=("dense", "pp-topkast-0"), columns=("uniform 0.9",), alpha=1.5, lrs=(0.1,),
        tune_at="uniform 0.9", seeds=1, steps=2, batch=8, train=64, validation=32, test=32, every=1,
    ),
    "cpu": Config(
        task="cifar10", rows=MAIN, columns=("uniform 0.9", "uniform 0.95"), alpha=1.375, lrs=(0.1, 0.2),
        tune_at="uniform 0.9", seeds=1, steps=500, batch=64, weight_decay=5e-4, validation=2_000, every=50,
        warmup=0.1, refresh=1,
    ),
    "paper": Config(
        task="cifar10", rows=tuple(ROWS), columns=TABLE, alpha=1.375, lrs=(0.05, 0.1, 0.2), tune_at="uniform 0.95",
        seeds=3, steps=FULL_STEPS["cifar10"], batch=128, weight_decay=5e-4, warmup=0.05, refresh=100,
        multipliers=(2, 3, 5), extended=PAIR,
    ),
}  # fmt: skip


def _experiment(name: str, title: str, presets: dict[str, Config]) -> Experiment:
    return Experiment(
        name=name,
        title=title,
        paper="tables 1 and 2, extreme-sparsity figure, section 5.2",
        config=Config,
        presets=presets,
        prepare=prepare,
        jobs=jobs,
        run_job=run_job,
        report=report,
    )


EXPERIMENT = _experiment("sparse-training", "every sparse-training method on MNIST, LeNet-300-100", MNIST_PRESETS)
CIFAR = _experiment("sparse-training-cifar", "sparse-training methods on CIFAR-10, ResNet-20", CIFAR_PRESETS)
