"""Split-MNIST, five tasks of two digits each: class-incremental learning, section 5.3 of the paper.

One output layer of ten units for all tasks, plain SGD. The paper trains 50,000 steps per task and retrains as many; the
preset `cpu` a few per cent of it, from smaller first weights and at learning rates that grow with α.
"""

from __future__ import annotations

from powerprop.experiments.continual.config import Config
from powerprop.experiments.continual.experiment import continual_experiment
from powerprop.experiments.continual.report import Story

PRESETS = {
    "smoke": Config(
        data="mnist", stream="split", tasks=5, alphas=(1.0, 1.375), lr=0.3, seeds=1, steps=8, retrain_steps=4,
        gamma=0.3, methods=("frugal-packnet", "efficient-packnet", "packnet"), clip=1.0, width=40, search="binary",
        images=2_000, validation=500, test=64, groups=(1, 16), probe=32, probed=3, prunings=2, pruning_steps=2,
        frugal_gamma=0.3,
    ),
    "cpu": Config(
        data="mnist", stream="split", tasks=5, alphas=(1.0, 1.375), lr=1.0, seeds=3, steps=1_000, retrain_steps=500,
        gamma=0.99, decay=("retraining",), clip=1.0, spread=0.5, methods=("frugal-packnet", "efficient-packnet"),
        frugal_gamma=0.998, precision="bfloat16",
    ),
    "paper": Config(
        data="mnist", stream="split", tasks=5, alphas=(1.0, 1.375), lr=0.05, seeds=10, steps=50_000,
        retrain_steps=50_000, gamma=0.99, scale_lr=False,
    ),
}  # fmt: skip

STORY = Story(
    title="Class-incremental Split-MNIST",
    paper='Section 5.3.2, table "Class-incremental learning results", column Split-MNIST.',
    intro="Five tasks of two digits, learned one after the other in one network of 784-1000-1000-10 units. Every task "
    "gets a sub-network; at test time the task is given, or found out from the images.",
    rows=(
        ("EPN (paper)", "", "99.42 ± 0.15", ""),
        ("Powerprop + EPN (paper)", "", "99.71 ± 0.04", ""),
    ),
    printed="99.71 ± 0.04 (50,000 + 50,000 steps)",
)

EXPERIMENT = continual_experiment(
    "split-mnist",
    "five tasks of two digits, task given and task inferred",
    "table of class-incremental learning, section 5.3",
    PRESETS,
    STORY,
)
