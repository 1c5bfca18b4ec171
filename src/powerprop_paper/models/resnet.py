"""Residual networks: ResNet-18 and ResNet-50 with torchvision's state-dict keys, ResNet-20 for CIFAR."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop_paper.models.networks import build


def conv3x3(c_in: int, c_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False)


def conv1x1(c_in: int, c_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, 1, stride, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (projected where the shape changes)."""

    expansion = 1

    def __init__(self, c_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3x3(c_in, width, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv3x3(width, width), nn.BatchNorm2d(width)
        self.downsample = projection(c_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3 (which carries the stride), 1x1 to four times the width, and a shortcut."""

    expansion = 4

    def __init__(self, c_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv1x1(c_in, width), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv3x3(width, width, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv1x1(width, 4 * width), nn.BatchNorm2d(4 * width)
        self.downsample = projection(c_in, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


def projection(c_in: int, c_out: int, stride: int) -> nn.Sequential | None:
    """The 1x1 shortcut of a block that changes the shape, None for one that does not."""
    if stride == 1 and c_in == c_out:
        return None
    return nn.Sequential(conv1x1(c_in, c_out, stride), nn.BatchNorm2d(c_out))


class ResNet(nn.Module):
    """7x7 stem, four stages of blocks, mean over the image, linear output (He et al., 2016)."""

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], depths: Sequence[int], classes: int, width: int = 64
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        channels = width
        for i, depth in enumerate(depths):
            stage, blocks = width * 2**i, nn.Sequential()
            for j in range(depth):
                blocks.append(block(channels, stage, 2 if i > 0 and j == 0 else 1))
                channels = stage * block.expansion
            self.add_module(f"layer{i + 1}", blocks)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(x, 3, 2, padding=1)
        for i in range(1, 5):
            x = self.get_submodule(f"layer{i}")(x)
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


def _resnet(
    block: type[BasicBlock] | type[Bottleneck], depths: Sequence[int], classes: int, width: int, zero_init_last: bool,
    init: str, generator: torch.Generator | None,
) -> ResNet:  # fmt: skip
    model = build(lambda: ResNet(block, depths, classes, width), init, generator)
    if zero_init_last:
        nn.init.zeros_(model.fc.weight)
    return model


def resnet18(
    classes: int = 1000, *, width: int = 64, zero_init_last: bool = False, init: str = "he_normal",
    generator: torch.Generator | None = None,
) -> ResNet:  # fmt: skip
    """ResNet-18, 11,689,512 parameters for 1000 classes; arguments as for `resnet50`."""
    return _resnet(BasicBlock, (2, 2, 2, 2), classes, width, zero_init_last, init, generator)


def resnet50(
    classes: int = 1000, *, width: int = 64, zero_init_last: bool = False, init: str = "he_normal",
    generator: torch.Generator | None = None,
) -> ResNet:  # fmt: skip
    """ResNet-50, 25,557,032 parameters for 1000 classes; loads torchvision's checkpoints.

    width: channels of the first stage; every later stage has twice those of the one before.
    zero_init_last: start the output layer at zero, as is customary. A zero weight can never move under Powerprop with
        α > 1 (the slope α|φ|^(α-1) vanishes), so the paper does it for α = 1 only.
    """
    return _resnet(Bottleneck, (3, 4, 6, 3), classes, width, zero_init_last, init, generator)


class PaddedShortcut(nn.Module):
    """Option A: every second pixel, and zeros for the new channels; no parameters."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.pad = (c_out - c_in) // 2

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))


class Block(nn.Module):
    """Two 3x3 convolutions with batch norm and a shortcut; halves the image where the width changes."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3x3(c_in, c_out, 1 if c_in == c_out else 2), nn.BatchNorm2d(c_out)
        self.conv2, self.bn2 = conv3x3(c_out, c_out), nn.BatchNorm2d(c_out)
        self.downsample = nn.Identity() if c_in == c_out else PaddedShortcut(c_in, c_out)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class CifarResNet(nn.Module):
    """3x3 stem and three stages of 16, 32, 64 channels (He et al., 2016, section 4.2)."""

    def __init__(self, blocks: int, classes: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3x3(3, 16), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16) for _ in range(blocks)))
        self.layer2 = nn.Sequential(*(Block(32 if i else 16, 32) for i in range(blocks)))
        self.layer3 = nn.Sequential(*(Block(64 if i else 32, 64) for i in range(blocks)))
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


def resnet20(classes: int = 10, *, init: str = "he_normal", generator: torch.Generator | None = None) -> CifarResNet:
    """ResNet-20 for CIFAR, 269,722 parameters for 10 classes."""
    return build(lambda: CifarResNet(3, classes), init, generator)
