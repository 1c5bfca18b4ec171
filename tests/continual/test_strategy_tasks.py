"""What tasks are called: names, numbers with gaps, and tasks that come again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from powerprop.continual import DER, ER, HAT, DERpp, Strategy, combine
from strategies import STRATEGIES, make, same_bits, state, tensors
from tasks import learner, toy_task

pytestmark = pytest.mark.filterwarnings("ignore:.*for the tasks to come", "ignore:.*sub-network")
every_strategy = pytest.mark.parametrize("name", STRATEGIES)
AGAIN = ("naive", "er", "er-online", "der", "der++", "ewc", "laplace", "mas", "si")


def same(one: Any, two: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@every_strategy
def test_names_and_gaps_change_nothing_but_what_tasks_are_called(name: str, tmp_path: Path) -> None:
    counted, called, ids = make(name), make(name), ["cats", 17, "a/b"]
    x = tensors("classification", 0)[0]
    for place, id in enumerate(ids):
        counted.learn(tensors("classification", place))
        called.learn(tensors("classification", place), id=id)
    assert same_bits(state(counted), state(called))
    assert (counted.ids, called.ids) == ([0, 1, 2], ids)
    called.save(tmp_path / "l")
    again = make(name)
    again.load(tmp_path / "l")
    assert again.ids == ids
    for place, id in enumerate(ids):
        assert same(counted.predict(x, place), called.predict(x, id))
        assert same(counted.predict(x, place), again.predict(x, id))
        assert torch.equal(counted.logits(x, place), called.logits(x, id))
        assert counted.score((x, x[:, 0].long()), place) == called.score((x, x[:, 0].long()), id)
    for odd in ("dogs", 0, 3):
        with pytest.raises(ValueError, match=r"task must be one of 'cats', 17, 'a/b' .*, got "):
            called.predict(x, odd)


@every_strategy
def test_what_no_task_can_be_called_is_an_error_of_its_own(name: str) -> None:
    ours, x = make(name), tensors("classification", 0)[0]
    with pytest.raises(ValueError, match="task must be learned first: none is yet, got 'a'|learned first"):
        ours.predict(x, "a")
    ours.learn(tensors("classification", 0))
    with pytest.raises(ValueError, match=r"task must be .*0.* \(the tasks learned so far.*\), .*got 'a'|got 'a'"):
        ours.predict(x, "a")
    for odd in (1.0, True, [0]):
        with pytest.raises(TypeError, match="task must be the number or the name of a task, or None, got"):
            ours.predict(x, odd)


@pytest.mark.parametrize("name", AGAIN)
def test_a_task_comes_again_with_its_head(name: str, tmp_path: Path) -> None:
    options = STRATEGIES[name].options

    def made() -> Strategy:
        base = learner("naive", "adam", 1.0, head_count=3)
        kind = STRATEGIES[name].kind
        return kind(
            base.model, lambda p: torch.optim.Adam(p, lr=1e-2), heads="heads", steps=30, batch_size=32, **options
        )

    ours, x = made(), toy_task(0).test().x
    ours.learn(toy_task(0), id="a")
    ours.learn(toy_task(1), id="b")
    first, second = (state(ours)[f"heads.{head}.weight"] for head in (0, 1))
    ours.learn(toy_task(0), id="a", again=True)
    assert ours.ids == ["a", "b"]
    assert ours.visits == 3
    assert not torch.equal(state(ours)["heads.0.weight"], first)
    rehearsed = STRATEGIES[name].kind in (ER, DER, DERpp)
    assert rehearsed or torch.equal(state(ours)["heads.1.weight"], second)
    assert (ours.predict(x, "a").label == toy_task(0).test().y).double().mean() > 0.8
    ours.save(tmp_path / "l")
    again = made()
    again.load(tmp_path / "l")
    for each in (ours, again):
        each.learn(toy_task(2), id="c")
        each.learn(toy_task(1), id="b", again=True)
    assert same_bits(state(ours), state(again))


def test_another_visit_draws_other_batches() -> None:
    ours, seen = make("naive"), []
    for visit in range(2):
        ours.begin("a", again=visit == 1)
        seen.append(torch.rand(3, generator=ours.generator("batches")))
        ours.end(tensors("classification", 0))
    assert not torch.equal(*seen)


@pytest.mark.parametrize("name", [n for n in STRATEGIES if n not in AGAIN])
def test_methods_that_cannot_learn_a_task_again_say_so(name: str) -> None:
    ours = make(name)
    ours.learn(tensors("classification", 0), id="a")
    before = state(ours)
    with pytest.raises(ValueError, match="does not learn a task again: give what comes now an id of its own"):
        ours.learn(tensors("classification", 0), id="a", again=True)
    with pytest.raises(ValueError, match="'a' was learned already"):
        ours.learn(tensors("classification", 0), id="a")
    assert same_bits(before, state(ours))


def test_of_two_methods_neither_must_be_in_the_way() -> None:
    options = {"memory": 20, "steps": 2, "batch_size": 8}
    ours = combine(ER, HAT)(make("naive").model, lambda p: torch.optim.Adam(p), **options)
    ours.learn(tensors("classification", 0), id="a")
    with pytest.raises(ValueError, match="HAT does not learn a task again"):
        ours.learn(tensors("classification", 0), id="a", again=True)


def test_classes_stay_those_of_the_first_visit() -> None:
    ours = learner("naive")
    ours.learn(toy_task(0))
    with pytest.raises(ValueError, match="expected the classes .0, 1, 2. that it had before, got .3, 4, 5."):
        ours.begin(0, classes=(3, 4, 5), again=True)
