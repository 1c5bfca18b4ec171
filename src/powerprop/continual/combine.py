"""Several strategies in one learner: each acts in its own verbs, and none is dropped without a word.

    ReplayWithEWC = combine(ER, EWC)          # or: class ReplayWithEWC(ER, EWC): ...
    learner = ReplayWithEWC(model, optimizer, memory=200, strength=100.0)
    learner = combine(EWC, LwF)(model, optimizer, options={EWC: {"strength": 100.0}, LwF: {"strength": 1.0}})

The loop asks every class of a learner for its verbs, so that a class in front does not hide one behind it; a subclass
that overrides a verb of its own ancestor replaces it, as always in Python. Strategies whose promises cannot be kept
together are refused, when the class is made. (None of them is an `abc.ABC`: `issubclass` of one takes a class that was
refused, until it is collected, for a common descendant.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

__all__ = ["ADDED", "ALONE", "act", "check_combination", "combine", "having", "shared_options", "verbs_of"]

ADDED = ("begin_task", "rehearse", "penalty", "after_step", "end_task")
"""Verbs that several strategies may have: all of them act, in the order of the classes."""
ALONE = ("after_backward", "viewing", "predict", "choose_masks", "importances", "project")
"""Verbs of which one learner can have one only: who changes the gradient, who answers, who chooses masks, who says
which weights matter, who projects steps."""


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
    """Strategies of which one would undo what another promises do not go together: an error that says why."""
    name = kind.__name__
    for verb in ALONE:
        if len(found := verbs_of(kind, verb)) > 1:
            names = " and ".join(function.__qualname__.rpartition(".")[0] for function in found)
            raise TypeError(f"{name}: {names} both have {verb}, and a learner can have one only")
    keeps, rewrites = having(kind, "keeps_answers"), having(kind, "rewrites")
    if len(keeps) > 1:
        both = " and ".join(keeps)
        raise TypeError(f"{name}: {both} both hold weights for earlier tasks, and undo each other's masks")
    if keeps and rewrites:
        text = f"{rewrites[0]} writes to weights after the optimiser's step or between tasks"
        raise TypeError(f"{name}: {keeps[0]} holds weights so that earlier tasks answer as before, and {text}")
    if (fixed := having(kind, "fixed_weights")) and (acts := having(kind, "acts_on_weights")):
        raise TypeError(f"{name}: {fixed[0]} trains no weight, and {acts[0]} acts on how weights are trained")
    if (fills := having(kind, "fills_the_loss")) and len(found := verbs_of(kind, "rehearse")) > 1:
        names = " and ".join(function.__qualname__.rpartition(".")[0] for function in found)
        raise TypeError(f"{name}: {names} both rehearse, and the share of {fills[0]} leaves no room in the loss")
    if len(fills := having(kind, "fills_memory")) > 1:
        raise TypeError(f"{name}: {' and '.join(fills)} both fill the memory, each in its own way")
    if (beyond := having(kind, "trains_beyond")) and (sees := having(kind, "sees_layers")):
        text = f"{beyond[0]} trains layers that no answer needs"
        raise TypeError(f"{name}: {sees[0]} looks at what goes into layers while the network answers, and {text}")
    if asks := having(kind, "asks_before"):
        views = [function.__qualname__.rpartition(".")[0] for function in verbs_of(kind, "viewing")]
        if own := [each for each in views if each != "Strategy"]:
            text = f"{own[0]} shows every task a network of its own"
            raise TypeError(f"{name}: {asks[0]} asks one network, and that of before, about all tasks, and {text}")
    if not hasattr(kind, "strategies") and (shared := shared_options(kind)):
        text = f"the classes of {name} have options of the same name, {', '.join(sorted(shared))}"
        raise TypeError(f"{text}: use combine(…), which takes options by part")


def having(kind: type, trait: str) -> list[str]:
    """The names of the classes that say so of themselves."""
    return [each.__name__ for each in kind.__mro__ if vars(each).get(trait)]


def shared_options(kind: type) -> set[str]:
    """Options that two classes have, neither of which is a kind of the other."""
    owners = [(each, option) for each in kind.__mro__ for option in vars(each).get("OPTIONS", ())]
    return {
        option for one, option in owners for other, same in owners
        if option == same and not issubclass(one, other) and not issubclass(other, one)
    }  # fmt: skip


def combine(*strategies: type) -> type:
    """A class that does what all these strategies do; arguments are those of all of them.

    Those that two of them have by the same name are given by part: `options={EWC: {"strength": 100.0}, …}`.
    """
    if len(strategies) < 2:
        raise TypeError(f"combine takes two or more strategies, got {len(strategies)}")
    for one in strategies:
        if strategies.count(one) > 1:
            raise TypeError(f"{one.__name__} is {one.__name__} already: each strategy once")
        if kinds := [each for each in strategies if each is not one and issubclass(one, each)]:
            raise TypeError(f"{one.__name__} is {kinds[0].__name__} already, with something of its own")
    name = "With".join(each.__name__ for each in strategies)
    bases = [base for each in strategies for base in (_taking(each), each)]
    return type(name, (_Combined, *bases), {"__doc__": combine.__doc__, "strategies": strategies})


class _Combined:
    """The front of a combined class: sorts the options."""

    strategies: tuple[type, ...]

    def __init__(
        self, model: Any, optimizer: Any, *, options: Mapping[type, Mapping[str, Any]] | None = None, **shared: Any
    ) -> None:
        given, names = options or {}, ", ".join(each.__name__ for each in self.strategies)
        if unknown := [each for each in given if each not in self.strategies]:
            raise TypeError(f"options are of the strategies {names}, got some of {unknown[0]!r}")
        if common := sorted(shared_options(type(self)) & shared.keys()):
            owners = [each for each in self.strategies if common[0] in _options(each)]
            text, first = " and ".join(each.__name__ for each in owners), owners[0].__name__
            raise TypeError(f"{text} both have {common[0]}: say options={{{first}: {{{common[0]!r}: …}}, …}}")
        self.given_options, self.own_options = given, dict[type, dict[str, Any]]()
        super().__init__(model, optimizer, **shared)  # type: ignore[call-arg]


def _taking(kind: type) -> type:
    """Stands before a strategy: hands it its own options, and notes those that another one has by the same name."""

    class Taking:
        def __init__(self: Any, model: Any, optimizer: Any, **shared: Any) -> None:
            super().__init__(model, optimizer, **{**shared, **self.given_options.get(kind, {})})  # type: ignore[call-arg]
            self.own_options[kind] = {name: getattr(self, name) for name in shared_options(type(self)) & _options(kind)}

    return Taking


def _options(kind: type) -> set[str]:
    return {option for each in kind.__mro__ for option in vars(each).get("OPTIONS", ())}
