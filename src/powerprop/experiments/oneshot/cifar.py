"""One-shot pruning of Conv-6 on CIFAR-10: figure 3a of the paper.

The paper trains a network of 64 to 256 channels for 100,000 steps, more than a day for each run on one core. The preset
`cpu` therefore trains one with a quarter of the channels for 1,200 steps: it shows the effect, not the paper's
accuracies. The protocol is that of `mnist-oneshot`. The paper's table of settings speaks of batch norm variables that
are not pruned, so the network has batch norm; the statistics of the dense network are kept when it is pruned.
"""

from __future__ import annotations

from powerprop.experiments.oneshot.config import Config
from powerprop.experiments.oneshot.experiment import oneshot_experiment
from powerprop.experiments.oneshot.report import Story

CIFAR10, CONV6 = "cifar10", "conv6"

PRESETS = {
    "smoke": Config(
        data=CIFAR10, model=CONV6, alphas=(1.0, 2.0), lrs=(0.02,), seeds=1, steps=6, batch=20, momentum=0.9,
        init="glorot_normal", pixels="standard", width=0.125, batch_norm=True, train=500, validation=100, test=100,
        points=5, every=3,
    ),
    "cpu": Config(
        data=CIFAR10, model=CONV6, alphas=(1.0, 2.0, 3.0), lrs=(0.05, 0.1), seeds=2, steps=1_200, momentum=0.9,
        init="glorot_normal", pixels="standard", width=0.25, batch_norm=True, tolerance=0.02, validation=1_000,
        test=2_000, points=12, least=0.02, band=(0.1, 0.4), every=200,
    ),
    "paper": Config(
        data=CIFAR10, model=CONV6, alphas=(1.0, 2.0, 3.0, 4.0, 5.0), lrs=(0.0025,), seeds=5, steps=100_000,
        momentum=0.9, init="glorot_normal", pixels="standard", batch_norm=True,
    ),
}  # fmt: skip

STORY = Story(
    title="One-shot pruning of Conv-6 on CIFAR-10",
    paper="Section 5.1, figure 3a. The paper reports gains of up to 33 points at some sparsities, for the whole "
    "network and 100,000 steps.",
    intro="The protocol of the MNIST experiment on natural images: dense training, then magnitude pruning once, layer "
    "by layer, without retraining.",
    printed="gains of up to 33 points (whole network, 100,000 steps)",
)

EXPERIMENT = oneshot_experiment(
    name="cifar-oneshot",
    title="accuracy of Conv-6 against weights kept, after one-shot pruning",
    paper="figure 3a, section 5.1",
    presets=PRESETS,
    story=STORY,
)
