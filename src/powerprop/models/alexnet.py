"""The AlexNet-like network of Split-CIFAR100."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop.models.heads import answer, output_layer
from powerprop.models.init import build


class AlexNet(nn.Module):
    """conv 64@4x4, 128@3x3, 256@2x2, each ReLU, dropout, max-pool 2; fc 1024-2048-2048; for 32x32 RGB images."""

    def __init__(self, classes: int, heads: int = 0, bias: bool = False, batch_norm: bool = False) -> None:
        super().__init__()
        widths = ((3, 64, 4), (64, 128, 3), (128, 256, 2))
        for i, (c_in, c_out, kernel) in enumerate(widths, 1):
            self.add_module(f"conv{i}", nn.Conv2d(c_in, c_out, kernel, bias=bias))
            # Statistics of the batch at hand only: running ones would mix the tasks.
            norm = nn.BatchNorm2d(c_out, track_running_stats=False) if batch_norm else nn.Identity()
            self.add_module(f"bn{i}", norm)
        self.fc1 = nn.Linear(256 * 2 * 2, 2048, bias=bias)
        self.fc2 = nn.Linear(2048, 2048, bias=bias)
        self.output = "heads" if heads else "fc3"
        self.add_module(self.output, output_layer(2048, classes, heads, bias))

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        for i, rate in enumerate((0.2, 0.2, 0.5), 1):
            x = F.relu(self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(x)))
            x = F.max_pool2d(F.dropout(x, rate, self.training), 2)
        x = x.flatten(1)
        for layer in (self.fc1, self.fc2):
            x = F.dropout(F.relu(layer(x)), 0.5, self.training)
        return answer(self.get_submodule(self.output), x, task)


def alexnet(
    classes: int = 10,
    *,
    heads: int = 0,
    bias: bool = False,
    batch_norm: bool = False,
    init: str = "glorot_normal",
    generator: torch.Generator | None = None,
) -> AlexNet:
    """The network of GPM's Split-CIFAR100 experiments (Saha et al., 2021); the paper's has no batch norm.

    Args:
        heads: number of task-specific output layers of `classes` units; 0 is one output layer for all tasks.
        batch_norm: normalise by the batch's own statistics after each convolution.
    """
    return build(lambda: AlexNet(classes, heads, bias, batch_norm), init, generator)
