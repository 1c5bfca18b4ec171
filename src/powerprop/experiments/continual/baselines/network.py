"""The networks of the protocols."""

from __future__ import annotations

import torch
from torch import nn

from powerprop import models
from powerprop.experiments.continual.baselines.config import Config
from powerprop.experiments.continual.baselines.protocol import HEADS, PROTOCOLS, STREAM
from powerprop.models.init import fans


def build(config: Config, name: str, outputs: str, classes: int, seed: int) -> nn.Module:
    """The network of a method: with a head for each task, or one output layer for a task's or the stream's classes.

    classes: of the data set.
    """
    protocol = PROTOCOLS[config.benchmark]
    own = classes // protocol.tasks if protocol.stream == "split" else classes
    heads, size = (protocol.tasks if outputs == HEADS else 0), own * (protocol.tasks if outputs == STREAM else 1)
    sizes = [784, *[config.width or protocol.width] * 2]
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
