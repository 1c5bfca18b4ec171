"""Random small networks of every operation that compiled programs know, and the comparison with torch."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powerprop as pp
from powerprop.export import Choice, Plan

FUNCTIONS = [F.relu, F.gelu, F.silu, F.hardswish, torch.sigmoid, torch.tanh, F.relu6]


class RandomGraph(nn.Module):
    """Convolutions, pools, functions and additions, then linear layers; the choices come from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        self.steps: list[tuple[str, object]] = []
        self.size = (chance.choice([1, 2, 5, 8, 13, 16, 17]), chance.choice([1, 2, 5, 8, 13, 16, 33]))
        self.channels = channels = chance.choice([1, 2, 4, 6])
        size, layers, before = self.size, nn.ModuleList(), (self.channels, self.size)
        for _ in range(chance.randrange(5)):
            kind = chance.choice(["conv", "conv", "conv", "pool", "function", "add", "norm"])
            if kind == "add" and before != (channels, size):
                continue
            entering = (channels, size)
            if kind == "conv":
                groups = chance.choice([1, 1, 2]) if channels % 2 == 0 else 1
                kernel, dilation = (chance.choice([1, 2, 3, 5]), chance.choice([1, 3, 3])), chance.choice([1, 1, 2])
                stride, padding = (chance.choice([1, 1, 2, 3]), chance.choice([1, 2])), chance.randrange(4)
                out = chance.choice([2, 4, 10, 16])
                new = self.after(size, kernel, stride, padding, dilation)
                if min(new) < 1:
                    continue
                layers.append(
                    nn.Conv2d(channels, out, kernel, stride, padding, dilation, groups, chance.random() < 0.7)
                )
                channels, size = out, new
            elif kind == "pool":
                kernel, stride = (chance.choice([1, 2, 3]), chance.choice([2, 3])), (chance.choice([1, 2]), 2)
                padding = chance.choice([0, min(kernel) // 2])
                new = self.after(size, kernel, stride, padding, 1)
                if min(new) < 1:
                    continue
                pool = chance.choice([nn.MaxPool2d, nn.AvgPool2d])
                layers.append(pool(kernel, stride, padding, ceil_mode=False))
                size = new
            elif kind == "norm":
                layers.append(nn.BatchNorm2d(channels))
            self.steps.append((kind, chance.choice(FUNCTIONS)))
            before = entering
        self.layers = layers
        self.average = chance.random() < 0.3
        features = channels if self.average else channels * size[0] * size[1]
        hidden = chance.choice([1, 10, 33])
        self.fc, self.norm, self.out = nn.Linear(features, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, 3)

    @staticmethod
    def after(
        size: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...], padding: int, dilation: int
    ) -> tuple[int, ...]:
        """The size that a layer of windows leaves."""
        spans = zip(size, kernel, stride, strict=True)
        return tuple((n + 2 * padding - dilation * (k - 1) - 1) // s + 1 for n, k, s in spans)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        layers, before = iter(self.layers), x
        for kind, function in self.steps:
            done = {"function": function, "add": lambda y, other=before: F.relu(y + other)}
            new = done[kind](x) if kind in done else next(layers)(x)  # type: ignore[operator]
            before, x = x, new
        x = x.mean((2, 3)) if self.average else x.flatten(1)
        hidden = self.norm(F.gelu(self.fc(x)))
        return self.out(hidden), hidden


def random_graph(seed: int) -> RandomGraph:
    """A pruned one with norms that have seen data."""
    torch.manual_seed(seed)
    net = RandomGraph(seed).eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = torch.randn(module.num_features)
            module.running_var = torch.rand(module.num_features) + 0.5
    with torch.no_grad():
        for layer in net.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                layer.weight *= torch.rand_like(layer.weight) < random.Random(seed).choice([1.0, 0.5, 0.1])
    return net


def check(seed: int, batch: int) -> int:
    """An error if the program of a graph differs from torch; returns how many operations stayed with torch."""
    net = random_graph(seed)
    names = [n for n, m in net.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    choices = tuple(Choice(n, "sparse", 0.9) for n in names)
    x = torch.randn(batch, net.channels, *net.size)
    with torch.no_grad():
        fast = pp.export.sparse(net, x, plan=Plan("sparse", True, batch, 1, choices=choices))
        for mine, wanted in zip(fast(x), net.double()(x.double()), strict=True):
            scale = max(1e-3, float(wanted.abs().max()))
            worst = float((mine - wanted).abs().max()) / scale
            assert worst < 1e-5, f"seed {seed}, batch {batch}: {worst}"
    return sum(node.op.startswith("call") for node in fast.network.graph.nodes)  # type: ignore[union-attr]
