"""Models in evaluation mode for a while, and back as they were, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluating"]


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
