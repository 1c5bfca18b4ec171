"""The streams that tasks are inferred on, plain or standardised, and inputs that are of none of their tasks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from powerprop import data
from powerprop.data.streams import pixel_order
from powerprop.experiments.inference.config import Config

LEAST_VARIANCE = 0.01
"""Added to the variance of a pixel, so that those which hardly vary are not blown up."""
FOREIGN = ("notMNIST", "uniform noise", "inverted digits", "another order of the pixels")


def make_stream(config: Config, kind: str, inputs: str, seed: int, images: data.Images) -> data.Stream:
    """The tasks of a seed."""
    if kind == "split":
        stream = data.split(images, 2, validation=config.validation)
    else:
        make = data.permuted if kind == "permuted" else data.rotated
        stream = make(images, config.tasks, seed, validation=config.validation)
    return stream if inputs == "plain" else standardised(stream)


def standardised(stream: data.Stream) -> data.Stream:
    """Every pixel of every task with mean 0 and variance 1 in its training images."""

    @cache
    def moments(index: int) -> tuple[Tensor, Tensor]:
        x = stream[index].train().x
        return x.mean(0), (x.var(0) + LEAST_VARIANCE).sqrt()

    def make(index: int) -> data.Task:
        task = stream[index]
        return replace(task, view=partial(_standardised, task, *moments(index)))

    return data.Stream(len(stream), make)


def _standardised(task: data.Task, mean: Tensor, std: Tensor, part: data.Part) -> data.Part:
    x, y = task.view(part)
    return data.Part((x - mean) / std, y)


def foreign(config: Config, task: data.Task, images: data.Images, seed: int) -> dict[str, Tensor]:
    """Images of no task, as the first task's preparation shows them to the network, by kind."""
    shown = data.to_float(images.test_x[-config.probe :])
    plain = {
        "notMNIST": data.to_float(data.load("notmnist").test_x[: config.probe]),
        "uniform noise": torch.rand(shown.shape, generator=torch.Generator().manual_seed(seed)),
        "inverted digits": 1 - shown,
        "another order of the pixels": shown.flatten(2)[:, :, pixel_order(784, seed, 10_000)].view_as(shown),
    }
    view = task.view
    if isinstance(view, partial) and view.func is _standardised:
        _, mean, std = view.args
        plain = {name: (x - mean) / std for name, x in plain.items()}
    return plain
