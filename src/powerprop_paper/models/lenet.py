"""Fully connected networks: LeNet-300-100 and its relatives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop_paper.models.heads import answer, output_layer
from powerprop_paper.models.init import build


class MLP(nn.Module):
    """Linear layers fc1, fc2, ... with ReLU between them; images are flattened first.

    With `heads` > 0 the last layer is one output layer for each task, `heads.0`, `heads.1`, ...
    """

    def __init__(self, sizes: Sequence[int], heads: int = 0) -> None:
        super().__init__()
        if len(sizes) < 2 or min(sizes) < 1:
            raise ValueError(f"sizes must be two or more positive widths, input first, got {list(sizes)}")
        for i, (width_in, width_out) in enumerate(pairwise(sizes[:-1]), 1):
            self.add_module(f"fc{i}", nn.Linear(width_in, width_out))
        name = "heads" if heads else f"fc{len(sizes) - 1}"
        self.add_module(name, output_layer(sizes[-2], sizes[-1], heads))

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        x = x.flatten(1)
        *hidden, output = self.children()
        for layer in hidden:
            x = F.relu(layer(x))
        return answer(output, x, task)


def mlp(
    sizes: Sequence[int],
    *,
    heads: int = 0,
    init: str = "glorot_normal",
    generator: torch.Generator | None = None,
) -> MLP:
    """A fully connected ReLU network of the given widths, input first: mlp([784, 1000, 1000, 10]).

    Args:
        heads: number of task-specific output layers; 0 is one output layer for all tasks.
        init: "glorot_normal" (the paper's table), "truncated_fan_in" (its published notebook) or "he_normal".
        generator: source of the initial weights; None is torch's global one.
    """
    return build(lambda: MLP(sizes, heads), init, generator)


def lenet_300_100(*, init: str = "glorot_normal", generator: torch.Generator | None = None) -> MLP:
    """LeNet-300-100, 266,610 parameters (LeCun et al., 1998; the paper's MNIST network)."""
    return mlp([784, 300, 100, 10], init=init, generator=generator)
