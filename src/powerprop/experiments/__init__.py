"""The experiments of the paper, one file per figure or table."""

from powerprop.experiments.boundaries.train import EXPERIMENT as UNKNOWN_BOUNDARIES
from powerprop.experiments.continual.baselines.experiments import PERMUTED_MNIST as PERMUTED_MNIST_STRATEGIES
from powerprop.experiments.continual.baselines.experiments import POWERPROP_EWC
from powerprop.experiments.continual.baselines.experiments import SPLIT_CIFAR100 as SPLIT_CIFAR100_STRATEGIES
from powerprop.experiments.continual.baselines.experiments import SPLIT_MNIST as SPLIT_MNIST_STRATEGIES
from powerprop.experiments.continual.long_permuted_mnist import EXPERIMENT as LONG_PERMUTED_MNIST
from powerprop.experiments.continual.long_permuted_mnist import THREE_HUNDRED as LONG_PERMUTED_MNIST_300
from powerprop.experiments.continual.long_permuted_mnist import UNENDING as ENDLESS_PERMUTED_MNIST
from powerprop.experiments.continual.permuted_mnist import EXPERIMENT as PERMUTED_MNIST
from powerprop.experiments.continual.rotated_mnist import EXPERIMENT as ROTATED_MNIST
from powerprop.experiments.continual.split_cifar100 import EXPERIMENT as SPLIT_CIFAR100
from powerprop.experiments.continual.split_mnist import EXPERIMENT as SPLIT_MNIST
from powerprop.experiments.generative.experiments import GENERATIVE, GENERATIVE_NOTMNIST
from powerprop.experiments.harness.experiment import Experiment
from powerprop.experiments.imagenet.train import EXPERIMENT as IMAGENET
from powerprop.experiments.inference.train import EXPERIMENT as TASK_INFERENCE
from powerprop.experiments.oneshot.cifar import EXPERIMENT as CIFAR_ONESHOT
from powerprop.experiments.oneshot.mnist import EXPERIMENT as MNIST_ONESHOT
from powerprop.experiments.oneshot.optimisers import EXPERIMENT as MNIST_OPTIMISERS
from powerprop.experiments.rl.train import EXPERIMENT as CONTINUAL_WORLD
from powerprop.experiments.sparse.train import CIFAR as SPARSE_TRAINING_CIFAR
from powerprop.experiments.sparse.train import EXPERIMENT as SPARSE_TRAINING

EXPERIMENTS: dict[str, Experiment] = {
    "mnist-oneshot": MNIST_ONESHOT,
    "mnist-optimisers": MNIST_OPTIMISERS,
    "cifar-oneshot": CIFAR_ONESHOT,
    "imagenet": IMAGENET,
    "sparse-training": SPARSE_TRAINING,
    "sparse-training-cifar": SPARSE_TRAINING_CIFAR,
    "permuted-mnist": PERMUTED_MNIST,
    "split-mnist": SPLIT_MNIST,
    "rotated-mnist": ROTATED_MNIST,
    "split-cifar100": SPLIT_CIFAR100,
    "long-permuted-mnist": LONG_PERMUTED_MNIST,
    "long-permuted-mnist-300": LONG_PERMUTED_MNIST_300,
    "endless-permuted-mnist": ENDLESS_PERMUTED_MNIST,
    "split-mnist-strategies": SPLIT_MNIST_STRATEGIES,
    "permuted-mnist-strategies": PERMUTED_MNIST_STRATEGIES,
    "split-cifar100-strategies": SPLIT_CIFAR100_STRATEGIES,
    "powerprop-ewc": POWERPROP_EWC,
    "unknown-boundaries": UNKNOWN_BOUNDARIES,
    "generative": GENERATIVE,
    "generative-notmnist": GENERATIVE_NOTMNIST,
    "task-inference": TASK_INFERENCE,
    "continual-world": CONTINUAL_WORLD,
}

__all__ = ["EXPERIMENTS", "Experiment"]
