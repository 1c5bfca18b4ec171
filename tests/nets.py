"""Small networks and batches that the tests share; everything from explicit generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powerprop as pp

BASES: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=1e-1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "lion": lambda p: Lion(p, lr=1e-3),
}
ALPHAS = [1.0, 1.125, 1.3, 1.5, 2.0, 3.0, 5.0]


class Lion(torch.optim.Optimizer):
    """A third-party optimiser in the style of Chen et al. 2023: the sign of an interpolated momentum."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.add_(momentum.mul(0.9).add(p.grad, alpha=0.1).sign(), alpha=-group["lr"])
                momentum.mul_(0.99).add_(p.grad, alpha=0.01)


def net(seed: int = 0, hidden: int = 12) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, p.shape[-1] ** -0.5, generator=generator)
    return model


def batch(step: int, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(size, 6, generator=generator)
    return x, (x[:, :3].argmax(1) + (x[:, 3] > 0)).remainder(3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def closing(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """The closure of one batch."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def same(a: nn.Module, b: nn.Module) -> bool:
    left, right = weights(a), weights(b)
    return left.keys() == right.keys() and all(torch.equal(t, right[n]) for n, t in left.items())


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Everything in nested containers, by its place."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, part in items for k, v in flat(part, f"{path}/{key}").items()}
    return {path: value.tolist() if isinstance(value, Tensor) else value}


def wrap(model: nn.Module, base: str = "momentum", alpha: float = 2.0, **options: object) -> pp.Powerprop:
    """Powerprop around a base optimiser of that name."""
    return pp.Powerprop(BASES[base](list(model.parameters())), model, alpha=alpha, **options)  # type: ignore[arg-type]


def one_weight(values: list[float]) -> nn.Linear:
    """A linear layer with exactly these weights."""
    layer = nn.Linear(len(values), 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([values]))
    return layer
