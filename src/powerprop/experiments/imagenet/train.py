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
from powerprop.data.picture_batches import PictureBatches
from powerprop.experiments.harness.experiment import Experiment, Job
from powerprop.experiments.harness.parallel import Progress
from powerprop.experiments.imagenet.cells import MODELS, Cell, cell
from powerprop.experiments.imagenet.config import PRESETS, Config, cells_of
from powerprop.experiments.imagenet.measure import measure, score
from powerprop.experiments.imagenet.report import report
from powerprop.experiments.sparse.rows import ROWS
from powerprop.select import select
from powerprop.train import MetricsLog, fit
from powerprop.train.distributed import current_ranks, local_device
from powerprop.train.precision import Precision

EPOCHS = 32_000 * 4_096 / 1_281_167
"""The epochs of a single cycle, 102.3; the learning-rate schedule counts in them, also in shortened runs."""


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


EXPERIMENT = Experiment(
    name="imagenet",
    title="sparse training of ResNet-50 on ImageNet, on any number of GPUs",
    paper="tables 1 and 2, extreme-sparsity figure, figure 3 b and c, section 5.2",
    presets=PRESETS, prepare=prepare, jobs=jobs, run_job=run_job, report=report,
    in_turn=lambda config: config.loaders > 0,
)  # fmt: skip
