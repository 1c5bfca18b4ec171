"""The optimiser of a learner, from a factory, an optimiser or a Powerprop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from powerprop.optim import Powerprop, Rate
from powerprop.select import Where

__all__ = ["OptimizerFactory", "guarded", "powerprop_of", "refuse_alpha"]

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
"""Makes the base optimiser: `lambda params: torch.optim.SGD(params, lr=0.1)`."""


def powerprop_of(
    model: nn.Module,
    optimizer: OptimizerFactory | Optimizer,
    alpha: float | None,
    where: Where | None,
    rate: Rate | None = None,
) -> Powerprop:
    """The optimiser of a learner, from what it was given."""
    if isinstance(optimizer, Powerprop):
        if not (alpha is None and where is None and rate is None):
            text = f"alpha={alpha}, where={where}, rate={rate}"
            raise TypeError(f"alpha, where and rate belong to the Powerprop that was given, got {text}")
        made = optimizer
    else:
        base = optimizer if isinstance(optimizer, Optimizer) else optimizer(list(model.parameters()))
        made = Powerprop(base, model, 1.0 if alpha is None else alpha, where, rate=rate or "matched")
    if made.asks_for_closure:
        raise TypeError(f"optimizer must step from one gradient, but {type(made.base).__name__} asks for a closure")
    if made.sparsify is not None:
        kind = type(made.sparsify).__name__
        raise TypeError(f"a learner sets the masks of its optimiser itself, and cannot have {kind} beside it")
    if made in _TAKEN or made.base in _TAKEN:
        raise ValueError("this optimiser belongs to a learner already: make another for this one")
    return guarded(made)


_TAKEN: WeakSet[Optimizer] = WeakSet()


def guarded(made: Powerprop) -> Powerprop:
    """The optimiser of a learner, which nobody else steps from now on."""
    _TAKEN.update((made, made.base))
    made.base.register_step_pre_hook(_refuse_unless_stepping(made))
    return made


def _refuse_unless_stepping(optimizer: Powerprop) -> Callable[..., None]:
    def check(*_: Any) -> None:
        if not optimizer.stepping:
            raise RuntimeError("this optimiser belongs to a learner: call learner.step(loss)")

    return check


def refuse_alpha(kind: type, optimizer: OptimizerFactory | Optimizer, alpha: float | None, reason: str) -> None:
    """An error for α > 1, as an argument or in a Powerprop."""
    masters = optimizer.masters.values() if isinstance(optimizer, Powerprop) else ()
    largest = max([alpha or 1.0, *(master.alpha for master in masters)])
    if largest > 1:
        raise ValueError(f"{kind.__name__} needs alpha = 1, got alpha = {largest:g}: {reason}")
