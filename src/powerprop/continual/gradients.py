"""Gradients of a step as vectors, with the inner product that belongs to the optimiser's own parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from powerprop.optim import Powerprop

__all__ = ["Gradients"]


class Gradients:
    """The entries that the step at hand moves, and inner products of gradients over them.

    A step moves φ, not w: Δφ = -η s ∂L/∂w with s = α|φ|^(α-1), so that to first order another loss M changes by

        ΔM = Σ s ∂M/∂w Δφ = -η Σ s² ∂L/∂w ∂M/∂w = -η ⟨∂L/∂w, ∂M/∂w⟩

    Inner products are weighed by s². Weights that are masked, frozen or have no gradient do not move and do not count.
    """

    def __init__(self, optimizer: Powerprop, model: nn.Module) -> None:
        moved = {n: p for n, p in model.named_parameters() if p.grad is not None and not optimizer.frozen.holds(p)}
        self.parameters = list(moved.values())
        self.metric = _flat([_metric(optimizer, name, p) for name, p in moved.items()])

    def current(self) -> Tensor:
        """The gradient of the step."""
        return _flat([p.grad for p in self.parameters if p.grad is not None])

    def of(self, loss: Tensor) -> Tensor:
        """The gradient of another loss; that of the step stays as it is."""
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        pairs = zip(found, self.parameters, strict=True)
        return _flat([torch.zeros_like(p) if gradient is None else gradient for gradient, p in pairs])

    def products(self, rows: Tensor, others: Tensor) -> Tensor:
        """⟨a, b⟩ of every row a with every row b."""
        return (rows * self.metric) @ others.T

    @torch.no_grad()
    def add(self, change: Tensor) -> None:
        """Add a vector to the gradient of the step."""
        parts = torch.split(change, [p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            assert parameter.grad is not None
            parameter.grad += part.view_as(parameter).to(parameter.grad.dtype)


def _metric(optimizer: Powerprop, name: str, parameter: nn.Parameter) -> Tensor:
    """s² where the parameter is trained, 0 elsewhere."""
    if name not in optimizer.masters:
        return torch.ones_like(parameter)
    squared, trained = optimizer.slope(name).square(), optimizer.masters[name].trainable
    return squared if trained is None else squared * trained


def _flat(tensors: list[Tensor]) -> Tensor:
    """One vector, in float32 at least."""
    return torch.cat([t.detach().flatten().to(torch.promote_types(t.dtype, torch.float32)) for t in tensors])
