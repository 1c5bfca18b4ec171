"""Gaussian policies squashed into [-1, 1], and what protecting one needs to know of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from powerprop.continual.objective import Model, Objective

__all__ = ["Policy", "gaussian", "squashed"]

LOG_STD = (-20.0, 2.0)
HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


def gaussian(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log standard deviation of every action, before squashing."""
    mean, log_std = outputs.chunk(2, -1)
    return mean, log_std.clamp(*LOG_STD)


def squashed(outputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Actions a = tanh(u), u = μ + σ·noise, and the logarithm of their likelihood under a standard normal noise.

    log π(a) = Σ_k log N(u_k; μ_k, σ_k²) - log(1 - a_k²),   log(1 - tanh²u) = 2 (log 2 - u - softplus(-2u))
    """
    mean, log_std = gaussian(outputs)
    u = torch.addcmul(mean, log_std.exp(), noise)
    slope = 2 * (math.log(2) - u - F.softplus(-2 * u))
    return torch.tanh(u), (-0.5 * noise.square() - log_std - HALF_LOG_TWO_PI - slope).sum(-1)


class Policy(Objective):
    """What an actor learns: the loss is soft actor-critic's, the answer the most likely action.

    The Fisher information of a Gaussian is known in closed form, so that no action need be drawn for it:

        F = E_s Σ_k (∂μ_k)²/σ_k² + 2 (∂ log σ_k)²

    actor_loss: of (policy, transitions, task).
    actions: how many numbers an action has.
    """

    def __init__(self, actor_loss: Callable[[Model, Any, int], Tensor], actions: int) -> None:
        self.actor_loss, self.actions = actor_loss, actions

    def loss(self, model: Model, batch: Any, task: int) -> Tensor:
        return self.actor_loss(model, batch, task)

    def information(self) -> Sequence[Callable[[Model, Any, int], Tensor]]:
        """μ_k/σ_k with σ_k held, and √2 log σ_k, for every action k."""
        return [partial(_term, self, k, of_mean) for k in range(self.actions) for of_mean in (True, False)]

    def predict(self, model: Model, x: Tensor, task: int | None) -> Tensor:
        """The most likely action."""
        return torch.tanh(super().predict(model, x, task).chunk(2, -1)[0])

    def options(self) -> dict[str, Any] | None:
        return None


def _term(policy: Policy, k: int, of_mean: bool, model: Model, batch: Any, task: int) -> Tensor:
    mean, log_std = gaussian(model(policy.inputs(batch)))
    each = mean[:, k] * torch.exp(-log_std[:, k].detach()) if of_mean else math.sqrt(2) * log_std[:, k]
    return each.mean()
