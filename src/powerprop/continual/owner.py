"""Which learner a model belongs to: the last one that began to learn with it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import nn

if TYPE_CHECKING:
    from powerprop.continual.strategy import Strategy

__all__ = ["check_owner", "claim"]

_OWNERS: WeakKeyDictionary[nn.Module, ref[Strategy]] = WeakKeyDictionary()
_FORMER: WeakSet[Strategy] = WeakSet()


def claim(model: nn.Module, learner: Strategy) -> None:
    """From now on the model is this learner's; an earlier one lets it go, and neither learns nor answers any more."""
    check_owner(model, learner)
    owner = _OWNERS[model]() if model in _OWNERS else None
    if owner is not None and owner is not learner:
        owner.let_go()
        _FORMER.add(owner)
    _OWNERS[model] = ref(learner)


def check_owner(model: nn.Module, learner: Strategy) -> None:
    """An error if another learner has begun with the model since: it has other weights by now."""
    if learner in _FORMER:
        owner = _OWNERS[model]()
        kind = "another learner" if owner is None else f"another learner, {type(owner).__name__},"
        raise RuntimeError(f"the model belongs to {kind} that began with it since: give each learner its own copy")
