"""Every two methods together: they keep what each of them promises, or are refused with the reason."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from powerprop.continual import (
    ER,
    EWC,
    GPM,
    HAT,
    SI,
    EfficientPackNet,
    JointTraining,
    Laplace,
    LwF,
    Naive,
    Strategy,
    SupSup,
    combine,
)
from powerprop.continual.combine import all_arguments, shared_options
from powerprop.continual.lwf import Distilling
from powerprop.continual.replay import Replay
from strategies import OPTIMIZERS, STRATEGIES, make, network, network_of, same_bits, state, tensors

pytestmark = pytest.mark.filterwarnings("ignore:.*for the tasks to come", "ignore:.*sub-network")
REASONS = (
    "a learner can have one only", "undo each other's masks", "holds weights so that earlier tasks answer as before",
    "trains no weight, and", "leaves no room in the loss", "already, with something of its own",
    "keeps everything, got memory=", "both fill the memory, each in its own way",
    "each strategy once", "trains layers that no answer needs",
    "shows every task a network of its own", "would meet layers that hold some of their weights",
)  # fmt: skip


PAIRS = [pair if number % 2 else pair[::-1] for number, pair in enumerate(combinations(STRATEGIES, 2))]
"""Every two, in one order or the other."""
every_pair = pytest.mark.parametrize(("first", "second"), PAIRS, ids=str)


def options(name: str) -> dict[str, Any]:
    found = dict(STRATEGIES[name].options)
    found |= {"retrain_steps": 2} if "retrain_steps" in found else {}
    return found | {"total_tasks": 4} if "total_tasks" in found else found


def together(first: str, second: str, kind: Any) -> Strategy:
    """Options by part, all of them."""
    rows = {name: STRATEGIES[name] for name in (first, second)}
    made = next((name for name, row in rows.items() if row.model), None)
    torch.manual_seed(0)
    model = network(3) if made is None else network_of(made)
    by_part = {row.kind: options(name) for name, row in rows.items()}
    return kind(model, OPTIMIZERS["adam"], options=by_part, steps=3, batch_size=16)  # type: ignore[no-any-return]


@cache
def reason(first: str, second: str) -> str:
    """Why two are refused; nothing if they are not."""
    try:
        together(first, second, combine(STRATEGIES[first].kind, STRATEGIES[second].kind))
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


@every_pair
def test_two_methods_keep_what_each_promises_or_are_refused_with_the_reason(
    first: str, second: str, tmp_path: Path
) -> None:
    why, other = reason(first, second), reason(second, first)
    assert bool(why) == bool(other)  # whatever the order
    if why:
        assert all(any(known in each for known in REASONS) for each in (why, other))
        assert any(each.__name__ in why for name in (first, second) for each in STRATEGIES[name].kind.__mro__)
        return
    ours, again = (together(first, second, combine(STRATEGIES[first].kind, STRATEGIES[second].kind)) for _ in range(2))
    x, answers = tensors("classification", 0)[0], []
    for task in range(2):
        ours.learn(tensors("classification", task))
        answers.append(ours.predict(x, task).entropy)
        if STRATEGIES[first].masks or STRATEGIES[second].masks:
            assert all(torch.equal(ours.predict(x, t).entropy, before) for t, before in enumerate(answers))
    ours.save(tmp_path / "l")
    again.load(tmp_path / "l")
    for each in (ours, again):
        each.learn(tensors("classification", 2))
    assert same_bits(state(ours), state(again))


def test_most_pairs_go_together() -> None:
    assert sum(not reason(*pair) for pair in PAIRS) > len(PAIRS) / 2


@cache
def attributes(name: str) -> set[str]:
    learner = make(name)
    return {*vars(learner), *dir(learner)}


@every_pair
def test_no_two_methods_share_an_attribute_by_accident(first: str, second: str) -> None:
    """And an attribute that is an option of both is of either of them: no hook may look at it."""
    if reason(first, second):
        return
    kinds = [STRATEGIES[name].kind for name in (first, second)]
    both = combine(*kinds)
    shared = shared_options(both)
    bases = set(kinds[0].__mro__) & set(kinds[1].__mro__)
    inherited = {name for base in bases for name in (*vars(base), *all_arguments(base))}
    of_classes = {"traits", "task_state", "__abstractmethods__", *(["buffer"] if Replay in bases else [])}
    of_classes |= {"teacher", "classification"} if Distilling in bases else set()
    common = attributes(first) & attributes(second)
    assert common - attributes("naive") - inherited - shared - of_classes == set()
    for owner in both.__mro__:
        own = shared & all_arguments(owner)
        functions = [f for name, f in vars(owner).items() if name != "__init__" and hasattr(f, "__code__")]
        assert not [(f.__qualname__, found) for f in functions if (found := own & {*f.__code__.co_names})]


def test_options_of_the_same_name_are_given_by_part() -> None:
    both = combine(EWC, LwF)
    data = [tensors("classification", task) for task in range(2)]

    def made(kind: type[Strategy], **given: Any) -> Strategy:
        torch.manual_seed(0)
        return kind(network(3), lambda p: torch.optim.SGD(p, lr=0.1), steps=4, batch_size=16, **given)

    with pytest.raises(TypeError, match="EWC and LwF both have strength: say options={EWC: {'strength': …}, …}"):
        made(both, strength=100.0)
    with pytest.raises(TypeError, match="options are of the strategies EWC, LwF, got some of .*ER"):
        made(both, options={ER: {"loss_weight": 0.5}})
    pairs = {
        (ewc, lwf): made(both, options={EWC: {"strength": ewc}, LwF: {"strength": lwf}})
        for ewc in (0.0, 3.0)
        for lwf in (0.0, 2.0)
    }
    alone = {(3.0, 0.0): made(EWC, strength=3.0), (0.0, 2.0): made(LwF, strength=2.0), (0.0, 0.0): made(Naive)}
    for learner in (*pairs.values(), *alone.values()):
        for task in data:
            learner.learn(task)
    for key, learner in alone.items():
        assert same_bits(state(pairs[key]), state(learner))
    assert not same_bits(state(pairs[3.0, 2.0]), state(alone[3.0, 0.0]))
    assert not same_bits(state(pairs[3.0, 2.0]), state(alone[0.0, 2.0]))


def test_one_is_no_combination() -> None:
    with pytest.raises(TypeError, match="combine takes two or more strategies, got 1"):
        combine(EWC)


def test_classes_that_share_an_option_are_refused_with_the_way_out() -> None:
    with pytest.raises(
        TypeError, match=r"options of the same name, strength: use combine\(…\), which takes options by"
    ):

        class Both(EWC, LwF):
            """Which strength?"""


@pytest.mark.parametrize(
    ("pair", "why"),
    [
        ((HAT, GPM), "HAT holds weights so that earlier tasks answer as before, and Projection writes to weights"),
        ((JointTraining, EfficientPackNet), "Packing holds weights so that .*, and JointTraining writes to weights"),
        ((SupSup, EfficientPackNet), "SupSup and Packing both hold weights for earlier tasks"),
        ((EWC, SupSup), "SupSup trains no weight, and Quadratic acts on how weights are trained"),
        ((EWC, Laplace), "Laplace is EWC already, with something of its own"),
        ((SI, EWC), "SI and EWC both have importances"),
    ],
)
def test_pairs_that_cannot_be_are_refused_with_the_reason(pair: tuple[type, type], why: str) -> None:
    kinds = [issubclass(*pair), issubclass(*pair[::-1])]
    with pytest.raises(TypeError, match=why) as refused:  # which holds on to the class that was refused
        combine(*pair)
    assert [issubclass(*pair), issubclass(*pair[::-1])] == kinds, refused
