"""What pruning will cost, before trying it: a second-order estimate for every fraction kept, from one ranking."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["loss_increase", "removal_costs"]


def removal_costs(
    weights: Mapping[str, nn.Parameter],
    outputs: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """The estimated increase of the loss if a weight is set to zero: c = -∂L/∂θ·θ + ½ F·θ² (LeCun et al., 1990).

    F is the diagonal of the Fisher information, estimated from batches of size B with labels drawn from the network's
    own predictions: their mean gradient is zero, so that B times its square has the right expectation.
    """
    names, parameters = list(weights), list(weights.values())
    gradient = {n: torch.zeros_like(p) for n, p in weights.items()}
    fisher = {n: torch.zeros_like(p) for n, p in weights.items()}
    count = 0
    for x, y in batches:
        logits = outputs(x)
        drawn = torch.multinomial(logits.detach().softmax(1).cpu(), 1, generator=generator)[:, 0].to(logits.device)
        true = _gradient(F.cross_entropy(logits, y), parameters)
        model = _gradient(F.cross_entropy(logits, drawn), parameters)
        for name, g, s in zip(names, true, model, strict=True):
            gradient[name] += g
            fisher[name].addcmul_(s, s, value=len(x))
        count += 1
    return {
        n: (0.5 * fisher[n] * p.detach() ** 2 - gradient[n] * p.detach()).div_(max(1, count))
        for n, p in weights.items()
    }


def _gradient(loss: Tensor, parameters: list[nn.Parameter]) -> tuple[Tensor, ...]:
    """The gradient, zero for weights that the network does not use; the graph is kept for another loss."""
    return torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)


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
