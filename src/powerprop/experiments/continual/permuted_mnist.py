"""Permuted-MNIST, ten tasks: class-incremental learning, section 5.3 of the paper.

Every task has the pixels of all digits in an order of its own; one output layer of ten units serves all tasks. Plain
SGD; the paper trains and retrains 50,000 steps per task, the preset `cpu` a few per cent of it, from smaller first
weights and at learning rates that grow with α.
"""

from __future__ import annotations

from powerprop.experiments.continual.config import Config
from powerprop.experiments.continual.experiment import continual_experiment
from powerprop.experiments.continual.report import Story

PRESETS = {
    "smoke": Config(
        data="mnist", stream="permuted", tasks=3, alphas=(1.0, 1.375), lr=0.3, seeds=1, steps=8, retrain_steps=4,
        gamma=0.3, clip=1.0, width=40, search="taylor", images=2_000, validation=500, test=64, groups=(1, 16), probe=32,
        methods=("frugal-packnet", "efficient-packnet"), prunings=2, pruning_steps=2, frugal_gamma=0.3,
    ),
    "cpu": Config(
        data="mnist", stream="permuted", tasks=10, alphas=(1.0, 1.375), lr=1.0, seeds=1, steps=1_000,
        retrain_steps=500, gamma=0.99, decay=("retraining",), clip=1.0, spread=0.5, search="binary",
        methods=("frugal-packnet", "efficient-packnet"), frugal_gamma=0.995, precision="bfloat16",
    ),
    "paper": Config(
        data="mnist", stream="permuted", tasks=10, alphas=(1.0, 1.375), lr=0.05, seeds=10, steps=50_000,
        retrain_steps=50_000, gamma=0.99, scale_lr=False,
    ),
}  # fmt: skip

STORY = Story(
    title="Class-incremental Permuted-MNIST",
    paper='Section 5.3.2, table "Class-incremental learning results", column Permuted-MNIST.',
    intro="Ten tasks, each with the pixels in another order, learned one after the other in one network of "
    "784-1000-1000-10 units. Every task gets a sub-network; at test time the task is given, or found out from images.",
    rows=(
        ("EPN (paper)", "", "97.09 ± 0.08", ""),
        ("Powerprop + EPN (paper)", "", "97.47 ± 0.05", ""),
    ),
    printed="97.47 ± 0.05 (50,000 + 50,000 steps)",
)

EXPERIMENT = continual_experiment(
    "permuted-mnist",
    "ten orders of the pixels, task given and task inferred",
    "table of class-incremental learning, section 5.3",
    PRESETS,
    STORY,
)
