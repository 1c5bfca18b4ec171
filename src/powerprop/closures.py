"""Closures that optimisers evaluate in a step: the first loss is computed once, and masks hold in between."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from powerprop.master import Master

__all__ = ["asks_for_closure", "confined", "evaluated"]


def asks_for_closure(optimizer: Optimizer) -> bool:
    """True if a step cannot do without a closure: such optimisers (LBFGS) evaluate it several times in one step."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def evaluated(closure: Callable[[], Any] | None) -> tuple[Any, Callable[[], Any] | None]:
    """The closure's first loss, with its gradients, and a closure that does not compute that one again."""
    if closure is None:
        return None, None
    with torch.enable_grad():
        first = closure()
    known = [first]
    return first, lambda: known.pop() if known else closure()


def confined(closure: Callable[[], Any], masters: list[Master]) -> Callable[[], Any]:
    """The closure, with gradients of trainable weights alone, lest its next evaluation see moves that masks undo."""

    def wrapped() -> Any:
        loss = closure()
        for master in masters:
            master.confine_gradient()
        return loss

    return wrapped
