"""Task after task in one network: what the continual-learning experiments share.

A job saves its learner after every task and goes on from there; everything measured
is part of that file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from powerprop import data, models
from powerprop.continual import Classification, EfficientPackNet, PackNet, accuracy_on, learn_stream
from powerprop.continual.packing.base import Packing
from powerprop.continual.packing.search import FINE
from powerprop.continual.seeds import derived_seed, number_of
from powerprop.experiments.continual.candidates import with_candidate
from powerprop.experiments.continual.checks import BY_VALIDATION, check_tasks
from powerprop.experiments.continual.config import Config
from powerprop.experiments.continual.measure import Measures
from powerprop.experiments.continual.tasklog import StepCount, TaskLog
from powerprop.experiments.harness.experiment import Job
from powerprop.experiments.harness.images import moved
from powerprop.experiments.harness.parallel import Progress
from powerprop.experiments.harness.rates import equal_rate
from powerprop.models.init import fans
from powerprop.select import select
from powerprop.train import MetricsLog, NonFiniteError
from powerprop.train.distributed import local_device
from powerprop.train.precision import Precision, products_in


class OfImages(Classification):
    """Classification of images that are moved and mirrored while a network learns them, as `images.moved` does it.

    Passes of training compute in some precision; scores and answers are of images as they are, in float32. What is
    drawn depends on the seed and the task alone, so that a learner that was saved after a task goes on bit for bit.
    """

    mixes_tasks = True

    def __init__(self, precision: str, device: torch.device, shift: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.device, self.precision = device, Precision(precision, device.type)
        self.moved, self.seed = moved(shift), seed

    def begin(self, task: int, classes: Sequence[int] | None) -> None:
        super().begin(task, classes)
        self.generator = torch.Generator().manual_seed(derived_seed(self.seed, task, number_of("moved images")))

    def loss(self, model: Any, batch: Any, task: int | Tensor) -> Tensor:
        x, y = batch
        with self.precision.autocast(self.device):
            return super().loss(model, (self.moved(x, self.generator), y), task)


def prepare(config: Config) -> None:
    """Find the data, or download it, before several processes ask for it."""
    data.load(config.data)


def prepare_tasks(config: Config) -> None:
    """Find the data, and refuse settings that it does not fit, before a job runs."""
    for method in config.methods:
        if method in BY_VALIDATION and not config.validation:
            raise ValueError(f"validation must be at least 1, which {method} decides by, got {config.validation}")
    check_tasks(config, load_images(config))


def rate(config: Config, alpha: float) -> float:
    """The learning rate of an α: lr(α)·α²|w|^(2-2/α) = lr(1) for weights of the typical size."""
    if not config.scale_lr:
        return config.lr
    return equal_rate(config.lr, config.magnitude, alpha)


def run_job(config: Config, job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
    """Learn all tasks, from the saved learner in the folder if there is one, and measure."""
    with products_in(product_precision(config)):
        return _run_job(config, job, folder, progress)


def product_precision(config: Config) -> str:
    """Of the factors in products of matrices; a network of convolutions has a precision of its passes instead."""
    return config.precision if config.model == "mlp" else "float32"


def _run_job(config: Config, job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
    config = with_candidate(config, job.settings.get("candidate", ""))
    device = local_device()
    images = load_images(config)
    stream = make_stream(config, images.to(device), job.settings["seed"])
    learner = make_learner(config, job.settings, device)
    if job.settings.get("trial"):
        return run_trial(learner, stream[: config.tuning_tasks], folder, progress)
    measures = Measures(config, learner, stream)

    whole = config.steps + config.retrain_steps
    steps = StepCount()
    diverged = {}
    with MetricsLog(folder / "metrics.jsonl") as log:
        lines = TaskLog(log, learner, whole)

        def heard(phase: str, step: int, loss: float) -> None:
            step = steps.after(phase, step)
            lines.write(step, loss=loss)
            so_far = {"task": learner.current + 1, "loss": loss, **measures.latest}
            progress((learner.current + step / whole) / len(stream), so_far)

        def learned(task: data.Task) -> None:
            measures.after_task(task)
            lines.end_task(**measures.latest)

        try:
            learn_stream(
                learner, stream, (), checkpoint=folder / "learner.safetensors", after_task=learned, progress=heard
            )
        except NonFiniteError as error:
            diverged = {"diverged": f"task {learner.current}: {error}"}
        return {**diverged, "note": images.note, **lines.other_records()}


def run_trial(learner: Packing, stream: Sequence[data.Task], folder: Path, progress: Progress) -> dict[str, Any]:
    """Learn the first tasks and measure them on validation images alone."""

    def learned(task: data.Task) -> None:
        learner.records.setdefault("used", []).append(learner.nets.masks.used())

    def heard(phase: str, step: int, loss: float) -> None:
        progress(learner.current / len(stream), {"task": learner.current + 1, "loss": loss})

    try:
        learn_stream(learner, stream, (), checkpoint=folder / "learner.safetensors", after_task=learned, progress=heard)
    except NonFiniteError as error:
        return {"diverged": f"task {learner.current}: {error}"}
    found = [accuracy_on(learner, task, "task-incremental", part=task.validation()) for task in stream]
    return {"validation": fmean(found), "used": learner.records["used"]}


def load_images(config: Config) -> data.Images:
    """The data set, or the last part of its training images."""
    images = data.load(config.data)
    return replace(images, train_x=images.train_x[-config.images :], train_y=images.train_y[-config.images :])


def make_stream(config: Config, images: data.Images, seed: int) -> data.Stream:
    """The tasks of a seed."""
    if config.stream == "permuted":
        return data.permuted(images, config.tasks, seed, validation=config.validation)
    if config.stream == "rotated":
        return data.rotated(images, config.tasks, seed, validation=config.validation)
    transform = data.to_float
    if images.shape[0] > 1:
        mean, std = data.mean_std(images.train_x)
        transform = partial(data.normalise, mean=mean, std=std)
    return data.split(images, images.classes // config.tasks, validation=config.validation, transform=transform)


def make_learner(config: Config, settings: dict[str, Any], device: torch.device) -> Packing:
    """The learner of an arm, with the first weights of its seed."""
    learning_rate = rate(config, settings["alpha"])

    def optimizer(params: list[nn.Parameter]) -> Optimizer:
        return SGD(params, lr=learning_rate, momentum=config.momentum)

    options: dict[str, Any] = {
        "alpha": settings["alpha"], "seed": settings["seed"], "steps": config.steps, "batch_size": config.batch,
        "retrain_steps": config.retrain_steps, "clip": config.clip or None, "schedule": partial(falling, config.decay),
        "objective": make_objective(config, device, settings["seed"]),
        "heads": "heads" if config.model == "alexnet" else None,
    }  # fmt: skip
    model = build(config, settings["seed"]).to(device)
    if settings["method"] == "packnet":
        return PackNet(model, optimizer, config.tasks, **options)
    options |= {"gamma": config.gamma, "grid": config.grid, "search": config.search}
    options |= {"distribution": config.distribution, "when_full": "train"}
    if settings["method"] == "frugal-packnet":
        options |= {
            "gamma": config.frugal_gamma, "grid": downwards(config.grid), "prunings": config.prunings,
            "pruning_steps": config.pruning_steps, "reuse": config.reuse, "share": config.share, "when_full": "masks",
        }  # fmt: skip
    return EfficientPackNet(model, optimizer, **options)


def make_objective(config: Config, device: torch.device, seed: int) -> Classification:
    """The library's own, which a saved learner can be made with again, unless images go through something first."""
    if config.model == "mlp":
        return Classification("stream" if config.stream == "split" else "task")
    if config.precision == "float32" and not config.shift:
        return Classification()
    return OfImages(config.precision, device, config.shift, seed)


