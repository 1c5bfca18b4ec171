"""The networks of the experiments. Every one takes a `generator`, so that a seed decides its weights."""

from powerprop.continual.vae import VAE, vae
from powerprop_paper.models.autoencoders import ReplayVAE, TaskVAE, replay_vae, task_vae
from powerprop_paper.models.convnets import AlexNet, Conv6, FastCifar, alexnet, conv6, fast_cifar
from powerprop_paper.models.heads import Heads
from powerprop_paper.models.init import initialise
from powerprop_paper.models.lenet import MLP, lenet_300_100, mlp
from powerprop_paper.models.resnet import CifarResNet, ResNet, WideResNet, resnet18, resnet20, resnet50, wrn_22_2

__all__ = [
    "MLP",
    "VAE",
    "AlexNet",
    "CifarResNet",
    "Conv6",
    "FastCifar",
    "Heads",
    "ReplayVAE",
    "ResNet",
    "TaskVAE",
    "WideResNet",
    "alexnet",
    "conv6",
    "fast_cifar",
    "initialise",
    "lenet_300_100",
    "mlp",
    "replay_vae",
    "resnet18",
    "resnet20",
    "resnet50",
    "task_vae",
    "vae",
    "wrn_22_2",
]
