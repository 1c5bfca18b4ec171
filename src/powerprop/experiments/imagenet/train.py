"""Sparse ResNet-50 on ImageNet: tables 1 and 2, the extreme-sparsity figure and figure 3 b and c of the paper.

The protocol is the paper's (section 5.2, appendix C and its table of hyper-parameters): SGD with Nesterov momentum 0.9,
label smoothing 0.1, weight decay 1e-4, 32,000 steps of 4,096 pictures over all ranks, η = η_b·4096/256, five epochs of
linear warm-up, drops by ten after epochs 30, 70 and 90; extended training stretches all of it. Readings of what the
paper leaves open are in docs/imagenet.md. `torchrun --nproc-per-node 8 -m powerprop run imagenet --preset paper` trains
on the GPUs of a machine. The preset `cpu` sends ten classes of Tiny ImageNet, 64x64, through the same code: it shows
that the pipeline works and how the methods compare there, nothing about ImageNet's accuracies.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import powerprop as pp
from powerprop import data
from powerprop.data.imagenet import Pictures, find_pictures
from powerprop.data.load import LOADERS
from powerprop.data.loader import PictureBatches
from powerprop.experiments.harness.experiment import Experiment, Job
from powerprop.experiments.harness.parallel import Progress
from powerprop.experiments.imagenet.cells import (
    EXTREME,
    MODELS,
    ONESHOT_ALPHAS,
    TABLE_1,
    TABLE_2,
    Cell,
    cell,
    chosen,
)
from powerprop.experiments.imagenet.measure import measure, score
from powerprop.experiments.imagenet.report import report
from powerprop.experiments.sparse.rows import ROWS
from powerprop.select import select
from powerprop.train import MetricsLog, fit
from powerprop.train.distributed import current_ranks, local_device
from powerprop.train.precision import PRECISIONS, Precision

EPOCHS = 32_000 * 4_096 / 1_281_167
"""The epochs of a single cycle, 102.3; the learning-rate schedule counts in them, also in shortened runs."""


@dataclass(frozen=True)
class Config:
    """The settings of an ImageNet run.

    Args:
        data: name of the picture set's folder, with train and val in it.
        cells: the trainings, such as "dense" or "rigl erk 0.9 x5" (see `imagenet_cells`).
        alphas: powers of the one-shot figure; its baseline is "dense".
        seeds: runs of each.
        model: "resnet50" or "resnet18".
        width: channels of the first stage, a multiple of 8 (channels-last convolutions of 4 channels crash on a CPU).
        classes: of the data.
        crop: side of the square that the network sees.
        resize: shorter side of the picture before the middle is cropped in evaluation.
        steps: of a cycle of training.
        batch: pictures per step, over all ranks.
        momentum, weight_decay, smoothing: of SGD (Nesterov), of the weights of layers, of the labels.
        warmup, drops: epochs of linear warm-up, and epochs after which the learning rate falls to a tenth.
        precision: "float32", "bfloat16" or "float16".
        loaders: worker processes of each rank that decode pictures; with them jobs run in turn, not side by side.
        points, least: grid of the fractions kept after one-shot pruning.
        recalibrate: training batches that batch norms are measured on after one-shot pruning.
        evaluations: how often accuracy is measured in a training.
        every: steps between checkpoints.
        only: patterns of cells to run instead of all.
    """

    data: str
    cells: tuple[str, ...]
    alphas: tuple[float, ...]
    seeds: int
    model: str = "resnet50"
    width: int = 64
    classes: int = 1000
    crop: int = 224
    resize: int = 256
    steps: int = 32_000
    batch: int = 4_096
    momentum: float = 0.9
    weight_decay: float = 1e-4
    smoothing: float = 0.1
    warmup: float = 5.0
    drops: tuple[float, ...] = (30.0, 70.0, 90.0)
    precision: str = "bfloat16"
    loaders: int = 8
    points: int = 16
    least: float = 0.03
    recalibrate: int = 10
    evaluations: int = 20
    every: int = 1_000
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, known in {"model": tuple(MODELS), "precision": tuple(PRECISIONS)}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.width < 8 or self.width % 8:
            raise ValueError(f"width must be a multiple of 8, got {self.width}")
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")
        for alpha in self.alphas:
            if not alpha > 1:
                raise ValueError(f"alpha must be above 1 (the baseline is 'dense'), got {alpha:g}")
        if not cells_of(self):
            names = ", ".join(each.name for each in chosen(self.cells, self.alphas, ()))
            raise ValueError(f"only={self.only} matches none of the trainings: {names}")


def cells_of(config: Config) -> list[Cell]:
    """The trainings that are asked for."""
    return chosen(config.cells, config.alphas, config.only)


def prepare(config: Config) -> None:
    """Find the pictures, or download those sets that can be."""
    try:
        pictures(config)
    except data.DataNotFound:
        if config.data not in LOADERS:
            raise
        data.load(config.data)


def pictures(config: Config) -> tuple[Pictures, Pictures]:
    """Training and validation pictures, whose labels fit the network."""
    train, val = find_pictures(config.data)
    if (most := int(train.labels.max())) >= config.classes:
        raise ValueError(f"{config.data} has a label {most}, but the network has {config.classes} classes")
    return train, val


def jobs(config: Config, results: Any) -> list[Job]:
    """Every cell with every seed."""
    return [
        Job(f"{each.key}-seed{seed}", {"cell": each.name, "seed": seed})
        for each in cells_of(config)
        for seed in range(config.seeds)
    ]


def run_job(config: Config, job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
    """Train one cell, on all ranks if there are several, and measure it."""
    this, seed, device = cell(job.settings["cell"]), job.settings["seed"], local_device()
    model = build(config, this, seed).to(device)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    train, val = pictures(config)
    try:
        train_cell(config, this, seed, model, train, val, folder, progress)
    except FloatingPointError as error:  # from the loop, or from a method that ranks weights and meets NaN first
        return {"diverged": str(error)}
    return measure(config, this, model, train, val, folder)


def build(config: Config, this: Cell, seed: int) -> nn.Module:
    """The network of a cell; the same seed gives every cell the same weights, but for a last layer of zeros."""
    generator = torch.Generator().manual_seed(seed)
    make = MODELS[config.model]
    return make(config.classes, width=config.width, zero_init_last=this.zero_last, generator=generator)


def make_optimizer(config: Config, this: Cell, seed: int, model: nn.Module) -> pp.Powerprop:
    """SGD with Nesterov momentum at η = η_b·batch/256, the cell's method and its α.

    Weight decay acts on the weights of layers; Top-KAST does it itself, as part of its exploration.
    """
    row = ROWS[this.row]
    weights = select(model)
    rest = [p for name, p in model.named_parameters() if name not in weights]
    decay = 0.0 if row.method == "topkast" else config.weight_decay
    groups = [{"params": list(weights.values()), "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
    rate = this.rate * config.batch / 256
    base = torch.optim.SGD(groups, rate, momentum=config.momentum, nesterov=True)
    steps = length(config, this)
    return pp.Powerprop(
        base, model, this.alpha, sparsify=row.make(this.sparsity, this.distribution, steps, this.rules, seed)
    )


def length(config: Config, this: Cell) -> int:
    """The steps of a cell."""
    return round(config.steps * this.times)


def rate_factor(config: Config, step: int, steps: int) -> float:
    """The learning rate at a step, relative to η: warm-up, then a tenth after each drop."""
    epoch, after = (EPOCHS * s / steps for s in (step, step + 1))
    dropped = sum(epoch >= drop for drop in config.drops)
    warm = min(1.0, after / config.warmup) if config.warmup else 1.0
    return warm * 0.1**dropped


def train_cell(
    config: Config,
    this: Cell,
    seed: int,
    model: nn.Module,
    train: Pictures,
    val: Pictures,
    folder: Path,
    progress: Progress,
) -> None:
    """Train to the last step, from the checkpoint in the folder if there is one."""
    ranks, device, steps = current_ranks(), local_device(), length(config, this)
    batches = PictureBatches(train, config.batch, config.crop, seed, device=device, ranks=ranks, loaders=config.loaders)
    with MetricsLog(folder / "metrics.jsonl") if ranks.main else nullcontext() as log:
        fit(
            model,
            make_optimizer(config, this, seed, model),
            batches,
            steps,
            loss=partial(functional.cross_entropy, label_smoothing=config.smoothing),
            schedule=lambda step: rate_factor(config, step, steps),
            checkpoint=folder / "checkpoint.pt",
            checkpoint_every=config.every,
            log=log,
            evaluate=lambda model: {"accuracy": score(config, model, val).accuracy},
            eval_every=max(1, steps // config.evaluations),
            progress=lambda step, values: progress(step / steps, {"step": step, **values}),
            precision=Precision(config.precision, device.type),
            ranks=ranks,
        )


TINY = Config(
    data="tiny-imagenet-10", cells=(), alphas=(1.375,), seeds=1, model="resnet18", width=16, classes=10, crop=64,
    resize=64, batch=64, precision="float32", loaders=0, recalibrate=4, evaluations=8, every=100,
)  # fmt: skip

PRESETS = {
    "smoke": replace(
        TINY, cells=("dense", "rigl uniform 0.9", "pp-iterative uniform 0.9", "pp-topkast-0 erk 0.9 x2"), width=8,
        crop=32, resize=32, steps=6, batch=8, points=3, recalibrate=1, evaluations=2, every=2,
    ),
    "cpu": replace(
        TINY,
        cells=(
            "dense", "rigl uniform 0.9", "iterative uniform 0.9", "pp-iterative uniform 0.9", "topkast-0 uniform 0.9",
            "pp-topkast-0 uniform 0.9",
        ),
        steps=600, points=12,
    ),
    "paper": Config(
        data="imagenet", cells=(*TABLE_1, *TABLE_2, *EXTREME), alphas=ONESHOT_ALPHAS, seeds=3,
    ),
}  # fmt: skip

EXPERIMENT = Experiment(
    name="imagenet",
    title="sparse training of ResNet-50 on ImageNet, on any number of GPUs",
    paper="tables 1 and 2, extreme-sparsity figure, figure 3 b and c, section 5.2",
    config=Config,
    presets=PRESETS,
    prepare=prepare,
    jobs=jobs,
    run_job=run_job,
    report=report,
    together=lambda config: config.loaders > 0,
)
