"""Images as experiments train on them: the parts of a data set as floats, and what a batch of them goes through."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from powerprop import data
from powerprop.train.evaluate import evaluate
from powerprop.train.precision import Precision

__all__ = ["AT_ONCE", "accuracy_in", "channels_last", "load_splits", "moved"]

AT_ONCE = 125
"""Images that are measured together: what convolutions make of 1,000 leaves the cache, and takes 1.8 times as long."""


def load_splits(name: str, pixels: str, validation: int, train: int = 0, test: int = 0) -> data.Splits:
    """Training, validation and test images as floats.

    pixels: "unit" scales them to [0, 1], "standard" each channel to mean 0 and variance 1.
    validation: the last so many training images.
    train, test: only the first so many of the others, and of the test images; 0 means all.
    """
    rest, held_back, tested = data.load(name).split_validation(validation)
    splits = data.Splits(_first(rest, train), held_back, _first(tested, test))
    if pixels == "unit":
        return splits.map(data.to_float)
    mean, std = data.mean_std(splits.train.x)
    return splits.map(lambda x: data.normalise(x, mean, std))


def _first(part: data.Part, count: int) -> data.Part:
    return data.Part(part.x[:count], part.y[:count]) if count else part


def channels_last(x: Tensor) -> Tensor:
    """The layout that convolutions read fastest: a step of Conv-6 on a CPU takes two thirds of the time."""
    return x.contiguous(memory_format=torch.channels_last)


def moved(shift: int) -> Callable[[Tensor, torch.Generator], Tensor]:
    """What a batch for convolutions goes through: moved by up to so many pixels and half of it mirrored; 0 is neither.

    In the layout that convolutions read fastest.
    """
    return lambda x, generator: channels_last(data.crop_and_flip(x, generator, shift) if shift else x)


def accuracy_in(precision: Precision, model: nn.Module, part: data.Part) -> float:
    """Accuracy in the precision of training, for a curve along it: in float32 it takes a fifth of a short training."""
    with precision.autocast(next(model.parameters()).device):
        return evaluate(model, *part, batch=AT_ONCE).accuracy
