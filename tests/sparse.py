"""The sparse-training methods as the tests use them: literal tables, short schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import powerprop as pp
from nets import BASES, net
from powerprop.sparsify import Method

STEPS = 60

METHODS: dict[str, Callable[..., Method]] = {
    "static": lambda **k: pp.Static(**k),
    "snip": lambda **k: pp.SNIP(**k),
    "set": lambda **k: pp.SET(**{"interval": 7, **k}),
    "rigl": lambda **k: pp.RigL(**{"interval": 7, **k}),
    "snfs": lambda **k: pp.SNFS(**{"interval": 7, **k}),
    "dsr": lambda **k: pp.DSR(**{"interval": 7, "threshold": 0.02, **k}),
    "iterative": lambda **k: pp.IterativePruning(**{"interval": 7, **k}),
    "topkast": lambda **k: pp.TopKAST(**{"interval": 7, "backward_sparsity": 0.4, **k}),
    "topkast-dense": lambda **k: pp.TopKAST(**{"interval": 7, "freeze": 0.9, "decay": 1e-2, **k}),
}
RANDOM = ["static", "set", "rigl", "snfs", "dsr"]
REDISTRIBUTE = ["snfs", "dsr"]


def make(method: str, **options: Any) -> Method | None:
    """A method with these options, as far as it has them; "dense" is none."""
    if method in ("static", "snip"):
        options.pop("interval", None)
    return None if method == "dense" else METHODS[method](**options)


def sparse(
    method: str, base: str = "momentum", alpha: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[nn.Sequential, pp.Powerprop]:  # fmt: skip
    """A small network and its optimiser with this method at 80%, unless told otherwise."""
    model = net(seed, hidden=20).to(dtype)
    sparsify = METHODS[method](**{"sparsity": 0.8, "steps": STEPS, **options})
    return model, pp.Powerprop(BASES[base](list(model.parameters())), model, alpha=alpha, sparsify=sparsify)


def counts(optimizer: pp.Powerprop) -> dict[str, int]:
    return {n: int(m.count_nonzero()) for n, m in optimizer.active.items()}
