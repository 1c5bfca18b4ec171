"""The experiments of the paper, one file per figure or table."""

from powerprop.experiments.base import Experiment
from powerprop.experiments.cifar_oneshot import EXPERIMENT as CIFAR_ONESHOT
from powerprop.experiments.imagenet import EXPERIMENT as IMAGENET
from powerprop.experiments.long_permuted_mnist import EXPERIMENT as LONG_PERMUTED_MNIST
from powerprop.experiments.long_permuted_mnist import THREE_HUNDRED as LONG_PERMUTED_MNIST_300
from powerprop.experiments.mnist_oneshot import EXPERIMENT as MNIST_ONESHOT
from powerprop.experiments.mnist_optimisers import EXPERIMENT as MNIST_OPTIMISERS
from powerprop.experiments.permuted_mnist import EXPERIMENT as PERMUTED_MNIST
from powerprop.experiments.sparse_training import CIFAR as SPARSE_TRAINING_CIFAR
from powerprop.experiments.sparse_training import EXPERIMENT as SPARSE_TRAINING
from powerprop.experiments.split_cifar100 import EXPERIMENT as SPLIT_CIFAR100
from powerprop.experiments.split_mnist import EXPERIMENT as SPLIT_MNIST
from powerprop.experiments.unknown_boundaries import EXPERIMENT as UNKNOWN_BOUNDARIES

EXPERIMENTS: dict[str, Experiment] = {
    "mnist-oneshot": MNIST_ONESHOT,
    "mnist-optimisers": MNIST_OPTIMISERS,
    "cifar-oneshot": CIFAR_ONESHOT,
    "imagenet": IMAGENET,
    "sparse-training": SPARSE_TRAINING,
    "sparse-training-cifar": SPARSE_TRAINING_CIFAR,
    "permuted-mnist": PERMUTED_MNIST,
    "split-mnist": SPLIT_MNIST,
    "split-cifar100": SPLIT_CIFAR100,
    "long-permuted-mnist": LONG_PERMUTED_MNIST,
    "long-permuted-mnist-300": LONG_PERMUTED_MNIST_300,
    "unknown-boundaries": UNKNOWN_BOUNDARIES,
}

__all__ = ["EXPERIMENTS", "Experiment"]
