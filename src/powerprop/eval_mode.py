"""Models in evaluation mode for a while, and back as they were, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["evaluating", "in_parts"]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every layer in evaluation mode, and afterwards each in its own again.

    `model.train()` would not do for the way back: it also wakes layers that their owner froze, such as batch norms.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.no_grad()
def in_parts(model: nn.Module, outputs: Callable[[Tensor], Tensor], x: Tensor, size: int = 1000) -> Tensor:
    """outputs(x), some inputs at a time on the model's device, in evaluation mode."""
    device = next(model.parameters()).device
    with evaluating(model):
        return torch.cat([outputs(part.to(device)) for part in torch.split(x, size)])
