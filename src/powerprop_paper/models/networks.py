"""Classifiers, fully connected and of convolutions for 32x32 images, and what networks are made of.

`heads` is the number of task-specific output layers of `classes` units, 0 one output layer for all tasks; `init` is
"glorot_normal" (the paper's table), "truncated_fan_in" (its published notebook) or "he_normal".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Net = TypeVar("Net", bound=nn.Module)
CHANNELS = (64, 64, 128, 128, 256, 256)
"""Of Conv-6."""
STEM = 24
WIDTHS = (32, 128, 128)
"""Of the fast network."""


def fans(weight: Tensor) -> tuple[int, int]:
    """(fan_in, fan_out) of a linear (out, in) or convolutional (out, in, *kernel) weight."""
    field = math.prod(weight.shape[2:])
    return weight.shape[1] * field, weight.shape[0] * field


def glorot_normal(weight: Tensor, generator: torch.Generator | None) -> None:
    """Gaussian Glorot: w ~ N(0, 2 / (fan_in + fan_out)) (Glorot & Bengio, 2010)."""
    weight.normal_(0.0, math.sqrt(2.0 / sum(fans(weight))), generator=generator)


def truncated_fan_in(weight: Tensor, generator: torch.Generator | None) -> None:
    """w ~ N(0, 1 / fan_in) cut off at two standard deviations, the default of Sonnet's layers.

    The cut is not compensated: the weights' own standard deviation is 0.88 / sqrt(fan_in).
    """
    std = 1.0 / math.sqrt(fans(weight)[0])
    nn.init.trunc_normal_(weight, 0.0, std, -2.0 * std, 2.0 * std, generator=generator)


def he_normal(weight: Tensor, generator: torch.Generator | None) -> None:
    """w ~ N(0, 2 / fan_in) (He et al., 2015)."""
    weight.normal_(0.0, math.sqrt(2.0 / fans(weight)[0]), generator=generator)


INITIALISERS: dict[str, Callable[[Tensor, torch.Generator | None], None]] = {
    each.__name__: each for each in (glorot_normal, truncated_fan_in, he_normal)
}


@torch.no_grad()
def initialise(model: nn.Module, init: str, generator: torch.Generator | None = None) -> None:
    """Fill every linear and convolutional weight in the order of registration; biases 0, norms 1 and 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            INITIALISERS[init](module.weight, generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()


def build(make: Callable[[], Net], init: str, generator: torch.Generator | None) -> Net:
    """make() without torch's default initialisation, then `initialise`; on the CPU, the same on every machine.

    Without a generator the weights come from torch's global one.
    """
    if init not in INITIALISERS:
        raise ValueError(f"init must be one of {', '.join(INITIALISERS)}, got {init!r}")
    with torch.device("meta"):
        model = make()
    model = model.to_empty(device="cpu")
    initialise(model, init, generator)
    return model


def linear_layers(sizes: Sequence[int], last: bool) -> nn.Sequential:
    """Linear layers of these widths with ReLU between them; `last`: and one behind the last."""
    made = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*(made if last else made[:-1]))


class Heads(nn.Module):
    """One output layer for each task, called `<name>.0`, `<name>.1`, ... in the state dict."""

    def __init__(self, features: int, classes: int, tasks: int, bias: bool = True) -> None:
        super().__init__()
        self.features, self.classes, self.bias = features, classes, bias
        for task in range(tasks):
            self.add_module(str(task), nn.Linear(features, classes, bias=bias))

    def add(self, generator: torch.Generator | None = None) -> nn.Linear:
        """One more output layer, for the next task, on the device and in the precision of the others."""
        head = nn.Linear(self.features, self.classes, bias=self.bias)
        limit = self.features**-0.5
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.uniform_(-limit, limit, generator=generator)
        like = next(self.parameters(), None)
        self.add_module(str(len(self._modules)), head if like is None else head.to(like))
        return head

    def forward(self, x: Tensor, task: int | None) -> Tensor:
        if task is None or not 0 <= task < len(self._modules):
            raise ValueError(f"task must be in 0..{len(self._modules) - 1} (an output layer for each), got {task}")
        return self.get_submodule(str(task))(x)  # type: ignore[no-any-return]


def output_layer(features: int, classes: int, heads: int, bias: bool = True) -> nn.Linear | Heads:
    """`Heads` for that many tasks; an ordinary linear layer for 0."""
    if heads < 0:
        raise ValueError(f"heads must be 0 (one output layer) or the number of tasks, got {heads}")
    return Heads(features, classes, heads, bias) if heads else nn.Linear(features, classes, bias)


