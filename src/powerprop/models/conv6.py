"""Conv-6: the small VGG-like network of the CIFAR-10 experiments."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop.models.init import build

CHANNELS = (64, 64, 128, 128, 256, 256)


class Conv6(nn.Module):
    """[64x2, pool, 128x2, pool, 256x2, pool], 3x3 padded; fc 256, 256, classes; for 32x32 RGB images."""

    def __init__(self, classes: int = 10, width: float = 1.0, batch_norm: bool = False) -> None:
        super().__init__()
        channels = [max(1, round(c * width)) for c in CHANNELS]
        hidden = max(1, round(256 * width))
        for i, (c_in, c_out) in enumerate(zip([3, *channels], channels, strict=False), 1):
            # A bias before a batch norm is subtracted again by it.
            self.add_module(f"conv{i}", nn.Conv2d(c_in, c_out, 3, padding=1, bias=not batch_norm))
            self.add_module(f"bn{i}", nn.BatchNorm2d(c_out) if batch_norm else nn.Identity())
        self.fc1 = nn.Linear(channels[-1] * 4 * 4, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(1, len(CHANNELS) + 1):
            x = F.relu(self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(x)))
            if i % 2 == 0:
                x = F.max_pool2d(x, 2)
        x = x.flatten(1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)  # type: ignore[no-any-return]


def conv6(
    classes: int = 10,
    *,
    width: float = 1.0,
    batch_norm: bool = False,
    init: str = "glorot_normal",
    generator: torch.Generator | None = None,
) -> Conv6:
    """Conv-6 (Frankle & Carbin, 2019), 2,262,602 parameters at width 1 without batch norm.

    Args:
        width: multiplies the channels and hidden units of every layer.
    """
    if width <= 0:
        raise ValueError(f"width must be positive, got {width}")
    return build(lambda: Conv6(classes, width, batch_norm), init, generator)
