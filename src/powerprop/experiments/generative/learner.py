"""The stream of characters, and the learner of a job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from powerprop import data
from powerprop.continual import STRATEGIES, Elbo, Strategy
from powerprop.continual.seeds import derived_seed
from powerprop.experiments.generative.config import Config
from powerprop.experiments.harness.rates import equal_rate
from powerprop.models import TaskVAE, task_vae

WEIGHTS = 0
"""The purpose of random numbers for the first weights."""
PIXELS = 784
SHARED, SHARED_WEIGHTS = "shared.*", "shared.*.weight"
PUBLISHED_LOG_VARIANCE = -12.0
"""Of VCL's weights at first: the published code has log σ = -6."""


def load_images(config: Config) -> data.Images:
    """The data set, or the last part of its training images."""
    images = data.load(config.dataset)
    last = slice(-config.images, None)
    return data.Images(
        images.name, images.train_x[last], images.train_y[last], images.test_x, images.test_y, images.class_names,
        images.note,
    )  # fmt: skip


def make_stream(config: Config, images: data.Images, tasks: int) -> list[data.Task]:
    """A task for each of the first characters, pixels in [0, 1]."""
    return data.split(images, 1, validation=config.validation)[:tasks]


def make_learner(config: Config, settings: dict[str, Any], device: torch.device) -> Strategy:
    """The learner of a job, with the first weights of its seed."""
    seed, name, alpha = settings["seed"], settings["strategy"], settings["alpha"]
    generator = torch.Generator().manual_seed(derived_seed(seed, WEIGHTS))
    model = task_vae(PIXELS, config.width, config.latent, generator=generator).to(device)
    with torch.no_grad():
        for parameter in model.shared.parameters():
            parameter.mul_(config.spread)  # biases are 0
    rate = equal_rate(1.0, config.magnitude, alpha) if config.magnitude else 1.0
    momentum = config.momentum_lr if name == "EfficientPackNet" or alpha > 1 else 0.0
    options: dict[str, Any] = {
        "objective": Elbo(), "alpha": alpha, "steps": config.steps, "batch_size": config.batch, "seed": seed,
        "heads": "parts", "where": SHARED_WEIGHTS,
    }  # fmt: skip
    own = own_options(config, name, settings["strength"], settings["damping"])
    return STRATEGIES[name](model, optimizer_of(model, config.lr, momentum, rate), **(options | own))


def own_options(config: Config, name: str, strength: float | None, damping: float) -> dict[str, Any]:
    """What a method has beyond what all have: only the shared decoder is held, distributed or packed."""
    if name == "EfficientPackNet":
        return {"gamma": config.gamma, "search": config.search, "retrain_steps": config.retrain_steps}
    if name == "VCL":
        one_for_now = {"examples": 1}  # set to the images of every task before it begins
        return {
            "samples": config.vcl_samples, "log_variance": PUBLISHED_LOG_VARIANCE, "protect": SHARED, **one_for_now,
        }  # fmt: skip
    if strength is None:
        return {}
    steps = {"steps": config.si_steps} if name == "SI" and config.si_steps else {}
    damped = {"damping": damping} if damping else {}
    return {"strength": strength, "protect": SHARED, **steps, **damped}


def optimizer_of(model: TaskVAE, lr: float, momentum_lr: float, rate: float) -> Any:
    """Adam, or SGD with momentum where a rate for it is given; the shared decoder at so many times the rate.

    Its parameters come second: the parts of later tasks take the rate of the first group.
    """

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        shared = {id(parameter) for parameter in model.shared.parameters()}
        own = [parameter for parameter in parameters if id(parameter) not in shared]
        first = momentum_lr or lr
        groups: list[dict[str, Any]] = [
            {"params": own},
            {"params": list(model.shared.parameters()), "lr": first * rate},
        ]
        fused = own[0].device.type in ("cpu", "cuda")  # one pass over the weights
        if momentum_lr:
            return torch.optim.SGD(groups, lr=first, momentum=0.9, fused=fused)
        return torch.optim.Adam(groups, lr=first, fused=fused)

    return make
