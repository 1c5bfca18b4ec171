"""What networks are made of: weights drawn from an explicit generator, and output layers for several tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

Net = TypeVar("Net", bound=nn.Module)


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
