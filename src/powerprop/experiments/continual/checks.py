"""Settings of a continual-learning experiment that cannot be, found before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from powerprop.continual.packing.search import check_grid

if TYPE_CHECKING:
    from powerprop.data import Images
    from powerprop.experiments.continual.train import Config

METHODS = {"efficient-packnet": "EPN", "packnet": "PackNet"}
"""Names in tables; EPN is the paper's short form of EfficientPackNet."""
PHASES = ("training", "retraining")
CHOICES = {
    "stream": ("permuted", "split"),
    "model": ("mlp", "alexnet"),
    "search": ("linear", "binary", "taylor"),
    "distribution": ("global", "uniform"),
}
LEAST = {
    "seeds": 1, "tasks": 1, "steps": 1, "probed": 1, "probe": 1, "batch": 1, "width": 1,
    "retrain_steps": 0, "images": 0, "validation": 0, "test": 0, "clip": 0,
}  # fmt: skip
POSITIVE = ("lr", "magnitude", "spread")
INPUTS = {"mlp": ((1, 28, 28), 10), "alexnet": ((3, 32, 32), 100)}
"""The images and the number of classes that a network is made for."""


def check_config(config: Config) -> None:
    """What the settings alone can tell."""
    _check_choices(config)
    _check_numbers(config)
    _check_lists(config)
    check_grid(config.grid)


def check_images(config: Config, images: Images) -> None:
    """Whether the data fit the network and can be cut into the tasks."""
    shape, classes = INPUTS[config.model]
    found = f"{images.name} with {images.shape} and {images.classes} classes"
    _require(
        (images.shape, images.classes) == (shape, classes),
        f"model {config.model} is for images {shape} of {classes} classes, got {found}",
    )
    _require(
        config.stream != "split" or images.classes % config.tasks == 0,
        f"tasks must divide the {images.classes} classes of {images.name}, got {config.tasks}",
    )
    images.split_validation(config.validation)


def _check_choices(config: Config) -> None:
    for name, known in CHOICES.items():
        value = getattr(config, name)
        _require(value in known, f"{name} must be one of {', '.join(known)}, got {value!r}")
    for method in config.methods:
        _require(method in METHODS, f"method must be one of {', '.join(METHODS)}, got {method!r}")
    _require(set(config.decay) <= set(PHASES), f"decay must name phases of {', '.join(PHASES)}, got {config.decay}")
    fits = config.model != "alexnet" or config.stream == "split"
    _require(fits, f"model alexnet is for a split stream, got stream {config.stream!r}")


def _check_numbers(config: Config) -> None:
    for name, least in LEAST.items():
        value = getattr(config, name)
        _require(value >= least, f"{name} must be at least {least}, got {value}")
    for name in POSITIVE:
        value = getattr(config, name)
        _require(value > 0 and isfinite(value), f"{name} must be positive and finite, got {value}")
    _require(0 < config.gamma <= 1, f"gamma must be in (0, 1], got {config.gamma}")
    fits = not config.images or config.validation < config.images
    _require(fits, f"validation must be below the {config.images} images, got {config.validation}")


def _check_lists(config: Config) -> None:
    lists: dict[str, Sequence[Any]] = {"alphas": config.alphas, "methods": config.methods, "groups": config.groups}
    for name, values in lists.items():
        _require(len(set(values)) == len(values) > 0, f"{name} must be some, each once, got {values}")
    for alpha in config.alphas:
        _require(alpha >= 1 and isfinite(alpha), f"alpha must be at least 1, got {alpha}")
    for group in config.groups:
        _require(group >= 1, f"group must be at least 1, got {group}")
    for at in config.infer_at:
        _require(1 <= at <= config.tasks, f"infer_at must be in 1..{config.tasks}, the tasks, got {at}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