def answer(output: nn.Module, x: Tensor, task: int | None) -> Tensor:
    """The logits of an ordinary output layer, or of the head of `task`."""
    if isinstance(output, Heads):
        return output(x, task)  # type: ignore[no-any-return]
    if task is not None:
        raise ValueError(f"this network has one output layer for all tasks, got task={task}")
    return output(x)  # type: ignore[no-any-return]


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
    sizes: Sequence[int], *, heads: int = 0, init: str = "glorot_normal", generator: torch.Generator | None = None
) -> MLP:
    """A fully connected ReLU network of the given widths, input first: mlp([784, 1000, 1000, 10])."""
    return build(lambda: MLP(sizes, heads), init, generator)


def lenet_300_100(*, init: str = "glorot_normal", generator: torch.Generator | None = None) -> MLP:
    """LeNet-300-100, 266,610 parameters (LeCun et al., 1998; the paper's MNIST network)."""
    return mlp([784, 300, 100, 10], init=init, generator=generator)


class Conv6(nn.Module):
    """[64x2, pool, 128x2, pool, 256x2, pool], 3x3 padded; fc 256, 256, classes."""

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
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))  # type: ignore[no-any-return]


def conv6(
    classes: int = 10, *, width: float = 1.0, batch_norm: bool = False, init: str = "glorot_normal",
    generator: torch.Generator | None = None,
) -> Conv6:  # fmt: skip
    """Conv-6 (Frankle & Carbin, 2019), 2,262,602 parameters at width 1 without batch norm.

    width: multiplies the channels and hidden units of every layer.
    """
    if width <= 0:
        raise ValueError(f"width must be positive, got {width}")
    return build(lambda: Conv6(classes, width, batch_norm), init, generator)


class AlexNet(nn.Module):
    """conv 64@4x4, 128@3x3, 256@2x2, each ReLU, dropout, max-pool 2; fc 1024-2048-2048; no biases."""

    def __init__(self, classes: int, heads: int = 0) -> None:
        super().__init__()
        for i, (c_in, c_out, kernel) in enumerate(((3, 64, 4), (64, 128, 3), (128, 256, 2)), 1):
            self.add_module(f"conv{i}", nn.Conv2d(c_in, c_out, kernel, bias=False))
        self.fc1 = nn.Linear(256 * 2 * 2, 2048, bias=False)
        self.fc2 = nn.Linear(2048, 2048, bias=False)
        self.output = "heads" if heads else "fc3"
        self.add_module(self.output, output_layer(2048, classes, heads, bias=False))

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        for i, rate in enumerate((0.2, 0.2, 0.5), 1):
            x = F.relu(self.get_submodule(f"conv{i}")(x))
            x = F.max_pool2d(F.dropout(x, rate, self.training), 2)
        x = x.flatten(1)
        for layer in (self.fc1, self.fc2):
            x = F.dropout(F.relu(layer(x)), 0.5, self.training)
        return answer(self.get_submodule(self.output), x, task)


def alexnet(
    classes: int = 10, *, heads: int = 0, init: str = "glorot_normal", generator: torch.Generator | None = None
) -> AlexNet:
    """The network of GPM's Split-CIFAR100 experiments (Saha et al., 2021), as in the paper without batch norm."""
    return build(lambda: AlexNet(classes, heads), init, generator)


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
    """conv 24@2x2, ReLU; a `Block` of each width; the maximum over all places; fc."""

    def __init__(self, classes: int = 10, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, STEM, 2)
        self.blocks = nn.Sequential(*(Block(c_in, c_out) for c_in, c_out in zip((STEM, *widths), widths, strict=False)))
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.stem(x)))
        return self.fc(x.amax((2, 3)))  # type: ignore[no-any-return]


def fast_cifar(
    classes: int = 10, *, widths: Sequence[int] = WIDTHS, init: str = "he_normal",
    generator: torch.Generator | None = None,
) -> FastCifar:  # fmt: skip
    """A narrow form of the networks of CIFAR speed runs (Jordan, 2024): 498,114 parameters with its own widths.

    Convolutions read it fastest as `model.to(memory_format=torch.channels_last)`, with images in the same format.

    widths: channels of the blocks; each halves the image, so at most four.
    """
    if not 1 <= len(widths) <= 4 or min(widths) < 1:
        raise ValueError(f"widths must be one to four positive numbers of channels, got {tuple(widths)}")
    return build(lambda: FastCifar(classes, widths), init, generator)
