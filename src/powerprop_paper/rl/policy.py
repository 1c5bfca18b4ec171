"""Gaussian policies squashed into [-1, 1], and what protecting actors and critics needs to know of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from powerprop.continual.objective import Model, Objective

__all__ = ["Policy", "Values", "gaussian", "squashed"]

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


class Values(Objective):
    """What critics learn: the loss is soft actor-critic's. As means of Gaussians they have the information E Σ (∂Q_i)².

    critic_loss: of (critics, transitions, task).
    """

    def __init__(self, critic_loss: Callable[[Model, Any, int], Tensor]) -> None:
        self.critic_loss = critic_loss

    def loss(self, model: Model, batch: Any, task: int) -> Tensor:
        return self.critic_loss(model, batch, task)

    def information(self) -> Sequence[Callable[[Model, Any, int], Tensor]]:
        """Both values."""
        return [partial(_value, self, critic) for critic in range(2)]

    def inputs(self, batch: Any) -> Tensor:
        """Observations with actions beside them."""
        return torch.cat([batch[0], batch[1]], 1)

    def options(self) -> dict[str, Any] | None:
        return None


def _value(values: Values, critic: int, model: Model, batch: Any, task: int) -> Tensor:
    found: Tensor = model(values.inputs(batch))[critic]
    return found.mean()


def _term(policy: Policy, k: int, of_mean: bool, model: Model, batch: Any, task: int) -> Tensor:
    mean, log_std = gaussian(model(policy.inputs(batch)))
    each = mean[:, k] * torch.exp(-log_std[:, k].detach()) if of_mean else math.sqrt(2) * log_std[:, k]
    return each.mean()
