"""Top-KAST as it is by default trains networks of three kinds, where refreshing seldom lets unused weights run away."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powerprop as pp

STEPS = 200


class Attention(nn.Module):
    """One encoder layer that says each token's mirror image; positions are given to it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.pos_embed = nn.Embedding(5, 24), nn.Parameter(torch.randn(1, 6, 24) / 3)
        self.layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True)
        self.out = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.tokens(x) + self.pos_embed)).transpose(1, 2)  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))


def conv() -> nn.Module:
    block = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16))
    return nn.Sequential(block, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


def clusters(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    y = torch.randint(5, (64,), generator=generator)
    return F.one_hot(y, 20) * 2.0 + torch.randn(64, 20, generator=generator) / 2, y


def stripes(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Along the rows or the columns, narrow or wide, from a random place on."""
    y = torch.randint(4, (64,), generator=generator)
    place = torch.arange(8).view(1, 8) + torch.randint(8, (64, 1), generator=generator)
    wave = ((place // (1 + y % 2).view(-1, 1)) % 2).float().view(-1, 1, 1, 8).expand(-1, 1, 8, 8)
    x = torch.where((y >= 2).view(-1, 1, 1, 1), wave, wave.transpose(2, 3))
    return x + torch.randn(64, 1, 8, 8, generator=generator) / 4, y


def mirrored(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randint(5, (64, 6), generator=generator)
    return x, x.flip(1)


Batch = Callable[[torch.Generator], tuple[Tensor, Tensor]]
TASKS: dict[str, tuple[Callable[[], nn.Module], Batch, str]] = {
    "mlp": (mlp, clusters, "momentum"),
    "conv": (conv, stripes, "momentum"),
    "attention": (Attention, mirrored, "adam"),
}
BASES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2),
}


def final_loss(task: str, alpha: float, method: pp.TopKAST, seed: int = 2) -> float:
    """The mean loss of the last ten steps."""
    make, batch, base = TASKS[task]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make()
    optimizer = pp.Powerprop(BASES[base](model), model, alpha, sparsify=method)
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(STEPS):
        x, y = batch(generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("task", TASKS)
def test_the_defaults_train(task: str, alpha: float) -> None:
    """Refreshed every 100 steps the first two end at a loss of about 1 or in NaN."""
    assert final_loss(task, alpha, pp.TopKAST(0.9, steps=STEPS)) < 0.1
