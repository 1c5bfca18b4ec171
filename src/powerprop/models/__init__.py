"""The networks of the experiments. Every one takes a `generator`, so that a seed decides its weights."""

from powerprop.models.alexnet import AlexNet, alexnet
from powerprop.models.conv6 import Conv6, conv6
from powerprop.models.fastconv import FastCifar, fast_cifar
from powerprop.models.heads import Heads
from powerprop.models.init import initialise
from powerprop.models.lenet import MLP, lenet_300_100, mlp
from powerprop.models.replay_vae import VAE, ReplayVAE, replay_vae, vae
from powerprop.models.resnet import ResNet, resnet18, resnet50
from powerprop.models.resnet_cifar import CifarResNet, WideResNet, resnet20, wrn_22_2
from powerprop.models.task_vae import TaskVAE, task_vae

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
