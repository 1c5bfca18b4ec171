"""Hundreds of tasks in one network: the figure "extremely long task sequences" of the paper, section 5.3.

The network and the stream are those of `permuted-mnist`; γ = 0.9 leaves room for many tasks. The paper trains and
retrains 50,000 steps per task; the presets `cpu` about a hundredth of it, with a finer grid of fractions: in coarse
steps of 10% a crowded network would give away weights that a task does not need. Small first weights and learning
rates that grow with α let a task do with few weights, and "frugal-packnet" with far fewer: it prunes gradually inside
the retraining steps and leaves the hidden weights of earlier tasks out while a new one is trained. "efficient-packnet"
is the algorithm as published. The longest sequence goes on when no weight is free: then a task learns which of the
frozen weights to use.
"""

from __future__ import annotations

from dataclasses import replace

from powerprop.experiments.continual.config import Config
from powerprop.experiments.continual.experiment import continual_experiment
from powerprop.experiments.continual.report import Story

FINE = tuple(round(0.95 * 0.95**k, 5) for k in range(100))
"""Kept fractions, each 5% below the one before, from 95% to 0.6%."""

PRESETS = {
    "smoke": Config(
        data="mnist", stream="permuted", tasks=7, alphas=(1.0, 1.5), lr=0.3, seeds=1, steps=4, retrain_steps=2,
        gamma=0.3, clip=1.0, width=40, search="binary", grid=FINE, images=2_000, validation=500, test=64, matrix=False,
        groups=(1, 16), infer_at=(3,), probe=32, probed=3, frugal_gamma=0.3, prunings=2, pruning_steps=1,
        methods=("frugal-packnet", "efficient-packnet"),
    ),
    "cpu": Config(
        data="mnist", stream="permuted", tasks=100, alphas=(1.0, 1.25, 1.5), lr=1.0, seeds=1, steps=700,
        retrain_steps=400, gamma=0.9, methods=("frugal-packnet",), decay=("retraining",), clip=1.0,
        spread=0.5, search="binary", grid=FINE, validation=2_000, matrix=False, groups=(1, 16, 128), infer_at=(10,),
        probe=256, precision="bfloat16",
    ),
    "paper": Config(
        data="mnist", stream="permuted", tasks=300, alphas=(1.0, 1.125, 1.25, 1.375, 1.5), lr=0.05, seeds=10,
        steps=50_000, retrain_steps=50_000, gamma=0.9, scale_lr=False, matrix=False, infer_at=(10, 100),
    ),
}  # fmt: skip

LONGER = {
    "smoke": replace(PRESETS["smoke"], alphas=(1.5,), infer_at=(2, 5)),
    "cpu": replace(PRESETS["cpu"], tasks=300, alphas=(1.25,), infer_at=(10, 100), precision="float32"),
    "paper": PRESETS["paper"],
}

ENDLESS = {
    "smoke": replace(LONGER["smoke"], tasks=6, methods=("frugal-packnet",)),
    "cpu": replace(LONGER["cpu"], tasks=900, infer_at=(100, 300), precision="bfloat16", probed=3),
    "paper": replace(PRESETS["paper"], tasks=1000, methods=("frugal-packnet",)),
}

STORY = Story(
    title="Extremely long task sequences: Permuted-MNIST",
    paper='Section 5.3.1, figure "Powerpropagation on extremely long task sequences": about 86% on average after 300 '
    "tasks.",
    intro="One network of 784-1000-1000-10 units learns task after task, each with the pixels in another order. The "
    "weights that a task takes never change again, and later tasks may use them.",
    printed="about 86 after 300 tasks (50,000 + 50,000 steps)",
)

FIGURE = "figure of long task sequences, section 5.3"
EXPERIMENT = continual_experiment(
    "long-permuted-mnist", "100 tasks in one network: accuracy and weights in use", FIGURE, PRESETS, STORY
)
THREE_HUNDRED = continual_experiment("long-permuted-mnist-300", "300 tasks in one network", FIGURE, LONGER, STORY)
UNENDING = continual_experiment(
    "endless-permuted-mnist", "tasks that go on when the network is full", FIGURE, ENDLESS, STORY
)
