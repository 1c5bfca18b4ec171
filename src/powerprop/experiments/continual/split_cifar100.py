"""Split-CIFAR100, ten tasks of ten classes each, in the AlexNet-like network: section 5.3 of the paper.

Every task has an output layer of its own. The paper trains and retrains 75,000 steps per task with α = 1.75; the preset
`cpu` 1,000 and 500, which is enough for a network that learns from images moved and mirrored, with momentum and a rate
that falls to zero; other settings are chosen on validation images of the first two tasks.
"""

from __future__ import annotations

from powerprop.experiments.continual.config import Config
from powerprop.experiments.continual.experiment import continual_experiment
from powerprop.experiments.continual.report import Story

CANDIDATES = (
    "lr=0.02 gamma=0.98 clip=0",
    "lr=0.04 gamma=0.98 clip=0",
    "lr=0.04 gamma=0.98 clip=2",
    "lr=0.02 gamma=1 clip=0",
)
PRESETS = {
    "smoke": Config(
        data="cifar100", stream="split", tasks=2, model="alexnet", alphas=(1.75,), lr=0.05, seeds=1, steps=1,
        retrain_steps=1, gamma=0.01, clip=1.0, batch=8, search="binary", grid=(0.9, 0.3), images=2_000,
        validation=500, test=16, matrix=False, groups=(1, 8), probe=8, probed=2, precision="bfloat16",
        momentum=0.9, shift=2, candidates=("lr=0.05 clip=1", "lr=0.1 gamma=0.02"), tuning_tasks=1,
    ),
    "cpu": Config(
        data="cifar100", stream="split", tasks=10, model="alexnet", alphas=(1.0, 1.375, 1.75), lr=0.02, seeds=1,
        steps=1_000, retrain_steps=500, gamma=0.98, magnitude=0.02, momentum=0.9, decay=("training", "retraining"),
        spread=0.5, shift=2, search="binary", validation=2_500, probe=128, precision="bfloat16", candidates=CANDIDATES,
    ),
    "paper": Config(
        data="cifar100", stream="split", tasks=10, model="alexnet", alphas=(1.75,), lr=0.05, seeds=5, steps=75_000,
        retrain_steps=75_000, gamma=0.99, scale_lr=False,
    ),
}  # fmt: skip

STORY = Story(
    title="Split-CIFAR100 with an output layer per task",
    paper='Section 5.3.2, table "Class-incremental learning results", column 10-task Split-CIFAR100.',
    intro="Ten tasks of ten classes, learned one after the other in one AlexNet-like network; every task has an output "
    "layer of its own. The training is shortened: the paper's has 75,000 steps and as many of retraining per task, and "
    "five seeds. Where the training set at hand is not complete a note says so.",
    rows=(
        ("EWC (paper)", "68.80 ± 0.88", "", ""),
        ("HAT (paper)", "72.06 ± 0.50", "", ""),
        ("GPM (paper)", "72.48 ± 0.40", "", ""),
        ("Powerprop + EPN, α=1.75 (paper)", "", "73.70 ± 0.70", ""),
    ),
    printed="73.70 ± 0.70 (75,000 + 75,000 steps)",
)

EXPERIMENT = continual_experiment(
    "split-cifar100",
    "ten tasks of ten classes in a convolutional network",
    "table of class-incremental learning, section 5.3",
    PRESETS,
    STORY,
)
