"""The experiments of the paper, one file per figure or table."""

from powerprop.experiments.base import Experiment
from powerprop.experiments.mnist_oneshot import EXPERIMENT as MNIST_ONESHOT

EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in (MNIST_ONESHOT,)}

__all__ = ["EXPERIMENTS", "Experiment"]
