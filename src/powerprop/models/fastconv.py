"""A small network for CIFAR that trains within minutes on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop.models.heads import answer, output_layer
from powerprop.models.init import build

STEM = 24
WIDTHS = (32, 128, 128)


class Block(nn.Module):
    """conv, max-pool 2, norm, ReLU, conv, norm, ReLU; 3x3 padded."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(F.max_pool2d(self.conv1(x), 2)))
        return F.relu(self.bn2(self.conv2(x)))


class FastCifar(nn.Module):
    """conv 24@2x2, ReLU; a `Block` of each width; the maximum over all places; fc. For 32x32 RGB images."""

    def __init__(self, classes: int = 10, widths: Sequence[int] = WIDTHS, heads: int = 0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, STEM, 2)
        self.blocks = nn.Sequential(*(Block(c_in, c_out) for c_in, c_out in zip((STEM, *widths), widths, strict=False)))
        self.output = "heads" if heads else "fc"
        self.add_module(self.output, output_layer(widths[-1], classes, heads))

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        x = self.blocks(F.relu(self.stem(x)))
        return answer(self.get_submodule(self.output), x.amax((2, 3)), task)


def fast_cifar(
    classes: int = 10,
    *,
    widths: Sequence[int] = WIDTHS,
    heads: int = 0,
    init: str = "he_normal",
    generator: torch.Generator | None = None,
) -> FastCifar:
    """A narrow form of the networks of CIFAR speed runs (Jordan, 2024): 498,114 parameters with its own widths.

    Convolutions read it fastest as `model.to(memory_format=torch.channels_last)`, with images in the same format.

    Args:
        widths: channels of the blocks; each halves the image, so at most four.
        heads: number of task-specific output layers of `classes` units; 0 is one output layer for all tasks.
    """
    if not 1 <= len(widths) <= 4 or min(widths) < 1:
        raise ValueError(f"widths must be one to four positive numbers of channels, got {tuple(widths)}")
    return build(lambda: FastCifar(classes, widths, heads), init, generator)
