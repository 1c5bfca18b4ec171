"""Rotated MNIST, ten tasks: related tasks, where weights of earlier ones are worth reusing.

The paper has no such experiment. It is here because leaving the hidden weights of earlier tasks out while a new one is
trained ("frugal-packnet") might cost most where tasks resemble each other: both forms stand beside each other.
"""

from __future__ import annotations

from dataclasses import replace

from powerprop.experiments.continual import permuted_mnist
from powerprop.experiments.continual.experiment import continual_experiment
from powerprop.experiments.continual.report import Story

PRESETS = {name: replace(preset, stream="rotated") for name, preset in permuted_mnist.PRESETS.items()}
PRESETS["smoke"] = replace(PRESETS["smoke"], gamma=0.6, frugal_gamma=0.6, search="binary")

STORY = Story(
    title="Rotated MNIST",
    paper="No experiment of the paper; network and settings are those of its Permuted-MNIST.",
    intro="Ten tasks, each with all digits at another angle between 0° and 180°, learned one after the other in one "
    "network of 784-1000-1000-10 units. Neighbouring tasks resemble each other, so that reuse of weights could pay.",
)

EXPERIMENT = continual_experiment(
    "rotated-mnist", "ten angles, task given and task inferred", "no figure of the paper", PRESETS, STORY
)
