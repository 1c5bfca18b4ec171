"""The settings of the experiment without told boundaries, and its presets."""

from __future__ import annotations

from dataclasses import dataclass

from powerprop.continual.boundaries.finder import check_finding
from powerprop.experiments.continual.config import Config as Learning
from powerprop.experiments.harness.checks import check_settings, require

LEAST = {"group": 1}


@dataclass(frozen=True)
class Config:
    """The settings of the experiment.

    Args:
        tasks: how many.
        shortest: a task lasts any number of batches from this one to the longest, drawn from the seed.
        longest: the most batches of a task.
        alpha: the power of Powerpropagation.
        lr: learning rate.
        seeds: runs of each arm: first weights, order of pixels, lengths, batches.
        retrain_steps: after pruning, on what is kept of a task.
        gamma: fraction of the dense validation accuracy that a sub-network must keep.
        frugal_gamma: the same of the arm that packs frugally.
        prunings: how often that arm prunes further inside the retraining steps.
        pruning_steps: between two of these prunings.
        decay: let the learning rate fall to zero along these phases; of a stream only "retraining" has a known end.
        spread: the standard deviation of the first weights, and of those that are initialised again, in units of
            Glorot's.
        clip: the largest norm of a gradient; 0 is any.
        batch: images per step.
        width: units of a hidden layer.
        delay: batches that wait before they are trained on, and within which a change must be found.
        confirm: batches that a change must last.
        certainty: the probability from which on a change is believed.
        least: a task has at least so many batches.
        memory: batches that are kept of the current task, to pack it.
        images: only the last so many training images of the data are used; 0 means all.
        test: the first so many test images of a task are measured; 0 means all.
        group: so many test images have their task inferred together.
        precision: of the factors in products of matrices, "float32" or "bfloat16"; all else is float32.
    """

    tasks: int
    shortest: int
    longest: int
    alpha: float
    lr: float
    seeds: int
    retrain_steps: int
    gamma: float
    frugal_gamma: float = 0.96
    prunings: int = 2
    pruning_steps: int = 50
    decay: tuple[str, ...] = ("retraining",)
    spread: float = 0.5
    clip: float = 1.0
    batch: int = 64
    width: int = 1000
    delay: int = 5
    confirm: int = 3
    certainty: float = 0.9
    least: int = 100
    memory: int = 200
    images: int = 0
    test: int = 0
    group: int = 128
    precision: str = "float32"

    def __post_init__(self) -> None:
        check_settings(self, LEAST)
        shortest, longest = self.shortest, self.longest
        require(1 <= shortest <= longest, f"expected 1 <= shortest <= longest, got {shortest} and {longest}")
        require(self.least <= shortest, f"least must be at most {shortest} (the shortest task), got {self.least}")
        check_finding(self.delay, self.confirm, self.certainty, self.least, self.memory)
        fits = self.images == 0 or self.images >= self.batch
        require(fits, f"images must be at least {self.batch} (the batch), or 0 for all, got {self.images}")
        learning(self)


def learning(config: Config) -> Learning:
    """The settings that this experiment shares with those whose tasks have boundaries."""
    return Learning(
        data="mnist", stream="permuted", tasks=config.tasks, alphas=(config.alpha,), lr=config.lr, seeds=config.seeds,
        steps=config.longest, retrain_steps=config.retrain_steps, gamma=config.gamma, scale_lr=False,
        decay=config.decay, spread=config.spread, clip=config.clip, batch=config.batch, width=config.width,
        search="binary", images=config.images, validation=0, test=config.test, frugal_gamma=config.frugal_gamma,
        methods=("efficient-packnet", "frugal-packnet"), prunings=config.prunings, pruning_steps=config.pruning_steps,
        precision=config.precision,
    )  # fmt: skip


PRESETS = {
    "smoke": Config(
        tasks=3, shortest=100, longest=140, alpha=1.5, lr=1.0, seeds=1, retrain_steps=10, gamma=0.5, width=64,
        frugal_gamma=0.5, prunings=1, pruning_steps=5, least=40, memory=40, images=2_000, test=128, group=32,
    ),
    "cpu": Config(
        tasks=10, shortest=300, longest=600, alpha=1.5, lr=4.6, seeds=2, retrain_steps=200, gamma=0.9,
        precision="bfloat16",
    ),
    "paper": Config(
        tasks=10, shortest=50_000, longest=50_000, alpha=1.5, lr=0.05, seeds=10, retrain_steps=50_000, gamma=0.9,
        decay=(), spread=1.0, memory=800,
    ),
}  # fmt: skip
