"""Residual networks: ResNet-18 and ResNet-50 with torchvision's state-dict keys; ResNet-20 and WRN-22-2 for CIFAR."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop_paper.models.init import build

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(min(32, channels), channels),
}


def conv3x3(c_in: int, c_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False)


def conv1x1(c_in: int, c_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, 1, stride, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (projected where the shape changes)."""

    expansion = 1

    def __init__(self, c_in: int, width: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3x3(c_in, width, stride), norm(width)
        self.conv2, self.bn2 = conv3x3(width, width), norm(width)
        self.downsample = projection(c_in, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3 (which carries the stride), 1x1 to four times the width, and a shortcut."""

    expansion = 4

    def __init__(self, c_in: int, width: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv1x1(c_in, width), norm(width)
        self.conv2, self.bn2 = conv3x3(width, width, stride), norm(width)
        self.conv3, self.bn3 = conv1x1(width, 4 * width), norm(4 * width)
        self.downsample = projection(c_in, 4 * width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


def projection(c_in: int, c_out: int, stride: int, norm: Callable[[int], nn.Module]) -> nn.Sequential | None:
    """The 1x1 shortcut of a block that changes the shape, None for one that does not."""
    if stride == 1 and c_in == c_out:
        return None
    return nn.Sequential(conv1x1(c_in, c_out, stride), norm(c_out))


class ResNet(nn.Module):
    """7x7 stem, four stages of blocks, mean over the image, linear output (He et al., 2016)."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        classes: int,
        norm: Callable[[int], nn.Module],
        width: int = 64,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1 = norm(width)
        channels = width
        for i, depth in enumerate(depths):
            stage, blocks = width * 2**i, nn.Sequential()
            for j in range(depth):
                blocks.append(block(channels, stage, 2 if i > 0 and j == 0 else 1, norm))
                channels = stage * block.expansion
            self.add_module(f"layer{i + 1}", blocks)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(x, 3, 2, padding=1)
        for i in range(1, 5):
            x = self.get_submodule(f"layer{i}")(x)
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


def resnet18(
    classes: int = 1000,
    *,
    width: int = 64,
    norm: str = "batch",
    zero_init_last: bool = False,
    init: str = "he_normal",
    generator: torch.Generator | None = None,
) -> ResNet:
    """ResNet-18, 11,689,512 parameters for 1000 classes; arguments as for `resnet50`."""
    return _resnet(BasicBlock, (2, 2, 2, 2), classes, width, norm, zero_init_last, init, generator)


def resnet50(
    classes: int = 1000,
    *,
    width: int = 64,
    norm: str = "batch",
    zero_init_last: bool = False,
    init: str = "he_normal",
    generator: torch.Generator | None = None,
) -> ResNet:
    """ResNet-50, 25,557,032 parameters for 1000 classes; loads torchvision's checkpoints.

    Args:
        width: channels of the first stage; every later stage has twice those of the one before.
        norm: "batch" or "group" (32 groups; for batches too small for batch norm).
        zero_init_last: start the output layer at zero, as is customary. A zero weight can never move under
            Powerprop with α > 1 (the slope α|φ|^(α-1) vanishes), so the paper does it for α = 1 only.
    """
    return _resnet(Bottleneck, (3, 4, 6, 3), classes, width, norm, zero_init_last, init, generator)


def _resnet(
    block: type[BasicBlock] | type[Bottleneck],
    depths: Sequence[int],
    classes: int,
    width: int,
    norm: str,
    zero_init_last: bool,
    init: str,
    generator: torch.Generator | None,
) -> ResNet:
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {norm!r}")
    model = build(lambda: ResNet(block, depths, classes, NORMS[norm], width), init, generator)
    if zero_init_last:
        nn.init.zeros_(model.fc.weight)
    return model


class PaddedShortcut(nn.Module):
    """Option A: every second pixel, and zeros for the new channels; no parameters."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.pad = (c_out - c_in) // 2

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))


def shortcut(c_in: int, c_out: int, option: str) -> nn.Module:
    """How a block's input reaches its output: as it is, padded (A) or projected (B)."""
    if c_in == c_out:
        return nn.Identity()
    if option == "A":
        return PaddedShortcut(c_in, c_out)
    return nn.Sequential(conv1x1(c_in, c_out, 2), nn.BatchNorm2d(c_out))


class Block(nn.Module):
    """Two 3x3 convolutions with batch norm and a shortcut; halves the image where the width changes."""

    def __init__(self, c_in: int, c_out: int, option: str) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3x3(c_in, c_out, 1 if c_in == c_out else 2), nn.BatchNorm2d(c_out)
        self.conv2, self.bn2 = conv3x3(c_out, c_out), nn.BatchNorm2d(c_out)
        self.downsample = shortcut(c_in, c_out, option)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class CifarResNet(nn.Module):
    """3x3 stem and three stages of 16, 32, 64 channels (He et al., 2016, section 4.2)."""

    def __init__(self, blocks: int, classes: int, option: str) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3x3(3, 16), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16, option) for _ in range(blocks)))
        self.layer2 = nn.Sequential(*(Block(32 if i else 16, 32, option) for i in range(blocks)))
        self.layer3 = nn.Sequential(*(Block(64 if i else 32, 64, option) for i in range(blocks)))
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


