"""Initialisation of weights from an explicit generator; the global random state stays as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
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
    "glorot_normal": glorot_normal,
    "truncated_fan_in": truncated_fan_in,
    "he_normal": he_normal,
}


@torch.no_grad()
def initialise(model: nn.Module, init: str, generator: torch.Generator | None = None) -> None:
    """Fill every linear and convolutional weight in the order of registration; biases 0, norms 1 and 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            INITIALISERS[init](module.weight, generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
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
