"""Tiny runs that are stopped and resumed: what the tests of every way to save and load share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import powerprop as pp
from nets import batch, same, train
from powerprop.sparsify import Method

ALPHAS = [1.0, 1.375, 2.0]
BASES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=1e-1),
}
SPARSIFIERS: dict[str, Callable[[], Method | None]] = {
    "dense": lambda: None,
    "static": lambda: pp.Static(0.7),
    "snip": lambda: pp.SNIP(0.7),
    "set": lambda: pp.SET(0.7, steps=40, interval=2),
    "rigl": lambda: pp.RigL(0.7, steps=40, interval=2),
    "snfs": lambda: pp.SNFS(0.7, steps=40, interval=2),
    "dsr": lambda: pp.DSR(0.7, steps=40, interval=2, threshold=0.05),
    "iterative": lambda: pp.IterativePruning(0.7, start=1, stop=12, interval=2),
    "topkast": lambda: pp.TopKAST(0.7, steps=40, interval=2, backward_sparsity=0.3),
}
BEFORE, AFTER = 5, 4


def plain(seed: int) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.5, generator=generator)
    return model


def wrapped(model: nn.Module, method: str, base: str, alpha: float) -> pp.Powerprop:
    return pp.Powerprop(BASES[base](model), model, alpha, sparsify=SPARSIFIERS[method]())


def begun(method: str, base: str, alpha: float) -> tuple[nn.Module, pp.Powerprop]:
    """A run in the middle of its training."""
    model = plain(0)
    optimizer = wrapped(model, method, base, alpha)
    train(model, optimizer, BEFORE)
    return model, optimizer


def ends_alike(model: nn.Module, optimizer: Any, again: nn.Module, resumed: Any) -> bool:
    """True if both are the same now and after some more steps, masks and φ included."""
    alike = same(model, again)
    for one, other in ((model, optimizer), (again, resumed)):
        train(one, other, AFTER, start=BEFORE)
    phis = [{n: m.theta() for n, m in o.masters.items()} for o in (optimizer, resumed)]
    return (
        alike
        and same(model, again)
        and optimizer.active == resumed.active
        and optimizer.trainable == resumed.trainable
        and all(torch.equal(theta, phis[1][n]) for n, theta in phis[0].items())
        and (optimizer.sparsify is None or optimizer.sparsify.step == resumed.sparsify.step)
        and torch.equal(model(batch(0)[0]), again(batch(0)[0]))
    )