class WideBlock(nn.Module):
    """Norm and ReLU before each of two 3x3 convolutions; the shortcut is projected where the shape changes."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(c_in), conv3x3(c_in, c_out, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(c_out), conv3x3(c_out, c_out)
        self.downsample = None if c_in == c_out else conv1x1(c_in, c_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(x))
        # A projected shortcut starts from the activated input, a plain one from the input itself.
        kept = x if self.downsample is None else self.downsample(out)
        out = self.conv2(F.relu(self.bn2(self.conv1(out))))
        return out + kept  # type: ignore[no-any-return]


class WideResNet(nn.Module):
    """Stages of 16k, 32k, 64k channels, n blocks each: depth 6n + 4 (Zagoruyko & Komodakis, 2016)."""

    def __init__(self, blocks: int, widen: int, classes: int) -> None:
        super().__init__()
        self.conv1 = conv3x3(3, 16)
        c_in = 16
        for i in range(3):
            c_out, stage = 16 * 2**i * widen, nn.Sequential()
            for j in range(blocks):
                stage.append(WideBlock(c_in, c_out, 2 if i > 0 and j == 0 else 1))
                c_in = c_out
            self.add_module(f"layer{i + 1}", stage)
        self.bn = nn.BatchNorm2d(c_in)
        self.fc = nn.Linear(c_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        for i in range(1, 4):
            x = self.get_submodule(f"layer{i}")(x)
        return self.fc(F.relu(self.bn(x)).mean((2, 3)))  # type: ignore[no-any-return]


def resnet20(
    classes: int = 10, *, shortcuts: str = "A", init: str = "he_normal", generator: torch.Generator | None = None
) -> CifarResNet:
    """ResNet-20 for CIFAR, 269,722 parameters for 10 classes (272,474 with projections).

    Args:
        shortcuts: where the width changes, "A": every second pixel and channels of zeros (the original),
            "B": a 1x1 convolution.
    """
    if shortcuts not in ("A", "B"):
        raise ValueError(f"shortcuts must be 'A' (zero padding) or 'B' (projection), got {shortcuts!r}")
    return build(lambda: CifarResNet(3, classes, shortcuts), init, generator)


def wrn_22_2(classes: int = 10, *, init: str = "he_normal", generator: torch.Generator | None = None) -> WideResNet:
    """WRN-22-2 for CIFAR, without dropout, 1,079,642 parameters for 10 classes."""
    return build(lambda: WideResNet(3, 2, classes), init, generator)
