"""Float32 stand-ins: a base optimiser sees them in place of half-precision weights, during its step and only then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["Pairs", "lent", "standing_in"]

Pairs = list[tuple[nn.Parameter, nn.Parameter]]
"""Weights and their stand-ins."""


@contextmanager
def standing_in(base: Optimizer, pairs: Pairs) -> Iterator[None]:
    """Let the base optimiser hold the stand-ins, with the gradients of their weights, in place of the weights."""
    if not pairs:
        yield
        return
    _lend_gradients(pairs)
    _swap(base, pairs)
    try:
        yield
    finally:
        _swap(base, [(stand_in, param) for param, stand_in in pairs])
        for _, stand_in in pairs:
            stand_in.grad = None


def lent(closure: Callable[[], Any] | None, pairs: Pairs) -> Callable[[], Any] | None:
    """The closure evaluates the model at the stand-ins' values and hands its gradients to them."""
    if closure is None or not pairs:
        return closure

    def evaluate() -> Any:
        with torch.no_grad():
            for param, stand_in in pairs:
                param.copy_(stand_in)
        loss = closure()
        _lend_gradients(pairs)
        return loss

    return evaluate


def _lend_gradients(pairs: Pairs) -> None:
    for param, stand_in in pairs:
        stand_in.grad = None if param.grad is None else param.grad.to(stand_in.dtype)


def _swap(base: Optimizer, pairs: Pairs) -> None:
    new = {id(old): (old, now) for old, now in pairs}
    for group in base.param_groups:
        group["params"] = [new[id(p)][1] if id(p) in new else p for p in group["params"]]
    for old, now in new.values():
        if old in base.state:
            base.state[now] = base.state.pop(old)
