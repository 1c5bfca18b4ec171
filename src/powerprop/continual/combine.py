"""Several strategies in one learner: each acts in its own hooks, and none is dropped without a word.

    ReplayWithEWC = combine(ER, EWC)          # or: class ReplayWithEWC(ER, EWC): ...
    learner = ReplayWithEWC(model, optimizer, memory=200, strength=100.0)
    learner = combine(EWC, LwF)(model, optimizer, options={EWC: {"strength": 100.0}, LwF: {"strength": 1.0}})

The loop asks every class of a learner for its hooks, so that a class in front does not hide one behind it; a subclass
that overrides a hook of its own ancestor replaces it, as always in Python. Strategies whose promises cannot be kept
together are refused, when the class is made. (None of them is an `abc.ABC`: `issubclass` of one takes a class that was
refused, until it is collected, for a common descendant.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

__all__ = [
    "TRAITS",
    "all_arguments",
    "call_hooks",
    "check_combination",
    "combine",
    "having",
    "hooks_of",
    "shared_options",
]

ALONE = ("after_backward", "viewing", "predict", "choose_masks", "importances", "project")
"""Hooks of which one learner can have one only: who changes the gradient, who answers, who chooses masks, who says
which weights matter, who projects steps. Of all others every strategy's acts, in the order of the classes."""
TRAITS = {
    "starts anew": "every task begins anew, or trains parameters of the method's own: there is nothing to `carry`",
    "once": "a task cannot be learned again after others",
    "keeps answers": "{} holds weights so that earlier tasks answer as before",
    "rewrites weights": "{} writes to weights after the optimiser's step or between tasks",
    "trains no weight": "{} trains no weight",
    "acts on weights": "{} acts on how weights are trained",
    "fills memory": "{} says itself when examples go into the memory, and what with them",
    "fills the loss": "what {} rehearses leaves no room in the loss",
    "sees layers": "{} looks at what goes into layers while the network answers",
    "trains beyond": "{} trains layers that no answer needs",
    "asks before": "{} asks one network, and that of before, about all tasks",
}
"""What a class may say of itself in `traits`."""
AGAINST = (
    ("keeps answers", "rewrites weights"),
    ("trains no weight", "acts on weights"),
    ("sees layers", "trains beyond"),
)
"""Traits that do not go together."""
NOT_SAVED = ("self", "model", "optimizer", "objective", "alpha", "rate", "where", "schedule")


@cache
def hooks_of(kind: type[Any], hook: str) -> tuple[Callable[..., Any], ...]:
    """The functions of that name among the ancestors of a class, without those that a descendant has overridden."""
    found: list[type] = []
    for each in kind.__mro__:
        if hook in vars(each) and not any(issubclass(nearer, each) for nearer in found):
            found.append(each)
    return tuple(vars(each)[hook] for each in found)


def call_hooks(learner: Any, hook: str, *arguments: Any) -> list[Any]:
    """Every strategy of a learner does what it does in a hook."""
    kind: Any = type(learner)
    return [function(learner, *arguments) for function in hooks_of(kind, hook)]


def having(kind: type, trait: str) -> list[str]:
    """The names of the classes that say so of themselves."""
    return [each.__name__ for each in kind.__mro__ if trait in vars(each).get("traits", ())]


@cache
def arguments_of(kind: type) -> frozenset[str]:
    """The arguments that a class takes beside those of its ancestors, by which a saved learner is made again."""
    made = vars(kind).get("__init__")
    taken = () if made is None or issubclass(kind, _Combined) else inspect.signature(made).parameters.values()
    named = (p.name for p in taken if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
    return frozenset(named) - set(NOT_SAVED)


def shared_options(kind: type) -> set[str]:
    """Arguments that two classes have, neither of which is a kind of the other."""
    owners = [(each, name) for each in kind.__mro__ for name in arguments_of(each)]
    return {
        name for one, name in owners for other, same in owners
        if name == same and not issubclass(one, other) and not issubclass(other, one)
    }  # fmt: skip


def check_combination(kind: type) -> None:
    """Strategies of which one would undo what another promises do not go together: an error that says why."""
    for reason in _conflicts(kind):
        raise TypeError(f"{kind.__name__}: {reason}")
    if not issubclass(kind, _Combined) and (shared := shared_options(kind)):
        text = f"the classes of {kind.__name__} have options of the same name, {', '.join(sorted(shared))}"
        raise TypeError(f"{text}: use combine(…), which takes options by part")


def _conflicts(kind: type) -> list[str]:
    """Why the strategies of a class do not go together, if they do not."""

    def owners(hook: str) -> list[str]:
        return [function.__qualname__.rpartition(".")[0] for function in hooks_of(kind, hook)]

    def two(names: list[str], what: str) -> list[str]:
        return [f"{' and '.join(names)} both {what}"] if len(names) > 1 else []

    found = [each for hook in ALONE for each in two(owners(hook), f"have {hook}, and a learner can have one only")]
    found += two(having(kind, "keeps answers"), "hold weights for earlier tasks, and undo each other's masks")
    found += two(having(kind, "fills memory"), "fill the memory, each in its own way")
    for pair in AGAINST:
        first, second = (having(kind, trait) for trait in pair)
        if first and second:
            found.append(f"{TRAITS[pair[0]].format(first[0])}, and {TRAITS[pair[1]].format(second[0])}")
    if full := having(kind, "fills the loss"):
        found += two(owners("rehearse"), f"rehearse, and {TRAITS['fills the loss'].format(full[0])}")
    own = [each for each in owners("viewing") if each != "Strategy"]
    if own and (asks := having(kind, "asks before")):
        found.append(f"{TRAITS['asks before'].format(asks[0])}, and {own[0]} shows every task a network of its own")
    return found


def combine(*strategies: type) -> type:
    """A class that does what all these strategies do; arguments are those of all of them.

    Those that two of them have by the same name are given by part: `options={EWC: {"strength": 100.0}, …}`.

    Examples:
        >>> Both = continual.combine(continual.EWC, continual.ER)
        >>> learner = Both(model, sgd, steps=20)
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
            owners = [each.__name__ for each in self.strategies if common[0] in all_arguments(each)]
            text = f"say options={{{owners[0]}: {{{common[0]!r}: …}}, …}}"
            raise TypeError(f"{' and '.join(owners)} both have {common[0]}: {text}")
        self.given_options, self.own_options = given, dict[type, dict[str, Any]]()
        super().__init__(model, optimizer, **shared)  # type: ignore[call-arg]


def _taking(kind: type) -> type:
    """Stands before a strategy: hands it its own options, and notes those that another one has by the same name."""

    class Taking:
        def __init__(self: Any, model: Any, optimizer: Any, **shared: Any) -> None:
            super().__init__(model, optimizer, **{**shared, **self.given_options.get(kind, {})})  # type: ignore[call-arg]
            own = shared_options(type(self)) & all_arguments(kind)
            self.own_options[kind] = {name: getattr(self, name) for name in own}

    return Taking


def all_arguments(kind: type) -> frozenset[str]:
    """Those of a class and of all its ancestors."""
    return frozenset[str]().union(*map(arguments_of, kind.__mro__))