def downwards(grid: tuple[float, ...]) -> tuple[float, ...]:
    """The grid, and the smaller fractions that a frugal task may do with."""
    return (*grid, *(kept for kept in FINE if kept < grid[-1]))


def build(config: Config, seed: int) -> nn.Module:
    """The network: 784-width-width-10 with one output layer, or the AlexNet-like one with an output layer per task."""
    generator = torch.Generator().manual_seed(seed)
    if config.model == "alexnet":
        model: nn.Module = models.alexnet(100 // config.tasks, heads=config.tasks, generator=generator)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    else:
        model = models.mlp([784, config.width, config.width, 10], generator=generator)
    spread_evenly(model, config.spread, generator)
    return model


@torch.no_grad()
def spread_evenly(model: nn.Module, spread: float, generator: torch.Generator) -> None:
    """Draw the weights of all shared layers evenly from an interval, with Glorot's variance times spread²."""
    for name, weight in select(model).items():
        if not name.startswith("heads."):
            limit = spread * (6 / sum(fans(weight))) ** 0.5
            weight.uniform_(-limit, limit, generator=generator)


def falling(phases: tuple[str, ...], phase: str, done: float) -> float:
    """The factor of the learning rate: from 1 to 0 along the phases named, 1 in the others."""
    return 1.0 - done if phase in phases else 1.0
