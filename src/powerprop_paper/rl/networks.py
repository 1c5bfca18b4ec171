"""Networks and objectives of soft actor-critic: a Gaussian policy with a head per task, squashed into [-1, 1], and two
critics in one batched product; with what protecting them needs to know."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop.continual.objective import Model, Objective
from powerprop_paper.models import Heads

SLOPE = 0.2
"""Of the leaky ReLU below zero, as Continual World has it."""
TWINS = 2
LOG_STD = (-20.0, 2.0)
HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


class Actor(nn.Module):
    """A Gaussian policy before squashing: observations to (mean, log standard deviation) of every action.

    Linear, layer norm and tanh first, then linear layers with leaky ReLU, as in Continual World (Wołczyk et al., 2021).
    Every task has an output layer `heads.<task>`.
    """

    def __init__(
        self, observations: int, actions: int, *, width: int = 256, layers: int = 4, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.first = nn.Linear(observations, width)
        self.norm = nn.LayerNorm(width)
        self.rest = nn.ModuleList(nn.Linear(width, width) for _ in range(layers - 1))
        self.heads = Heads(width, 2 * actions, 0)
        for layer in (self.first, *self.rest):
            _glorot_(layer.weight, generator)
            nn.init.zeros_(layer.bias)
        self.heads.add(generator)

    def forward(self, observation: Tensor, task: int) -> Tensor:
        x = torch.tanh(self.norm(self.first(observation)))
        for layer in self.rest:
            x = F.leaky_relu(layer(x), SLOPE)
        return self.heads(x, task)  # type: ignore[no-any-return]


class TwinLinear(nn.Module):
    """Two linear layers side by side: (2, rows, inputs) to (2, rows, outputs) in one batched product."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(TWINS, inputs, outputs))
        self.bias = nn.Parameter(torch.empty(TWINS, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class TwinNorm(nn.Module):
    """Two layer norms side by side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(TWINS, 1, width))
        self.bias = nn.Parameter(torch.zeros(TWINS, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, F.layer_norm(x, x.shape[-1:]), self.weight)


class TwinHeads(nn.Module):
    """The last layers of two critics, a pair called `heads.<task>` for every task."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def add(self, generator: torch.Generator) -> None:
        """One more pair, for the next task, on the device of the others."""
        head, like = TwinLinear(self.width, 1), next(self.parameters(), None)
        _reset(head, generator)
        self.add_module(str(len(self._modules)), head if like is None else head.to(like))

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.get_submodule(str(task))(x)  # type: ignore[no-any-return]


class TwinCritic(nn.Module):
    """Q₁ and Q₂ of observations with actions beside them, (2, rows): own weights, one batched product.

    A task has a head of its own, though the networks begin anew with every task unless they are protected: a critic
    that rehearses, or keeps sub-networks, must tell tasks apart.
    """

    def __init__(
        self, observations: int, actions: int, *, width: int = 256, layers: int = 4, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.first = TwinLinear(observations + actions, width)
        self.norm = TwinNorm(width)
        self.rest = nn.ModuleList(TwinLinear(width, width) for _ in range(layers - 1))
        self.heads = TwinHeads(width)
        self.heads.add(generator)
        self.reset(generator)

    def forward(self, x: Tensor, task: int) -> Tensor:
        x = torch.tanh(self.norm(self.first(x.expand(TWINS, -1, -1))))
        for layer in self.rest:
            x = F.leaky_relu(layer(x), SLOPE)
        return self.heads(x, task).squeeze(-1)  # type: ignore[no-any-return]

    def reset(self, generator: torch.Generator) -> None:
        """Begin anew with other weights, in place."""
        for module in self.modules():
            if isinstance(module, TwinLinear):
                _reset(module, generator)
            elif isinstance(module, TwinNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)


def _reset(layer: TwinLinear, generator: torch.Generator) -> None:
    _glorot_(layer.weight, generator)
    nn.init.zeros_(layer.bias)


@torch.no_grad()
def _glorot_(weight: Tensor, generator: torch.Generator) -> None:
    """Uniform Glorot, Keras's own; drawn on the CPU, so that weights are the same everywhere."""
    limit = math.sqrt(6 / sum(weight.shape[-2:]))
    weight.copy_(torch.empty(weight.shape).uniform_(-limit, limit, generator=generator))


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
