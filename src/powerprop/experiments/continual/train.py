"""Task after task in one network: what the continual-learning experiments share.

Arms (a method and an α) × seeds. A job saves its learner after every task and goes on from there; everything measured
is part of that file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from powerprop import data, models
from powerprop.continual import Classification, EfficientPackNet, PackNet, Strategy, learn_stream
from powerprop.continual.packing.search import FINE
from powerprop.experiments.continual.checks import BY_VALIDATION, METHOD_LABELS, check_tasks
from powerprop.experiments.continual.config import Config
from powerprop.experiments.continual.measure import Measures
from powerprop.experiments.continual.tasklog import StepCount, TaskLog
from powerprop.experiments.harness.experiment import Job, Results
from powerprop.experiments.harness.parallel import Progress
from powerprop.models.init import fans
from powerprop.select import select
from powerprop.train import MetricsLog, NonFiniteError
from powerprop.train.distributed import local_device


@dataclass(frozen=True)
class Arm:
    """One row of the table: a method and an α."""

    method: str
    alpha: float

    @property
    def label(self) -> str:
        """What the reader sees."""
        name = METHOD_LABELS[self.method]
        return name if self.alpha == 1 else f"Powerprop + {name}, α={self.alpha:g}"

    def job(self, seed: int) -> Job:
        """The run of this arm from a seed."""
        settings = {"method": self.method, "alpha": self.alpha, "seed": seed}
        return Job(f"{self.method}-alpha{self.alpha:g}-seed{seed}", settings)


def arms(config: Config) -> list[Arm]:
    """Every method at every α."""
    return [Arm(method, alpha) for method in config.methods for alpha in config.alphas]


def jobs(config: Config, results: Results) -> list[Job]:
    """All arms and seeds; nothing is tuned."""
    return [arm.job(seed) for seed in range(config.seeds) for arm in arms(config)]


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


def equal_rate(lr: float, magnitude: float, alpha: float) -> float:
    """The rate at which a weight of this size learns under α as fast as at `lr` without: lr·|w|^(2/α-2)/α²."""
    return float(lr * magnitude ** (2 / alpha - 2) / alpha**2)


def run_job(config: Config, job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
    """Learn all tasks, from the saved learner in the folder if there is one, and measure."""
    device = local_device()
    images = load_images(config)
    stream = make_stream(config, images.to(device), job.settings["seed"])
    learner = make_learner(config, job.settings, device)
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


def make_learner(config: Config, settings: dict[str, Any], device: torch.device) -> Strategy:
    """The learner of an arm, with the first weights of its seed."""
    learning_rate = rate(config, settings["alpha"])

    def optimizer(params: list[nn.Parameter]) -> Optimizer:
        return SGD(params, lr=learning_rate)

    options: dict[str, Any] = {
        "alpha": settings["alpha"], "seed": settings["seed"], "steps": config.steps, "batch_size": config.batch,
        "retrain_steps": config.retrain_steps, "clip": config.clip or None, "schedule": partial(falling, config.decay),
        "objective": Classification("stream" if config.stream == "split" and config.model == "mlp" else "task"),
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


def downwards(grid: tuple[float, ...]) -> tuple[float, ...]:
    """The grid, and the smaller fractions that a frugal task may do with."""
    return (*grid, *(kept for kept in FINE if kept < grid[-1]))


def build(config: Config, seed: int) -> nn.Module:
    """The network: 784-width-width-10 with one output layer, or the AlexNet-like one with an output layer per task."""
    generator = torch.Generator().manual_seed(seed)
    if config.model == "alexnet":
        model: nn.Module = models.alexnet(100 // config.tasks, heads=config.tasks, generator=generator)
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
