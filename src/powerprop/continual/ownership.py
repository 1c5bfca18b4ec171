"""One learner for every model and every optimiser: who learns with them, and who no longer may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import nn
from torch.optim import Optimizer

from powerprop.optim import Powerprop, Rate
from powerprop.select import Where

__all__ = ["OptimizerFactory", "check_owner", "claim", "guard", "powerprop_of"]

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
"""Makes the base optimiser: `lambda params: torch.optim.SGD(params, lr=0.1)`."""
_TAKEN: WeakSet[Optimizer] = WeakSet()
_OWNERS: WeakKeyDictionary[nn.Module, ref[Any]] = WeakKeyDictionary()
_FORMER: WeakSet[Any] = WeakSet()


def claim(learner: Any, model: nn.Module) -> None:
    """From now on the model is this learner's; an earlier one lets it go, and neither learns nor answers."""
    check_owner(learner, model)
    owner = _OWNERS[model]() if model in _OWNERS else None
    if owner is not None and owner is not learner:
        owner.let_go()
        _FORMER.add(owner)
    _OWNERS[model] = ref(learner)


def check_owner(learner: Any, model: nn.Module) -> None:
    """An error for a learner whose model another one has taken over."""
    if learner in _FORMER:
        owner = _OWNERS[model]()
        kind = "another learner" if owner is None else f"another learner, {type(owner).__name__},"
        raise RuntimeError(f"the model belongs to {kind} that began with it since: give each learner its own copy")


def powerprop_of(
    model: nn.Module, optimizer: OptimizerFactory | Optimizer, alpha: float | None, where: Where | None,
    rate: Rate | None, default: Rate,
) -> Powerprop:  # fmt: skip
    """The optimiser of a learner, from what it was given."""
    if isinstance(optimizer, Powerprop):
        if not (alpha is None and where is None and rate is None):
            text = f"alpha={alpha}, where={where}, rate={rate}"
            raise TypeError(f"alpha, where and rate belong to the Powerprop that was given, got {text}")
        made = optimizer
    else:
        base = optimizer if isinstance(optimizer, Optimizer) else optimizer(list(model.parameters()))
        made = Powerprop(base, model, 1.0 if alpha is None else alpha, where, rate=rate or default)
    if made.asks_for_closure:
        raise TypeError(f"optimizer must step from one gradient, but {type(made.base).__name__} asks for a closure")
    if made.sparsify is not None:
        kind = type(made.sparsify).__name__
        raise TypeError(f"a learner sets the masks of its optimiser itself, and cannot have {kind} beside it")
    if made in _TAKEN or made.base in _TAKEN:
        raise ValueError("this optimiser belongs to a learner already: make another for this one")
    return guard(made)


def guard(made: Powerprop) -> Powerprop:
    """The optimiser of a learner, which nobody else steps from now on."""

    def refuse_unless_stepping(*_: Any) -> None:
        if not made.stepping:
            raise RuntimeError("this optimiser belongs to a learner: call learner.step(loss)")

    _TAKEN.update((made, made.base))
    made.base.register_step_pre_hook(refuse_unless_stepping)
    return made
