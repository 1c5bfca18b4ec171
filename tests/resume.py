"""Tiny runs that are stopped and resumed: what the tests of every way to save and load share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import powerprop as pp
import sparse
from nets import batch, same, train

ALPHAS = [1.0, 1.375, 2.0]
BASES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=1e-1),
}
SPARSIFIERS = ["dense", "static", "snip", "set", "rigl", "snfs", "dsr", "iterative", "topkast"]
OPTIONS: dict[str, dict[str, Any]] = {
    "dsr": {"threshold": 0.05}, "iterative": {"start": 1, "stop": 12}, "topkast": {"backward_sparsity": 0.3},
}  # fmt: skip
BEFORE, AFTER = 5, 4


def plain(seed: int) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.5, generator=generator)
    return model


def wrapped(model: nn.Module, method: str, base: str, alpha: float) -> pp.Powerprop:
    options = {"sparsity": 0.7, "steps": 40, "interval": 2, **OPTIONS.get(method, {})}
    return pp.Powerprop(BASES[base](model), model, alpha, sparsify=sparse.make(method, **options))


def begun(method: str, base: str, alpha: float, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, pp.Powerprop]:
    """A run in the middle of its training."""
    model = plain(0).to(dtype)
    optimizer = wrapped(model, method, base, alpha)
    train(model, optimizer, BEFORE)
    return model, optimizer


def ends_alike(model: nn.Module, optimizer: Any, again: nn.Module, resumed: Any) -> bool:
    """True if both are the same now and after some more steps, masks and φ included."""
    alike, x = same(model, again), batch(0)[0].to(next(model.parameters()).dtype)
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
        and torch.equal(model(x), again(x))
    )
