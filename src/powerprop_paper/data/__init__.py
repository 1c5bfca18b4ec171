"""Data sets held whole in memory, batches and task streams made from them; one way in: load("mnist")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from powerprop.batches import Batches, Part, Splits
from powerprop.continual.task import Task
from powerprop_paper.data.images import (
    AT_ONCE,
    Images,
    channels_last,
    crop_and_flip,
    mean_std,
    normalise,
    random_shift_flip,
    to_float,
)
from powerprop_paper.data.sets import load_cifar, load_idx, load_notmnist, load_tiny
from powerprop_paper.data.sources import (
    CIFAR10,
    CIFAR100,
    FASHION_MNIST,
    MNIST,
    NOTMNIST,
    TINY_IMAGENET_10,
    DataCorrupt,
    DataNotFound,
)
from powerprop_paper.data.streams import Stream, permuted, rotated, split
from powerprop_paper.data.text import Text, Windows, load_text

__all__ = [
    "AT_ONCE", "LOADERS", "Batches", "DataCorrupt", "DataNotFound", "Images", "Part", "Splits", "Stream", "Task",
    "Text", "Windows", "channels_last", "check_images", "crop_and_flip", "first", "load", "load_last", "load_splits",
    "load_text", "mean_std", "normalise", "permuted", "random_shift_flip", "rotated", "split", "to_float",
]  # fmt: skip

LOADERS: dict[str, Callable[[str | Path | None, bool], Images]] = {
    "mnist": partial(load_idx, MNIST),
    "fashion-mnist": partial(load_idx, FASHION_MNIST),
    "cifar10": partial(load_cifar, CIFAR10),
    "cifar100": partial(load_cifar, CIFAR100),
    "notmnist": partial(load_notmnist, NOTMNIST),
    "tiny-imagenet-10": partial(load_tiny, TINY_IMAGENET_10),
}


def load(name: str, root: str | Path | None = None, *, download: bool = True) -> Images:
    """The whole data set in memory, checked against its published checksums.

    name: one of LOADERS.
    root: the only folder to look in (and to download to), laid out as torchvision does; by default $POWERPROP_DATA, the
        user's cache and what the machine has installed are searched in this order.
    download: fetch what is found nowhere, into the user's cache.
    """
    if name not in LOADERS:
        raise ValueError(f"data set must be one of {', '.join(LOADERS)}, got {name!r}")
    return LOADERS[name](root, download)


def load_last(name: str, count: int) -> Images:
    """The data set with only the last so many training images; 0 means all."""
    images = load(name)
    return replace(images, train_x=images.train_x[-count:], train_y=images.train_y[-count:])


def load_splits(name: str, pixels: str, validation: int, train: int = 0, test: int = 0) -> Splits:
    """Training, validation and test images as floats.

    pixels: "unit" scales them to [0, 1], "standard" each channel to mean 0 and variance 1.
    validation: the last so many training images.
    train, test: only the first so many of the others, and of the test images; 0 means all.
    """
    rest, held_back, tested = load(name).split_validation(validation)
    splits = Splits(first(rest, train), held_back, first(tested, test))
    if pixels == "unit":
        return splits.map(to_float)
    mean, std = mean_std(splits.train.x)
    return splits.map(lambda x: normalise(x, mean, std))


def first(part: Part, count: int) -> Part:
    """The first so many images; 0 means all."""
    return Part(part.x[: count or None], part.y[: count or None])


def check_images(model: str, shape: tuple[int, ...], classes: int, images: Images) -> None:
    """A network must be made for the images and classes of the data."""
    if (images.shape, images.classes) != (shape, classes):
        found = f"{images.name} with {images.shape} and {images.classes} classes"
        raise ValueError(f"model {model} is for images {shape} of {classes} classes, got {found}")
