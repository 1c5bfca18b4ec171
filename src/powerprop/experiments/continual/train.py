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
from powerprop.continual import GRID, EfficientPackNet, PackNet, Strategy, learn_stream
from powerprop.experiments.continual.checks import METHODS, check_config, check_images
from powerprop.experiments.continual.measure import Measures
from powerprop.experiments.continual.tasklog import TaskLog
from powerprop.experiments.harness.experiment import Job, Results
from powerprop.experiments.harness.parallel import Progress
from powerprop.models.init import fans
from powerprop.select import select
from powerprop.train import MetricsLog, NonFiniteError


@dataclass(frozen=True)
class Config:
    """The settings of a continual-learning experiment.

    Args:
        data: name of the data set.
        stream: "permuted" (the pixels of every task in an order of its own) or "split" (some classes per task).
        model: "mlp" (two hidden layers, one output layer for all tasks) or "alexnet" (one output layer per task).
        tasks: how many; a split stream has the classes of the data in equal parts.
        alphas: powers; 1 is the method without Powerpropagation.
        lr: learning rate at α = 1.
        seeds: runs of each arm: first weights, order of pixels, batches.
        steps: of training per task.
        retrain_steps: after pruning.
        gamma: fraction of the dense validation accuracy that a sub-network must keep.
        methods: "efficient-packnet", "packnet".
        scale_lr: let the learning rate grow with α so that a weight of size `magnitude` learns equally fast:
            lr·α²|w|^(2-2/α) is the same for all α. Otherwise all have the same.
        magnitude: a typical weight.
        decay: let the learning rate fall to zero along these phases: "training", "retraining".
        spread: the standard deviation of the first weights, and of those that are initialised again, in units of
            Glorot's. Small ones leave the largest weights to those that have learned something.
        clip: the largest norm of a gradient, as `Strategy` takes it; 0 is any.
        batch: images per step.
        width: units of a hidden layer of the mlp.
        search: how the sparsity of a task is found: "linear", "binary" or "taylor".
        grid: kept fractions to choose from.
        distribution: "global" ranks all weights together, "uniform" keeps the same fraction of each layer.
        images: only the last so many training images of the data are used; 0 means all.
        validation: the last so many training images of the data decide the sparsity.
        test: the first so many test images of a task are measured; 0 means all.
        matrix: measure all tasks after each one, and the whole test set with inferred tasks at the end.
        groups: sizes of the groups of images whose task is inferred together.
        infer_at: numbers of tasks after which inference is probed, besides the last.
        probed: so many tasks, evenly spaced, are probed.
        probe: test images of each.
    """

    data: str
    stream: str
    tasks: int
    alphas: tuple[float, ...]
    lr: float
    seeds: int
    steps: int
    retrain_steps: int
    gamma: float
    model: str = "mlp"
    methods: tuple[str, ...] = ("efficient-packnet",)
    scale_lr: bool = True
    magnitude: float = 0.03
    decay: tuple[str, ...] = ()
    spread: float = 1.0
    clip: float = 0.0
    batch: int = 64
    width: int = 1000
    search: str = "linear"
    grid: tuple[float, ...] = GRID
    distribution: str = "global"
    images: int = 0
    validation: int = 5000
    test: int = 0
    matrix: bool = True
    groups: tuple[int, ...] = (1, 4, 16, 64, 128)
    infer_at: tuple[int, ...] = ()
    probed: int = 10
    probe: int = 512

    def __post_init__(self) -> None:
        check_config(self)


@dataclass(frozen=True)
class Arm:
    """One row of the table: a method and an α."""

    method: str
    alpha: float

    @property
    def label(self) -> str:
        """What the reader sees."""
        name = METHODS[self.method]
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
    if "efficient-packnet" in config.methods and not config.validation:
        raise ValueError(f"validation must be at least 1, which efficient-packnet decides by, got {config.validation}")
    check_images(config, load_images(config))


def rate(config: Config, alpha: float) -> float:
    """The learning rate of an α: lr(α)·α²|w|^(2-2/α) = lr(1) for weights of the typical size."""
    if not config.scale_lr:
        return config.lr
    return float(config.lr * config.magnitude ** (2 / alpha - 2) / alpha**2)


def run_job(config: Config, job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
    """Learn all tasks, from the saved learner in the folder if there is one, and measure."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = load_images(config)
    stream = make_stream(config, images.to(device), job.settings["seed"])
    learner = make_learner(config, job.settings, device)
    measures = Measures(config, learner, stream)

    whole = config.steps + config.retrain_steps
    diverged = {}
    with MetricsLog(folder / "metrics.jsonl") as log:
        lines = TaskLog(log, learner, whole)

        def heard(phase: str, step: int, loss: float) -> None:
            step += config.steps if phase == "retraining" else 0
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
        "labels": "stream" if config.stream == "split" and config.model == "mlp" else "task",
        "heads": "heads" if config.model == "alexnet" else None,
    }  # fmt: skip
    model = build(config, settings["seed"]).to(device)
    if settings["method"] == "packnet":
        return PackNet(model, optimizer, config.tasks, **options)
    options |= {
        "gamma": config.gamma,
        "search": config.search,
        "grid": config.grid,
        "distribution": config.distribution,
    }
    return EfficientPackNet(model, optimizer, **options)


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
