"""One way in: load("mnist")."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from powerprop.data.cifar import load_cifar
from powerprop.data.idx import load_idx
from powerprop.data.images import Images
from powerprop.data.notmnist import load_notmnist
from powerprop.data.sources import CIFAR10, CIFAR100, FASHION_MNIST, MNIST, NOTMNIST, TINY_IMAGENET_10
from powerprop.data.tiny_imagenet import load_tiny

LOADERS: dict[str, Callable[[str | Path | None, bool], Images]] = {
    "mnist": partial(load_idx, MNIST),
    "fashion-mnist": partial(load_idx, FASHION_MNIST),
    "cifar10": partial(load_cifar, CIFAR10),
    "cifar100": partial(load_cifar, CIFAR100),
    "notmnist": partial(load_notmnist, NOTMNIST),
    "tiny-imagenet-10": partial(load_tiny, TINY_IMAGENET_10),
}


def load(name: str, root: str | Path | None = None, *, download: bool = True) -> Images:
    """The whole data set in memory, checked against its published md5 sums.

    Args:
        name: one of LOADERS.
        root: the only folder to look in (and to download to), laid out as torchvision does; by default
            $POWERPROP_DATA, the user's cache and what the machine has installed are searched in this order.
        download: fetch what is found nowhere, into the user's cache.
    """
    if name not in LOADERS:
        raise ValueError(f"data set must be one of {', '.join(LOADERS)}, got {name!r}")
    return LOADERS[name](root, download)
