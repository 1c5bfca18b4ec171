"""What pruning will cost, before trying it: a second-order estimate for every fraction kept, from one ranking."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

__all__ = ["loss_increase", "removal_costs"]


def removal_costs(weights: Mapping[str, nn.Parameter], losses: Iterable[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """The estimated increase of the loss if a weight is set to zero: c = -∂L/∂θ·θ + ½ F·θ² (LeCun et al., 1990).

    F, the diagonal of the Fisher information, is the variance of the gradient from input to input: that of the mean
    gradient from batch to batch, times the size of a batch. It needs nothing of the loss but its gradient.

    losses: the loss of some batches, and how many inputs each has.
    """
    names, parameters = list(weights), list(weights.values())
    total, square = ({n: torch.zeros_like(p) for n, p in weights.items()} for _ in range(2))
    count, size = 0, 0
    for loss, inputs in losses:
        for name, g in zip(names, torch.autograd.grad(loss, parameters, materialize_grads=True), strict=True):
            total[name] += g
            square[name].addcmul_(g, g)
        count, size = count + 1, size + inputs
    each, between = 1 / max(1, count), size / max(1, count) / max(1, count - 1)
    costs = {}
    for name, p in weights.items():
        fisher = (square[name] - total[name].square() * each).clamp_(min=0).mul_(between)
        costs[name] = 0.5 * fisher * p.detach() ** 2 - total[name] * each * p.detach()
    return costs


def loss_increase(
    costs: Mapping[str, Tensor], scores: Mapping[str, Tensor], kept: Sequence[float], layerwise: bool
) -> list[float]:
    """The estimated increase of the loss for each fraction kept: the costs of the weights of lowest score, summed."""
    names = [[n] for n in costs] if layerwise else [list(costs)]
    total = [0.0] * len(kept)
    for group in names:
        score = torch.cat([scores[n].detach().flatten() for n in group])
        cost = torch.cat([costs[n].flatten() for n in group])
        removed = cost[score.argsort()].double().cumsum(0)
        for i, fraction in enumerate(kept):
            dropped = len(removed) - math.ceil(fraction * len(removed))
            total[i] += float(removed[dropped - 1]) if dropped else 0.0
    return total
