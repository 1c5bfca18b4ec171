"""Several strategies in one learner: each acts in its own verbs, and none is dropped without a word.

    ReplayWithEWC = combine(ER, EWC)          # or: class ReplayWithEWC(ER, EWC): ...
    learner = ReplayWithEWC(model, optimizer, memory=200, strength=100.0)

The loop asks every class of a learner for its verbs, so that a class in front does not hide one behind it; a subclass
that overrides a verb of its own ancestor replaces it, as always in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

__all__ = ["ADDED", "ALONE", "act", "check_combination", "combine", "verbs_of"]

ADDED = ("begin_task", "rehearse", "penalty", "after_step", "end_task")
"""Verbs that several strategies may have: all of them act, in the order of the classes."""
ALONE = ("after_backward", "viewing", "predict", "choose_masks", "importances")
"""Verbs of which one learner can have one only: who changes the gradient, who answers, who chooses masks, who says
which weights matter."""


@cache
def verbs_of(kind: type[Any], verb: str) -> tuple[Callable[..., Any], ...]:
    """The functions of that name among the ancestors of a class, without those that a descendant has overridden."""
    found: list[type] = []
    for each in kind.__mro__:
        if verb in vars(each) and not any(issubclass(nearer, each) for nearer in found):
            found.append(each)
    return tuple(vars(each)[verb] for each in found)


def act(learner: Any, verb: str, *arguments: Any) -> list[Any]:
    """Every strategy of a learner does what it does in a verb."""
    kind: Any = type(learner)
    return [function(learner, *arguments) for function in verbs_of(kind, verb)]


def check_combination(kind: type) -> None:
    """Two strategies that would both change the gradient, or both answer, do not go together."""
    for verb in ALONE:
        if len(found := verbs_of(kind, verb)) > 1:
            names = " and ".join(function.__qualname__.rpartition(".")[0] for function in found)
            raise TypeError(f"{kind.__name__}: {names} both have {verb}, and a learner can have one only")


def combine(*strategies: type) -> type:
    """A class that does what all these strategies do; arguments are those of all of them."""
    if len(strategies) < 2:
        raise TypeError(f"combine takes two or more strategies, got {len(strategies)}")
    return type("With".join(each.__name__ for each in strategies), strategies, {"__doc__": combine.__doc__})
