"""The networks of soft actor-critic: a policy with a head per task, and two critics in one batched product."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop_paper.models import Heads

__all__ = ["Actor", "TwinCritic", "TwinHeads", "TwinLinear", "TwinNorm"]

SLOPE = 0.2
"""Of the leaky ReLU below zero, as Continual World has it."""
TWINS = 2


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
