"""One-shot pruning of networks of convolutions on CIFAR-10: figure 3a of the paper.

The paper trains Conv-6, a network of 64 to 256 channels, for 100,000 steps, more than a day for each run on one core.
The preset `cpu` therefore trains a network made for speed (`models.fast_cifar`) to about 90%, with what such networks
are trained with: a triangular learning rate, Nesterov's momentum, label smoothing, flips and shifts. Conv-6 and
ResNet-20 are a `--model` away. Every network is pruned in four ways: one ranking of all layers or one for each, and
with statistics of batch norms as they were or measured again; the last decides who wins above 10% kept.
"""

from __future__ import annotations

from typing import Any

from powerprop.experiments.oneshot.config import Config
from powerprop.experiments.oneshot.experiment import oneshot_experiment
from powerprop.experiments.oneshot.report import Story

CIFAR10, CONV6, FAST = "cifar10", "conv6", "fast-cifar"
WAYS = ("global recalibrated", "global", "layerwise recalibrated", "layerwise")
SPEED: dict[str, Any] = {
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 5e-4,
    "peak": 0.2,
    "label_smoothing": 0.1,
    "shift": 2,
    "precision": "bfloat16",
}
"""Convolutions in bfloat16 take half of the time of float32 on a CPU that has it; weights and updates are float32."""

PRESETS = {
    "smoke": Config(
        data=CIFAR10, model=FAST, alphas=(1.0, 2.0), lrs=(0.02, 0.02), decays=(5e-4, 1e-3), lassos=(1e-4,),
        magnitude=0.1, forms=("direct",), seeds=1, steps=6, batch=20, init="he_normal", pixels="standard", width=0.125,
        train=500, validation=100, test=100, points=5, least=0.02, band=(0.03, 0.2), every=3, ways=WAYS, **SPEED,
    ),
    "cpu": Config(
        data=CIFAR10, model=FAST, alphas=(1.0, 1.5, 2.0, 3.0), lrs=(0.2, 0.4, 0.2), decays=(5e-4, 5e-4, 1e-3),
        lassos=(5e-5, 1e-4), magnitude=0.1, forms=("direct",), seeds=3, steps=4_320, batch=125, init="he_normal",
        pixels="standard", tolerance=0.01, validation=5_000, points=12, least=0.02, band=(0.03, 0.1), every=360,
        ways=WAYS, **SPEED,
    ),
    "paper": Config(
        data=CIFAR10, model=CONV6, alphas=(1.0, 2.0, 3.0, 4.0, 5.0), lrs=(0.0025,), seeds=5, steps=100_000,
        momentum=0.9, init="glorot_normal", pixels="standard", batch_norm=True,
    ),
}  # fmt: skip

STORY = Story(
    title="One-shot pruning on CIFAR-10",
    paper="Section 5.1, figure 3a. The paper reports gains of up to 33 points at some sparsities, for the whole "
    "network and 100,000 steps.",
    intro="The protocol of the MNIST experiment on natural images: dense training, then magnitude pruning once, "
    "without retraining.",
    printed="gains of up to 33 points (whole network, 100,000 steps)",
    full=PRESETS["paper"],
)

EXPERIMENT = oneshot_experiment(
    name="cifar-oneshot",
    title="accuracy on CIFAR-10 against weights kept, after one-shot pruning",
    paper="figure 3a, section 5.1",
    presets=PRESETS,
    story=STORY,
)
