"""The experiments of the paper, one file per figure or table."""

from powerprop.experiments.base import Experiment
from powerprop.experiments.cifar_oneshot import EXPERIMENT as CIFAR_ONESHOT
from powerprop.experiments.mnist_oneshot import EXPERIMENT as MNIST_ONESHOT
from powerprop.experiments.mnist_optimisers import EXPERIMENT as MNIST_OPTIMISERS

EXPERIMENTS: dict[str, Experiment] = {
    "mnist-oneshot": MNIST_ONESHOT,
    "mnist-optimisers": MNIST_OPTIMISERS,
    "cifar-oneshot": CIFAR_ONESHOT,
}

__all__ = ["EXPERIMENTS", "Experiment"]
