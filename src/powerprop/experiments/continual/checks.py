"""Settings of a continual-learning experiment that cannot be, found before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from powerprop.continual.packing.search import check_grid
from powerprop.experiments.continual.candidates import with_candidate
from powerprop.experiments.harness.checks import check_alphas, check_images, check_positive, check_settings, require

if TYPE_CHECKING:
    from powerprop.data import Images
    from powerprop.experiments.continual.config import Config

METHOD_LABELS = {"frugal-packnet": "frugal EPN", "efficient-packnet": "EPN", "packnet": "PackNet"}
"""Names in tables; EPN is the paper's short form of EfficientPackNet."""
BY_VALIDATION = ("frugal-packnet", "efficient-packnet")
"""Methods that choose the sparsity of a task by its validation accuracy."""
CHOICES = {
    "stream": ("permuted", "rotated", "split"),
    "model": ("mlp", "alexnet"),
    "search": ("linear", "binary", "taylor"),
    "distribution": ("global", "uniform"),
    "methods": tuple(METHOD_LABELS),
    "reuse": ("all", "output"),
    "decay": ("training", "retraining"),
    "precision": ("float32", "bfloat16"),
}
LEAST = {
    "tasks": 1,
    "steps": 1,
    "probed": 1,
    "probe": 1,
    "batch": 1,
    "width": 1,
    "clip": 0,
    "momentum": 0,
    "shift": 0,
    "pruning_steps": 1,
    "tuning_tasks": 1,
}
INPUTS = {"mlp": ((1, 28, 28), 10), "alexnet": ((3, 32, 32), 100)}
"""The images and the number of classes that a network is made for."""


def check_config(config: Config) -> None:
    """What the settings alone can tell."""
    check_settings(config, LEAST, CHOICES)
    check_alphas(config.alphas)
    check_positive(config, "lr", "magnitude", "spread")
    for name in ("methods", "groups"):
        values = getattr(config, name)
        require(len(set(values)) == len(values) > 0, f"{name} must be some, each once, got {values}")
    for group in config.groups:
        require(group >= 1, f"group must be at least 1, got {group}")
    for at in config.infer_at:
        require(1 <= at <= config.tasks, f"infer_at must be in 1..{config.tasks}, the tasks, got {at}")
    for name in ("gamma", "frugal_gamma", "share"):
        value = getattr(config, name)
        require(0 < value <= 1, f"{name} must be in (0, 1], got {value}")
    asked = config.prunings * config.pruning_steps if "frugal-packnet" in config.methods else 0
    text = f"prunings times pruning_steps must be at most {config.retrain_steps}, the retrain_steps, got {asked}"
    require(asked <= config.retrain_steps, text)
    fits = not config.images or config.validation < config.images
    require(fits, f"validation must be below the {config.images} images, got {config.validation}")
    fits = config.model != "alexnet" or config.stream == "split"
    require(fits, f"model alexnet is for a split stream, got stream {config.stream!r}")
    require(config.momentum < 1, f"momentum must be in [0, 1), got {config.momentum}")
    fits = config.model == "alexnet" or not config.shift
    require(fits, f"shift moves images of networks of convolutions, got {config.shift} with {config.model}")
    check_grid(config.grid)
    tried = config.candidates
    require(len(set(tried)) == len(tried), f"candidates must be different, got {tried}")
    for text in tried:
        with_candidate(config, text)
    most = config.tasks
    fits = not tried or config.tuning_tasks <= most
    require(fits, f"tuning_tasks must be at most the {most} tasks, got {config.tuning_tasks}")


def check_tasks(config: Config, images: Images) -> None:
    """Whether the data fit the network and can be cut into the tasks."""
    check_images(config.model, *INPUTS[config.model], images)
    require(
        config.stream != "split" or images.classes % config.tasks == 0,
        f"tasks must divide the {images.classes} classes of {images.name}, got {config.tasks}",
    )
    images.split_validation(config.validation)
