"""Powerpropagation with Adam on MNIST: appendix A of the paper.

Three ways to train LeNet-300-100 with Adam: alone (α = 1); on φ directly, so that Adam's own scaling sees the gradient
of φ and undoes part of the effect; through virtual targets, Adam(∂L/∂w)·α|φ|^(α-1), which the paper recommends. All at
the paper's learning rate of 0.001; the pruning curve is that of `mnist-oneshot`. The paper does not say which α it
shows; here it is 2, in the preset `paper` also 3 and 4.
"""

from __future__ import annotations

from powerprop.experiments.oneshot.config import Config
from powerprop.experiments.oneshot.experiment import oneshot_experiment
from powerprop.experiments.oneshot.report import Story

MNIST, LENET, BOTH = "mnist", "lenet-300-100", ("targets", "direct")

PRESETS = {
    "smoke": Config(
        data=MNIST, model=LENET, optimiser="adam", forms=BOTH, alphas=(1.0, 2.0), lrs=(0.001,), seeds=1, steps=40,
        every=20, points=5, test=500, train=2_000, validation=500,
    ),
    "cpu": Config(
        data=MNIST, model=LENET, optimiser="adam", forms=BOTH, alphas=(1.0, 2.0), lrs=(0.001,), seeds=5, steps=20_000
    ),
    "paper": Config(
        data=MNIST, model=LENET, optimiser="adam", forms=BOTH, alphas=(1.0, 2.0, 3.0, 4.0), lrs=(0.001,), seeds=5,
        steps=50_000, init="glorot_normal",
    ),
}  # fmt: skip

STORY = Story(
    title="Powerpropagation with Adam on MNIST",
    paper="Appendix A. The paper shows one figure and prints no values; it finds virtual targets best, Adam on φ "
    "directly next, and plain Adam last.",
    intro="Adam divides each gradient by a running estimate of its size. Applied to φ directly that undoes part of "
    "Powerpropagation's effect; applied to the effective weights, with the step handed on to φ (virtual targets), it "
    "does not.",
    full=PRESETS["paper"],
)

EXPERIMENT = oneshot_experiment(
    name="mnist-optimisers",
    title="Adam alone, on φ directly and through virtual targets, after one-shot pruning",
    paper="appendix A",
    presets=PRESETS,
    story=STORY,
)
