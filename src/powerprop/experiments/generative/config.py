"""The settings of continual generative modelling, and its presets for both data sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from powerprop.continual.packing.search import SEARCHES
from powerprop.experiments.harness.checks import check_positive, check_settings, require
from powerprop.train.precision import PRODUCTS

DATASETS = ("mnist", "notmnist")
POWERPROP = "Powerprop+"
METHODS = (
    "Naive", "Laplace", "EWC", "SI", "VCL", "EfficientPackNet",
    "Powerprop+Laplace", "Powerprop+EWC", "Powerprop+EfficientPackNet",
)  # fmt: skip
"""The rows of the paper's table."""
TASKS = 10
LEAST = {
    "steps": 1, "batch": 1, "width": 1, "latent": 1, "samples": 1, "curve_samples": 1, "vcl_samples": 1, "shown": 1,
    "validation": 1, "tasks": 1, "tuning_tasks": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """The settings of continual generative modelling.

    Args:
        dataset: "mnist" or "notmnist": ten tasks, one character each.
        seeds: runs of each method: first weights, batches, noise.
        steps: of training per task.
        retrain_steps: after pruning, of EfficientPackNet.
        si_steps: of training per task of SI; 0 means as many as the others have.
        methods: rows of the table, or all.
        alphas: powers of Powerpropagation, for the weights of the shared decoder, to choose from on validation data for
            each method; a single one is taken as it is.
        lr: learning rate of Adam.
        momentum_lr: learning rate of SGD with momentum 0.9 for EfficientPackNet and all methods with Powerpropagation,
            as in the paper; 0 means Adam for them too.
        magnitude: with Powerpropagation, the rate of the shared decoder is such that a weight of this size learns as
            fast as without; 0 leaves the rate.
        spread: the standard deviation of the shared decoder's first weights, and of those that EfficientPackNet draws
            again, in units of Glorot's; the same for all methods.
        gamma: a sub-network must keep so much of the validation ELBO: it may be lower by 1 - gamma of its size.
        search: how the sparsest sub-network is looked for: "linear", "binary" or "taylor".
        strengths: penalties of EWC and Laplace to choose from likewise, together with the power.
        dampings: likewise, what EWC and Laplace add to the importance of every weight, as a part of the mean; 0 is the
            published method.
        si_strengths: the same for SI.
        tuning_tasks: powers, strengths and dampings are chosen on the first so many tasks, with the first seed.
        vcl_samples: networks that VCL draws in each step.
        batch: images per step.
        width: units of a hidden layer.
        latent: numbers in z.
        samples: of each test image in its log-likelihood after the last task.
        curve_samples: of each image in the log-likelihoods after every task and in those that choices are made on.
        test: so many test images of each task are measured, drawn at random; 0 means all.
        validation: the last so many training images, of all tasks together, are for choices.
        images: only the last so many training images of the data are used; 0 means all.
        tasks: the first so many of the ten.
        shown: samples of each task in the pictures.
        precision: of the factors in products of matrices while training, "float32" or "bfloat16"; all else, and every
            likelihood, is float32.
    """

    dataset: str
    seeds: int
    steps: int
    retrain_steps: int
    si_steps: int = 0
    methods: tuple[str, ...] = ("all",)
    alphas: tuple[float, ...] = (1.375,)
    lr: float = 1e-3
    momentum_lr: float = 0.0
    magnitude: float = 0.0
    spread: float = 1.0
    gamma: float = 0.95
    search: str = "binary"
    strengths: tuple[float, ...] = (10.0, 100.0, 1_000.0, 10_000.0)
    dampings: tuple[float, ...] = (0.0,)
    si_strengths: tuple[float, ...] = (1.0, 10.0, 100.0, 1_000.0)
    tuning_tasks: int = 3
    vcl_samples: int = 1
    batch: int = 50
    width: int = 500
    latent: int = 50
    samples: int = 5_000
    curve_samples: int = 50
    test: int = 0
    validation: int = 5_000
    images: int = 0
    tasks: int = TASKS
    shown: int = 6
    precision: str = "float32"

    def __post_init__(self) -> None:
        choices = {"dataset": DATASETS, "methods": ("all", *METHODS), "search": SEARCHES, "precision": PRODUCTS}
        check_settings(self, LEAST, choices)
        check_positive(self, "lr", "gamma", "spread")
        require(self.gamma <= 1, f"gamma must be at most 1, got {self.gamma}")
        for name in ("momentum_lr", "magnitude"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("methods", "alphas", "strengths", "dampings", "si_strengths"):
            values = getattr(self, name)
            require(len(set(values)) == len(values) > 0, f"{name} must be some, each once, got {values}")
        require(min(self.alphas) > 1, f"alphas must be above 1, the power of a method by itself, got {self.alphas}")
        for name in ("strengths", "si_strengths"):
            require(min(getattr(self, name)) > 0, f"{name} must be above 0, got {getattr(self, name)}")
        require(min(self.dampings) >= 0, f"dampings must not be negative, got {self.dampings}")
        require(self.tasks <= TASKS, f"tasks must be at most {TASKS}, got {self.tasks}")
        most = self.tasks
        require(self.tuning_tasks <= most, f"tuning_tasks must be at most the {most} tasks, got {self.tuning_tasks}")
        fits = not self.images or self.validation < self.images
        require(fits, f"validation must be below the {self.images} images, got {self.validation}")


SMOKE: dict[str, Any] = {
    "seeds": 1, "steps": 12, "retrain_steps": 4, "alphas": (1.5,), "strengths": (1.0, 10.0), "si_strengths": (1.0,),
    "dampings": (0.0, 0.5), "tuning_tasks": 1, "width": 12, "latent": 4, "samples": 8, "curve_samples": 4, "test": 5,
    "validation": 200, "images": 1_200, "tasks": 3, "shown": 3, "batch": 16, "magnitude": 0.025, "spread": 0.5,
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "alphas": (1.125, 1.25, 1.375, 1.5, 2.0), "strengths": (1.0, 10.0, 100.0), "si_strengths": (1.0, 10.0, 100.0),
    "tuning_tasks": TASKS,
}  # fmt: skip
"""What the paper chooses from."""
MNIST = {
    "smoke": Config("mnist", **SMOKE),
    "cpu": Config(
        "mnist", seeds=2, steps=900, retrain_steps=300, alphas=(2.0,), magnitude=0.025, spread=0.5, samples=500,
        test=200, precision="bfloat16",
    ),
    "paper": Config(
        "mnist", seeds=5, steps=21_600, retrain_steps=10_800, si_steps=43_200, momentum_lr=1e-3, search="linear",
        vcl_samples=10, curve_samples=500, **PUBLISHED,
    ),
}  # fmt: skip
NOTMNIST = {
    "smoke": Config("notmnist", **SMOKE),
    "cpu": Config(
        "notmnist", seeds=2, steps=900, retrain_steps=300, alphas=(1.5,), magnitude=0.025, spread=0.5, samples=500,
        strengths=(3.0, 10.0, 30.0), dampings=(0.0, 0.03, 0.1), si_strengths=(1.0, 10.0, 100.0), tuning_tasks=5,
        test=150, validation=1_500, precision="bfloat16",
    ),
    "paper": Config(
        "notmnist", seeds=5, steps=12_000, retrain_steps=6_000, momentum_lr=2.5e-3, search="linear",
        vcl_samples=10, curve_samples=500, validation=1_500, **PUBLISHED,
    ),
}  # fmt: skip
