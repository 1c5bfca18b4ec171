"""Every method of the paper's table 1, with and without Powerprop: the table, extended training, extreme sparsity.

Rows are methods, columns are sparsities with their distribution. All rows share the network, the batches, the optimiser
(SGD with momentum, cosine schedule) and the number of steps; the learning rate of each row is chosen on validation
images at one column, over all seeds of the rates that come near the best. The rules for single layers are the paper's:
a first convolution stays dense and the last layer at most 80% sparse, except under ERK. The paper's own table is of
ResNet-50 on ImageNet (experiment `imagenet`); here the same rows are trained where two cores can do it.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import powerprop as pp
from powerprop import data
from powerprop.allocate import Layers
from powerprop.experiments.harness import images
from powerprop.experiments.harness.experiment import Experiment, Job
from powerprop.experiments.harness.parallel import Progress
from powerprop.experiments.sparse.config import CIFAR_PRESETS, MNIST_PRESETS, TASKS, Config
from powerprop.experiments.sparse.costs import training_cost
from powerprop.experiments.sparse.report import findings
from powerprop.experiments.sparse.rows import ROWS, Row, asked
from powerprop.experiments.sparse.tuning import jobs
from powerprop.flops import count_flops
from powerprop.sparsify.base import Method
from powerprop.train import MetricsLog, evaluate, fit
from powerprop.train.distributed import local_device
from powerprop.train.precision import Precision


def prepare(config: Config) -> None:
    """Find the data, or download it, and refuse settings that it does not fit, before a job runs."""
    data.load(TASKS[config.task].data).split_validation(config.validation)


def layer_rules(config: Config, distribution: str) -> Layers:
    """A first convolution stays dense, the last layer at most 80% sparse; ERK prunes them too (appendix C)."""
    return {} if distribution == "erk" else TASKS[config.task].rules


def run_job(config: Config, job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
    """Train one cell of the table and measure it."""
    device = local_device()
    task, settings = TASKS[config.task], job.settings
    row = ROWS[settings["row"]]
    splits = load_splits(config).to(device)
    # The same seed gives every row the same initial weights and the same batches.
    model = task.build(torch.Generator().manual_seed(settings["seed"])).to(device)
    if task.convolutions:
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
    return measure(config, model, optimizer, masks, splits, settings)


def make_optimizer(config: Config, model: nn.Module, row: Row, settings: dict[str, Any], steps: int) -> pp.Powerprop:
    """SGD with momentum, the row's method and its α."""
    base = torch.optim.SGD(
        model.parameters(), settings["lr"], momentum=config.momentum, weight_decay=config.weight_decay,
        nesterov=config.nesterov,
    )  # fmt: skip
    rules = layer_rules(config, settings["distribution"])
    method = row.make(
        settings["sparsity"], settings["distribution"], steps, rules, settings["seed"], config.refresh, config.regrow,
        config.explore,
    )  # fmt: skip
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
    precision = Precision(config.precision, next(model.parameters()).device.type)
    augment = images.moved(config.shift) if TASKS[config.task].convolutions else None
    batches = data.Batches(*splits.train, config.batch, generator, augment)
    with MetricsLog(folder / "metrics.jsonl") as log:
        fit(
            model,
            optimizer,
            batches,
            steps,
            loss=partial(cross_entropy, label_smoothing=config.label_smoothing),
            precision=precision,
            schedule=lambda step: rate(step / steps, config.warmup),
            clip=config.clip or None,
            checkpoint=folder / "checkpoint.pt",
            checkpoint_every=config.every,
            log=log,
            evaluate=lambda model: {"accuracy": images.accuracy_in(precision, model, splits.validation)},
            eval_every=config.every,
            progress=lambda step, values: progress(step / steps, {"step": step, **values}),
        )


def rate(done: float, warmup: float) -> float:
    """The learning rate when a fraction of the training is done: a linear rise, and the fall of a cosine over it."""
    rising = min(1.0, done / warmup) if warmup else 1.0
    return rising * (1 + math.cos(math.pi * done)) / 2


def measure(
    config: Config, model: nn.Module, optimizer: pp.Powerprop, masks: pp.Masks, splits: data.Splits,
    settings: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Accuracies, the sparsity that was reached, and FLOPs relative to dense training."""
    counts = {n: int(m.count_nonzero()) for n, m in masks.items()}
    flops = count_flops(model, tuple(splits.test.x.shape[1:]))
    method = optimizer.sparsify if isinstance(optimizer.sparsify, Method) else None
    return {
        "test": evaluate(model, *splits.test, batch=images.AT_ONCE).accuracy,
        "validation": evaluate(model, *splits.validation, batch=images.AT_ONCE).accuracy,
        "kept": counts,
        "asked": asked(masks, settings, layer_rules(config, settings["distribution"])),
        "sparsity": masks.sparsity(),
        "inference_flops": flops.inference(masks),
        "training_flops": training_cost(flops, method, masks, optimizer.trainable),
    }


def load_splits(config: Config) -> data.Splits:
    """Training, validation and test images as floats; CIFAR's standardised."""
    task = TASKS[config.task]
    pixels = "standard" if task.convolutions else "unit"
    return images.load_splits(task.data, pixels, config.validation, config.train, config.test)


def _experiment(name: str, title: str, presets: dict[str, Config]) -> Experiment:
    return Experiment(
        name=name, title=title, paper="tables 1 and 2, extreme-sparsity figure, section 5.2", presets=presets,
        prepare=prepare, jobs=jobs, run_job=run_job, report=findings,
    )  # fmt: skip


EXPERIMENT = _experiment("sparse-training", "every sparse-training method on MNIST, LeNet-300-100", MNIST_PRESETS)
CIFAR = _experiment(
    "sparse-training-cifar", "every sparse-training method on CIFAR-10, a network made for speed", CIFAR_PRESETS
)
