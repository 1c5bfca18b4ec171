"""Small networks of any structure, pruned, for the tests of sparse inference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powerprop as pp
from powerprop.export import measure
from powerprop_paper.models import conv6, lenet_300_100, mlp, resnet20


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def set_times(monkeypatch: pytest.MonkeyPatch, times: Callable[..., dict[str, float]]) -> None:
    """Instead of those of layers and networks that depend on the machine."""
    monkeypatch.setattr(measure, "best_times", times)


class Branching(nn.Module):
    """Two heads read one hidden layer; nothing of it is a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(12, 30)
        self.left, self.right = nn.Linear(30, 4, bias=False), nn.Linear(30, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.hidden(x))
        return self.left(h), self.right(h)


class Looking(nn.Module):
    """Python code that depends on the numbers: cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 20), nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h if h.sum() > 0 else -h)


class Tokens(nn.Module):
    """Linear layers over three dimensions, with a residual connection and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Convolutions(nn.Module):
    """1x1 and other kernels, strides, dilation, groups and paddings of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(12, 12, 3, padding="same", dilation=2), nn.SiLU(),
            nn.Conv2d(12, 12, 3, groups=3), nn.BatchNorm2d(12), nn.ReLU(),
            nn.Conv2d(12, 6, (1, 3), padding=(0, 1), padding_mode="reflect", bias=False), nn.MaxPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.out = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x))


class Preactivated(nn.Module):
    """Norms before convolutions, a norm on two paths, a projected shortcut: the blocks of wide residual networks."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(8), nn.Conv2d(8, 16, 3, 2, padding=1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.shortcut, self.fc = nn.Conv2d(8, 16, 1, 2, bias=False), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(x))
        x = self.conv2(F.relu(self.bn2(self.conv1(x)))) + self.shortcut(x)
        return self.fc(F.relu(x).mean((2, 3)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (lambda: mlp([20, 40, 30, 5], generator=seeded()), lambda n: torch.randn(n, 20, generator=seeded())),
    "lenet": (lambda: lenet_300_100(generator=seeded()), lambda n: torch.rand(n, 1, 28, 28, generator=seeded())),
    "conv6": (
        lambda: conv6(width=0.1, batch_norm=True, generator=seeded()),
        lambda n: torch.rand(n, 3, 32, 32, generator=seeded()),
    ),
    "resnet20": (lambda: resnet20(generator=seeded()), lambda n: torch.rand(n, 3, 16, 16, generator=seeded())),
    "preactivated": (Preactivated, lambda n: torch.rand(n, 8, 8, 8, generator=seeded())),
    "branching": (Branching, lambda n: torch.randn(n, 12, generator=seeded())),
    "looking": (Looking, lambda n: torch.randn(n, 12, generator=seeded())),
    "tokens": (Tokens, lambda n: torch.randn(n, 6, 16, generator=seeded())),
    "convolutions": (Convolutions, lambda n: torch.randn(n, 3, 12, 12, generator=seeded())),
    "attention": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        lambda n: torch.randn(n, 5, 16, generator=seeded()),
    ),
    "sequence": (
        lambda: nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 2, 1)),
        lambda n: torch.randn(n, 4, 9, generator=seeded()),
    ),
}


def pruned(name: str, sparsity: float = 0.9) -> nn.Module:
    net = MODELS[name][0]().eval()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.2, 0.2, generator=seeded(1))
                module.running_var.uniform_(0.5, 2.0, generator=seeded(2))
            if isinstance(module, (nn.Linear, nn.Conv2d)) and module.bias is not None:
                module.bias.uniform_(-0.5, 0.5, generator=seeded(3))
    pp.prune(net, sparsity)
    return net


@torch.no_grad()
def assert_same(mine: nn.Module, other: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(mine(x), other(x), rtol=1e-4, atol=1e-5)
