"""What a learner of characters is measured by: likelihoods of test images, and images of its own."""

from __future__ import annotations

from functools import partial
from statistics import fmean

import torch
from torch import Tensor

from powerprop.continual import Strategy, log_likelihood
from powerprop.continual.seeds import derived_seed
from powerprop.data import Part, Task
from powerprop.eval_mode import evaluating
from powerprop.models import TaskVAE

CHOSEN, NOISE, IMAGES = range(1, 4)
"""Purposes of random numbers."""


def some(part: Part, count: int, task: int) -> Tensor:
    """So many images at random, the same ones for every method and seed; all for 0."""
    generator = torch.Generator().manual_seed(derived_seed(0, CHOSEN, task))
    order = torch.randperm(len(part.x), generator=generator)
    return part.x[order[: count or None].to(part.x.device)]


def likelihood(learner: Strategy, task: int, x: Tensor, samples: int) -> float:
    """The average log-likelihood of images of a task; the noise is the same whenever it is asked for.

    Methods that have a distribution over weights are measured at its mean, as in the published code of VCL.
    """
    model, generator = learner.model, torch.Generator().manual_seed(derived_seed(learner.seed, NOISE, task))
    assert isinstance(model, TaskVAE)
    with learner.viewing(task), evaluating(model):
        encode, decode = partial(model.encode, task=task), partial(model.decode, task=task)
        return float(log_likelihood(encode, decode, x.to(learner.device), samples, generator=generator).mean())


def likelihoods(learner: Strategy, stream: list[Task], test: int, samples: int) -> list[float]:
    """Of the test images of every task learned so far."""
    known = stream[: learner.current]
    return [likelihood(learner, task.index, some(task.test(), test, task.index), samples) for task in known]


def validation(learner: Strategy, stream: list[Task], count: int, samples: int) -> float:
    """The average over all tasks on images that choices are made on."""
    values = [likelihood(learner, t.index, some(t.validation(), count, t.index), samples) for t in stream]
    return fmean(values)


@torch.no_grad()
def draw(learner: Strategy, tasks: int, count: int) -> Tensor:
    """Images of every task as bytes (tasks, count, pixels): the means of p(x|z), the same z for every method."""
    model, found = learner.model, []
    assert isinstance(model, TaskVAE)
    for task in range(tasks):
        generator = torch.Generator().manual_seed(derived_seed(0, IMAGES, task))
        z = torch.randn(count, model.latent, generator=generator).to(learner.device)
        with learner.viewing(task), evaluating(model):
            found.append(model.decode(z, task).sigmoid())
    return torch.stack(found).mul(255).round().byte().cpu()
