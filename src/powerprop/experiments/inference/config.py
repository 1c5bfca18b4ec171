"""The settings of the experiment on task inference, and its presets."""

from __future__ import annotations

from dataclasses import dataclass

from powerprop.experiments.harness.checks import check_positive, check_settings, require

LEAST = {"tasks": 2, "steps": 1, "probe": 1, "probe_single": 1, "batch": 1, "width": 1, "pruning_steps": 1}
CHOICES = {"streams": ("permuted", "rotated", "split"), "inputs": ("plain", "standardised")}


@dataclass(frozen=True)
class Config:
    """The settings of the experiment.

    Args:
        streams: "permuted", "rotated", "split" MNIST.
        inputs: "plain" pixels in [0, 1], or "standardised", every pixel of a task with mean 0 and variance 1.
        superfluous: numbers of outputs beyond the classes.
        tasks: of the permuted and rotated streams; the split one has five.
        alpha: the power of Powerpropagation.
        lr: learning rate.
        seeds: runs of each: first weights, orders, angles, batches.
        steps: of training per task.
        retrain_steps: after pruning.
        prunings: inside the retraining steps.
        pruning_steps: between two of them.
        gamma: fraction of the validation accuracy that a sub-network must keep.
        batch: images per step.
        width: units of a hidden layer.
        groups: sizes of the groups of images whose task is inferred together.
        probe: test images of each task.
        probe_single: so many of them for the gradient methods at one image, a pass back and forth each.
        rate: of false alarms that the flag of unknown inputs is allowed.
        images: only the last so many training images of the data are used; 0 means all.
        validation: the last so many training images of the data decide the sparsity and the limit of unknown inputs.
    """

    streams: tuple[str, ...]
    inputs: tuple[str, ...]
    superfluous: tuple[int, ...]
    tasks: int
    alpha: float
    lr: float
    seeds: int
    steps: int
    retrain_steps: int
    prunings: int
    pruning_steps: int
    gamma: float
    batch: int = 64
    width: int = 300
    groups: tuple[int, ...] = (1, 8, 128)
    probe: int = 512
    probe_single: int = 48
    rate: float = 0.05
    images: int = 0
    validation: int = 5000

    def __post_init__(self) -> None:
        check_settings(self, LEAST, CHOICES)
        check_positive(self, "lr")
        require(self.alpha >= 1, f"alpha must be at least 1, got {self.alpha}")
        require(0 < self.gamma <= 1, f"gamma must be in (0, 1], got {self.gamma}")
        require(0 < self.rate < 1, f"rate must be in (0, 1), got {self.rate}")
        for name in ("streams", "inputs", "superfluous", "groups"):
            values = getattr(self, name)
            require(len(set(values)) == len(values) > 0, f"{name} must be some, each once, got {values}")
        require(min(self.groups) >= 1, f"group must be at least 1, got {min(self.groups)}")
        require(min(self.superfluous) >= 0, f"superfluous must be at least 0, got {min(self.superfluous)}")
        asked = self.prunings * self.pruning_steps
        text = f"prunings times pruning_steps must be at most {self.retrain_steps}, the retrain_steps, got {asked}"
        require(asked <= self.retrain_steps, text)
        fits = not self.images or self.validation < self.images
        require(fits, f"validation must be below the {self.images} images, got {self.validation}")


PRESETS = {
    "smoke": Config(
        streams=("permuted", "split"), inputs=("plain", "standardised"), superfluous=(0, 5), tasks=3, alpha=1.25,
        lr=0.5, seeds=1, steps=20, retrain_steps=6, prunings=1, pruning_steps=2, gamma=0.5, width=32, groups=(1, 16),
        probe=32, probe_single=4, images=2_000, validation=500,
    ),
    "cpu": Config(
        streams=("permuted", "rotated", "split"), inputs=("plain", "standardised"), superfluous=(0, 90), tasks=10,
        alpha=1.25, lr=2.0, seeds=1, steps=400, retrain_steps=250, prunings=3, pruning_steps=50, gamma=0.97,
    ),
    "paper": Config(
        streams=("permuted", "rotated", "split"), inputs=("plain", "standardised"), superfluous=(0, 90), tasks=10,
        alpha=1.375, lr=0.05, seeds=5, steps=50_000, retrain_steps=50_000, prunings=3, pruning_steps=5_000, gamma=0.99,
        width=1000,
    ),
}  # fmt: skip
