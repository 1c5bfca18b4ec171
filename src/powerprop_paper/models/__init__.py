"""The networks of the experiments. Every one takes a `generator`, so that a seed decides its weights."""

from powerprop.continual.generative_replay import VAE, vae
from powerprop_paper.models.autoencoders import ReplayVAE, TaskVAE, replay_vae, task_vae
from powerprop_paper.models.gpt import GPT, gpt
from powerprop_paper.models.networks import (
    MLP,
    WIDTHS,
    AlexNet,
    Conv6,
    FastCifar,
    Heads,
    alexnet,
    conv6,
    fans,
    fast_cifar,
    initialise,
    lenet_300_100,
    mlp,
)
from powerprop_paper.models.resnet import CifarResNet, ResNet, resnet18, resnet20, resnet50

__all__ = [
    "GPT", "MLP", "VAE", "WIDTHS", "AlexNet", "CifarResNet", "Conv6", "FastCifar", "Heads", "ReplayVAE", "ResNet",
    "TaskVAE", "alexnet", "conv6", "fans", "fast_cifar", "gpt", "initialise", "lenet_300_100", "mlp", "replay_vae",
    "resnet18", "resnet20", "resnet50", "task_vae", "vae",
]  # fmt: skip
