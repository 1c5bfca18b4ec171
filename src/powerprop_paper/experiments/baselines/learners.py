"""The stream, the network and the learner of a method, as the protocol of its benchmark says, and what it is asked."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from inspect import signature
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from powerprop.continual import STRATEGIES, Classification, Scenario, Strategy, accuracy_on
from powerprop.continual.combine import having
from powerprop_paper import data, models
from powerprop_paper.experiments.baselines.protocol import (
    HEADS,
    PROTOCOLS,
    STREAM,
    Plan,
    arguments,
    optimiser_of,
    outputs_of,
    steps_of,
    strength_of,
)
from powerprop_paper.experiments.baselines.published import CLASS
from powerprop_paper.models import fans

if TYPE_CHECKING:
    from powerprop_paper.experiments.baselines.strategies import Config


def load_images(cfg: Config) -> data.Images:
    """The data set, or the last part of its training images and the first of its test images."""
    images = data.load_last(PROTOCOLS[cfg.benchmark].data, cfg.images)
    test = data.first(data.Part(images.test_x, images.test_y), cfg.test)
    return replace(images, test_x=test.x, test_y=test.y)


def make_stream(cfg: Config, images: data.Images, name: str, seed: int) -> list[data.Task]:
    """The tasks of a seed as a method sees them; their images are made when they are asked for."""
    protocol, transform = PROTOCOLS[cfg.benchmark], data.to_float
    if name not in protocol.steps:
        mean, std = data.mean_std(images.train_x)
        transform = partial(data.normalise, mean=mean, std=std)
    options: dict[str, Any] = {"validation": cfg.validation, "transform": transform}
    if protocol.stream == "permuted":
        stream = data.permuted(images, protocol.tasks, seed, **options)
    else:
        stream = data.split(images, images.classes // protocol.tasks, **options)
    return stream[: cfg.tasks or None]


def make_learner(
    cfg: Config, images: data.Images, strategy: str, alpha: float, outputs: str, strength: float, rate: float,
    seed: int, device: torch.device,
) -> Strategy:  # fmt: skip
    """The learner of a job, with the first weights of its seed."""
    protocol, plan = PROTOCOLS[cfg.benchmark], plan_of(cfg, images)
    scenario = outputs_of(cfg.benchmark, strategy, cfg.columns)[outputs][0]
    generator_steps = cfg.generator_steps if cfg.economy else None
    plan = replace(plan, steps=steps_of(cfg.benchmark, strategy, scenario, plan.steps, generator_steps))
    own = arguments(cfg.benchmark, strategy, scenario, plan, cfg.economy)
    if strength != 1:
        own["strength"] = strength * strength_of(strategy, own)
    kind, lr = optimiser_of(cfg.benchmark, strategy)
    lr *= rate

    def optimizer(params: Any) -> Optimizer:
        fused = device.type in ("cpu", "cuda")  # one pass over the weights: a third of the time of a step on a CPU
        return getattr(torch.optim, kind)(params, lr=lr, fused=fused)  # type: ignore[no-any-return]

    options = {
        "steps": plan.steps, "batch_size": protocol.batch, "seed": seed, "alpha": alpha,
        "objective": Classification("stream", among=protocol.among) if outputs == STREAM else Classification(),
        "heads": "heads" if outputs == HEADS else None,
        "carry": protocol.carry and not having(STRATEGIES[strategy], "starts anew"), **own,
    }  # fmt: skip
    return STRATEGIES[strategy](build(cfg, strategy, outputs, images.classes, seed).to(device), optimizer, **options)


def plan_of(cfg: Config, images: data.Images) -> Plan:
    """How long a task is trained, and on how many images."""
    protocol = PROTOCOLS[cfg.benchmark]
    examples = (len(images.train_x) - cfg.validation) // (protocol.tasks if protocol.stream == "split" else 1)
    steps = max(1, round(cfg.epochs * examples / protocol.batch))
    return Plan(cfg.tasks or protocol.tasks, steps, cfg.epochs, examples, cfg.width or protocol.width)


def build(cfg: Config, name: str, outputs: str, classes: int, seed: int) -> nn.Module:
    """The network of a method: with a head for each task, or one output layer for a task's or the stream's classes.

    classes: of the data set.
    """
    protocol = PROTOCOLS[cfg.benchmark]
    own = classes // protocol.tasks if protocol.stream == "split" else classes
    heads, size = (protocol.tasks if outputs == HEADS else 0), own * (protocol.tasks if outputs == STREAM else 1)
    sizes = [784, *[cfg.width or protocol.width] * 2]
    generator = torch.Generator().manual_seed(seed)
    if protocol.model == "alexnet":
        model: nn.Module = models.alexnet(size, heads=heads, generator=generator)
    elif name == "RtF":
        model = models.replay_vae(sizes, size, heads=heads, generator=generator)
    else:
        model = models.mlp([*sizes, size], heads=heads, generator=generator)
    draw_as_torch(model, generator)
    return model


@torch.no_grad()
def draw_as_torch(model: nn.Module, generator: torch.Generator) -> None:
    """The first weights and biases that the protocols' layers have: evenly from ±1/√(fan in)."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            limit = fans(module.weight)[0] ** -0.5
            for parameter in module.parameters():
                parameter.uniform_(-limit, limit, generator=generator)


def infers(learner: Strategy) -> bool:
    """True if the learner finds out tasks, from one image or several."""
    return "group" in signature(learner.predict).parameters


def one_by_one(learner: Strategy) -> dict[str, Any]:
    """Arguments of `predict` by which every image is judged by itself, as other methods do."""
    return {"group": 1} if infers(learner) else {}


def validation(learner: Strategy, stream: list[data.Task], scenario: Scenario) -> float:
    """The average over all tasks on the images that choices are made on."""
    return fmean(accuracy_on(learner, task, scenario, part=task.validation(), **one_by_one(learner)) for task in stream)


def group_accuracy(cfg: Config, learner: Strategy, stream: list[data.Task]) -> float | None:
    """Class-incremental accuracy with tasks inferred from groups of images; None where none are inferred."""
    if not infers(learner):
        return None
    return fmean(accuracy_on(learner, task, CLASS, group=cfg.group) for task in stream)
