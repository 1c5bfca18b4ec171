"""Where each experiment is: its name, and the module of its family. Only the one that is asked for is imported."""

from __future__ import annotations

from importlib import import_module

from powerprop.cli import did_you_mean
from powerprop_paper.run import Experiment, RunError

FAMILIES = {
    "mnist-oneshot": "oneshot",
    "mnist-optimisers": "oneshot",
    "cifar-oneshot": "oneshot",
    "generative": "generative",
    "generative-notmnist": "generative",
    "sparse-training": "sparse",
    "sparse-training-cifar": "sparse",
    "gpt-oneshot": "language.oneshot",
    "gpt-sparse": "language.sparse",
    "gpt-texts": "language.texts",
    "imagenet": "imagenet",
    "split-mnist": "split",
    "permuted-mnist": "split",
    "rotated-mnist": "split",
    "split-cifar100": "split",
    "long-permuted-mnist": "split",
    "long-permuted-mnist-300": "split",
    "endless-permuted-mnist": "split",
    "split-mnist-strategies": "baselines.strategies",
    "permuted-mnist-strategies": "baselines.strategies",
    "split-cifar100-strategies": "baselines.strategies",
    "powerprop-ewc": "baselines.strategies",
    "unknown-boundaries": "boundaries",
    "task-inference": "inference",
    "continual-world": "world",
}


def find(name: str) -> Experiment:
    """The experiment of this name; an unknown one is an error that lists the known."""
    if name not in FAMILIES:
        hint, known = did_you_mean(name, FAMILIES), ", ".join(FAMILIES)
        raise RunError(f"unknown experiment {name!r}{hint}; known are {known}")
    found: Experiment = import_module(f"powerprop_paper.experiments.{FAMILIES[name]}").EXPERIMENTS[name]
    return found
