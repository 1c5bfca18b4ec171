"""Every two methods together: they keep what each of them promises, or are refused with the reason."""

from __future__ import annotations

from itertools import permutations
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
from strategies import STRATEGIES, make, network, network_of, same_bits, state, tensors

pytestmark = pytest.mark.filterwarnings("ignore:.*for the tasks to come", "ignore:.*sub-network")
STEPS = 4
REASONS = (
    "a learner can have one only", "undo each other's masks", "holds weights so that earlier tasks answer as before",
    "trains no weight, and", "leaves no room in the loss", "already, with something of its own",
    "keeps everything, got memory=", "both fill the memory, each in its own way",
    "each strategy once", "trains layers that no answer needs",
    "shows every task a network of its own", "would meet layers that hold some of their weights",
)  # fmt: skip


def options(name: str) -> dict[str, Any]:
    found = dict(STRATEGIES[name].options)
    found |= {"retrain_steps": 2} if "retrain_steps" in found else {}
    return found | {"total_tasks": 4} if "total_tasks" in found else found


def together(first: str, second: str, kind: type[Strategy]) -> Strategy:
    """Options by part, all of them."""
    rows = {name: STRATEGIES[name] for name in (first, second)}
    made = next((name for name, row in rows.items() if row.model), None)
    torch.manual_seed(0)
    model = network(3) if made is None else network_of(made)
    by_part = {row.kind: options(name) for name, row in rows.items()}
    return kind(model, lambda p: torch.optim.Adam(p, lr=1e-2), options=by_part, steps=STEPS, batch_size=16)  # type: ignore[call-arg]


def reason(first: str, second: str) -> str:
    """Why two are refused; nothing if they are not."""
    try:
        together(first, second, combine(STRATEGIES[first].kind, STRATEGIES[second].kind))
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


REFUSED = {pair: why for pair in permutations(STRATEGIES, 2) if (why := reason(*pair))}
ALLOWED = [pair for pair in permutations(STRATEGIES, 2) if pair not in REFUSED]


@pytest.mark.parametrize("pair", REFUSED, ids=str)
def test_what_is_refused_is_named_with_the_reason(pair: tuple[str, str]) -> None:
    assert any(known in REFUSED[pair] for known in REASONS)
    assert any(each.__name__ in REFUSED[pair] for name in pair for each in STRATEGIES[name].kind.__mro__)
    assert pair[::-1] in REFUSED  # whatever the order


def test_most_pairs_go_together() -> None:
    assert len(ALLOWED) > len(REFUSED)


@pytest.mark.parametrize(("first", "second"), ALLOWED, ids=str)
def test_two_methods_keep_what_each_promises(first: str, second: str, tmp_path: Path) -> None:
    ours, again = (together(first, second, combine(STRATEGIES[first].kind, STRATEGIES[second].kind)) for _ in range(2))
    x, answers = tensors("classification", 0)[0], []
    for task in range(3):
        ours.learn(tensors("classification", task))
        answers.append(ours.predict(x, task).entropy)
        if STRATEGIES[first].masks or STRATEGIES[second].masks:
            assert all(torch.equal(ours.predict(x, t).entropy, before) for t, before in enumerate(answers))
    ours.save(tmp_path / "l")
    again.load(tmp_path / "l")
    for each in (ours, again):
        each.learn(tensors("classification", 3))
    assert same_bits(state(ours), state(again))


@pytest.mark.parametrize(("first", "second"), [pair for pair in ALLOWED if pair[0] < pair[1]], ids=str)
def test_no_two_methods_share_an_attribute_by_accident(first: str, second: str) -> None:
    kinds = [STRATEGIES[name].kind for name in (first, second)]
    plain = {*vars(make("naive")), *dir(Naive)}
    common = set.intersection(*({*vars(each), *dir(each)} - plain for each in (make(first), make(second))))
    bases = set(kinds[0].__mro__) & set(kinds[1].__mro__)
    inherited = {name for base in bases for name in (*vars(base), *all_arguments(base))}
    of_classes = {
        "traits",
        "task_state",
        "buffer" if any("Replay" in base.__name__ for base in bases) else "",
        "__abstractmethods__",
    }
    assert common - inherited - shared_options(combine(*kinds)) - of_classes == set()


def test_options_of_the_same_name_are_given_by_part() -> None:
    both = combine(EWC, LwF)
    data = [tensors("classification", task) for task in range(2)]

    def made(kind: type[Strategy], **given: Any) -> Strategy:
        torch.manual_seed(0)
        return kind(network(3), lambda p: torch.optim.SGD(p, lr=0.1), steps=STEPS, batch_size=16, **given)

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


@pytest.mark.parametrize(("first", "second"), [pair for pair in ALLOWED if pair[0] < pair[1]], ids=str)
def test_an_option_that_two_methods_have_is_asked_for_by_part(first: str, second: str) -> None:
    """An attribute of that name is of either of them: no hook may look at it."""
    shared = shared_options(kind := combine(STRATEGIES[first].kind, STRATEGIES[second].kind))
    for owner in kind.__mro__:
        own = shared & all_arguments(owner)
        functions = [f for name, f in vars(owner).items() if name != "__init__" and hasattr(f, "__code__")]
        assert not [(f.__qualname__, found) for f in functions if (found := own & {*f.__code__.co_names})]


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
