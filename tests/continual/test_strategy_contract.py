"""What every strategy promises, for every objective that it claims, in `learn` and in a loop of one's own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from powerprop.continual import STRATEGIES as REGISTRY
from powerprop.continual import Naive, load_learner
from powerprop.continual.combine import having
from powerprop.continual.saving import state_of, write_learner
from powerprop.training import NonFiniteError
from strategies import (
    OBJECTIVES,
    OPTIMIZERS,
    PAIRS,
    STRATEGIES,
    data_of,
    inputs_of,
    learned,
    loss_of,
    make,
    network_of,
    same_bits,
    state,
    tensors,
)

every_pair = pytest.mark.parametrize(("name", "objective"), PAIRS)
every_strategy = pytest.mark.parametrize("name", STRATEGIES)
every_masking = pytest.mark.parametrize("name", [name for name, row in STRATEGIES.items() if row.masks])
pytestmark = pytest.mark.filterwarnings("ignore:.*for the tasks to come", "ignore:.*sub-network")
"""Networks this small are soon full, and their sub-networks poor."""
FIRST, SECOND = (tensors("classification", task) for task in range(2))
AGAIN = ("naive", "er", "er-online", "der", "der++", "ewc", "laplace", "mas", "si")


def loader(objective: str, task: int) -> DataLoader:
    """Batches as a user has them, shuffled anew in every epoch by a generator of the user's own."""
    shuffle = torch.Generator().manual_seed(task)
    data = data_of(objective, task)
    rows = TensorDataset(*data) if isinstance(data, tuple) else data
    return DataLoader(rows, 16, shuffle=True, generator=shuffle)


def highest(name: str) -> float:
    """The largest power that the method takes."""
    return max(STRATEGIES[name].alphas)


def equal(one: Any, two: Any) -> bool:
    """The same answers."""
    pairs = [(one, two)] if isinstance(one, torch.Tensor) else zip(one, two, strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def everything(learner: Any) -> dict[str, torch.Tensor]:
    """The model, and all that the method keeps."""
    return {name: tensor.clone() for name, tensor in state_of(learner)[0].items()}


def test_every_strategy_is_in_the_contract() -> None:
    assert {row.kind for row in STRATEGIES.values()} == set(REGISTRY.values())


# --- learning -----------------------------------------------------------------------------------------------------


@every_pair
def test_a_loop_of_ones_own_is_the_same_to_the_bit(name: str, objective: str) -> None:
    ours, own = make(name, objective), make(name, objective)
    for task in range(2):
        ours.learn(loader(objective, task), epochs=2)
        batches = loader(objective, task)
        own.begin(task, steps=2 * len(batches))
        for _ in range(2):
            own.model.train()
            for batch in batches:
                own.step(loss_of(own, batch), batch)
        own.end(batches)
        assert same_bits(state(ours), state(own))


@every_pair
def test_learns_two_tasks(name: str, objective: str) -> None:
    ours = make(name, objective, steps=40)
    for task in range(2):
        data = data_of(objective, task)
        ours.begin(steps=1)
        before = ours.objective.score(ours.bound(task), ours.source(data).in_order(), task)
        ours.give_up()
        ours.learn(data)
        assert ours.score(data, task) > before
    answer = ours.predict(inputs_of(objective, 0), 1)
    assert len(answer[0] if objective == "classification" else answer) == len(FIRST[0])


@every_strategy
def test_same_seed_same_result(name: str) -> None:
    if 1.5 not in STRATEGIES[name].alphas:
        with pytest.raises(ValueError, match="alpha"):
            make(name, alpha=1.5)
    first, second, other = (make(name, alpha=highest(name), seed=seed, steps=8) for seed in (3, 3, 4))
    for task in (FIRST, SECOND):
        for each in (first, second, other):
            torch.rand(1)  # the global generator plays no part
            each.learn(task)
    assert same_bits(state(first), state(second))
    assert not same_bits(state(first), state(other))


@pytest.mark.parametrize(
    ("name", "objective"), [(n, o) for n, row in STRATEGIES.items() for o in OBJECTIVES if o not in row.objectives]
)
def test_an_objective_that_a_method_cannot_protect_is_refused(name: str, objective: str) -> None:
    with pytest.raises(TypeError, match=r"objective must be Classification, got"):
        make(name, objective)


# --- answers that stay --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "objective"), [pair for pair in PAIRS if STRATEGIES[pair[0]].masks])
def test_earlier_tasks_answer_as_before_whatever_calls_the_optimiser(name: str, objective: str) -> None:
    ours = make(name, objective)
    x, answers = inputs_of(objective, 0), []
    for task in range(3):
        ours.begin(task, steps=8)
        for batch in loader(objective, task):
            ours.model.train()
            for _ in range(2):
                ours.optimizer.zero_grad()
                loss_of(ours, batch).backward()
                ours.optimizer.step()  # no verb of the learner has a part in it
        ours.end(loader(objective, task))
        answers.append(ours.predict(x, task))
        assert all(equal(ours.predict(x, earlier), answer) for earlier, answer in enumerate(answers))


@every_masking
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_earlier_tasks_answer_as_before_with_every_optimiser(name: str, optimizer: str) -> None:
    ours, answers = make(name, alpha=highest(name), optimizer=optimizer, clip=1.0), []
    for task in range(3):
        ours.learn(tensors("classification", task))
        answers.append(ours.logits(FIRST[0], task))
        assert all(torch.equal(ours.logits(FIRST[0], earlier), logits) for earlier, logits in enumerate(answers))
    ours.model.train()
    for _ in range(2):  # also where somebody steps outside of a task
        ours.model(FIRST[0]).square().sum().backward()
        ours.optimizer.step()
    assert all(torch.equal(ours.logits(FIRST[0], earlier), logits) for earlier, logits in enumerate(answers))


# --- files --------------------------------------------------------------------------------------------------------


@every_pair
def test_saved_after_a_task_it_goes_on_to_the_bit(name: str, objective: str, tmp_path: Path) -> None:
    alpha = highest(name) if objective == "classification" else 1.0
    ours, again = (make(name, objective, alpha, steps=8) for _ in range(2))
    ours.learn(data_of(objective, 0))
    ours.save(tmp_path / "learner")
    again.load(tmp_path / "learner")
    others = [again]
    if objective == "classification":
        others.append(load_learner(tmp_path / "learner", network_of(name)))
        assert type(others[1]) is type(ours)
        assert type(others[1].objective) is type(ours.objective)
    for each in (ours, *others):
        each.learn(data_of(objective, 1))
    for each in others:
        assert same_bits(everything(ours), everything(each))
        assert ours.memory_bytes() == each.memory_bytes()
        assert ours.tasks == each.tasks


@every_strategy
@pytest.mark.parametrize(("alpha", "task"), [(1.0, 0), (1.5, 1), (1.0, 2)])
def test_saved_in_the_middle_of_a_task_it_goes_on_to_the_bit(
    name: str, alpha: float, task: int, tmp_path: Path
) -> None:
    """In another learner, of a model with other weights; then to the end of the task, and through the next one."""
    given: dict[str, Any] = {"alpha": min(alpha, highest(name)), "steps": 8}
    given |= {"total_tasks": 5} if name == "packnet" else {}
    straight = make(name, **given)

    def some(learner: Any, steps: int) -> None:
        for x, y in list(zip(*(t.split(16) for t in tensors("classification", task)), strict=True))[:steps]:
            learner.model.train()
            learner.step(loss_of(learner, (x, y)), (x, y))

    for earlier in range(task):
        straight.learn(tensors("classification", earlier))
    broken = copy.deepcopy(straight)
    for each in (straight, broken):
        each.begin(f"task {task}", steps=7)
        some(each, 3)
    broken.save(tmp_path / "l")
    assert broken.now is not None
    other = make(name, **given)
    other.load(tmp_path / "l")
    made = load_learner(tmp_path / "l", network_of(name))
    for each in (straight, other, made, broken):
        some(each, 4)
        each.end(tensors("classification", task))
        each.learn(tensors("classification", task + 1), id="next")
    assert straight.ids[-1] == "next"
    assert all(same_bits(everything(straight), everything(each)) for each in (other, made, broken))


@every_strategy
def test_an_optimiser_that_carries_on_is_saved_too(name: str, tmp_path: Path) -> None:
    if having(STRATEGIES[name].kind, "starts anew"):
        with pytest.raises(ValueError, match=r"starts every task anew: expected carry=False"):
            make(name, carry=True)
        return
    ours, fresh = make(name, carry=True), learned(name)
    ours.learn(FIRST)
    assert same_bits(state(ours), state(fresh))
    ours.save(tmp_path / "learner.safetensors")
    again = load_learner(tmp_path / "learner.safetensors", network_of(name))
    assert ours.memory_bytes() == again.memory_bytes() == fresh.memory_bytes()
    for learner in (ours, again, fresh):
        learner.learn(SECOND)
    assert same_bits(state(ours), state(again))
    assert not same_bits(state(ours), state(fresh))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("packnet", {}),
        ("efficient-packnet", {"gamma": None, "grid": (0.5, 0.3)}),
        ("efficient-packnet", {"least_free": 1.0}),  # from the second task on a mask over frozen weights is learned
    ],
)
@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.filterwarnings("ignore:.*from now on a task learns a mask")
def test_the_middle_of_retraining_is_saved_too(
    name: str, options: dict[str, Any], alpha: float, tmp_path: Path
) -> None:
    straight, broken, other = (make(name, alpha=alpha, **options) for _ in range(3))
    for each in (straight, broken):
        each.learn(FIRST)
        each.begin()
        each.step(loss_of(each, SECOND))
        each.prune(SECOND)
        each.step(loss_of(each, SECOND))
    broken.save(tmp_path / "l")
    other.load(tmp_path / "l")
    for each in (straight, other):
        each.model.train()
        for _ in range(3):
            each.step(loss_of(each, SECOND))
        each.end(SECOND)
    assert same_bits(state(straight), state(other))
    assert all(torch.equal(straight.logits(SECOND[0], t), other.logits(SECOND[0], t)) for t in range(2))


def test_gradients_that_are_coming_together_are_no_place_to_save(tmp_path: Path) -> None:
    ours = make("naive")
    ours.begin()
    ours.backward(loss_of(ours, FIRST) / 2, FIRST)
    with pytest.raises(RuntimeError, match=r"a learner is saved after update\(\)"):
        ours.save(tmp_path / "l")
    assert not (tmp_path / "l").exists()


def test_a_file_of_the_middle_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    ours, other = make("hat"), make("hat")
    ours.begin("a", steps=3)
    ours.step(loss_of(ours, FIRST))
    found, data = state_of(ours)
    other.learn(SECOND)
    before, answers = state(other), other.logits(SECOND[0], 0)
    for part in ("own/", "model/"):
        spoiled = {name: tensor for name, tensor in found.items() if part not in name}
        write_learner(tmp_path / "l", spoiled, data)
        with pytest.raises(ValueError, match="not a learner that this one can become"):
            other.load(tmp_path / "l")
        assert same_bits(before, state(other))
        assert other.now is None
        assert torch.equal(other.logits(SECOND[0], 0), answers)


# --- steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 4])
@every_strategy
def test_parts_of_a_batch_are_the_step_of_the_whole(name: str, parts: int) -> None:
    """One part is a step to the bit. Where noise is drawn for the rows of a batch, halves have other noise."""
    if parts > 1 and name in ("dgr", "rtf", "vcl"):
        return
    whole, split = learned(name), learned(name)
    for each in (whole, split):
        each.begin(steps=4)
    x, y = SECOND
    for _ in range(2):
        whole.step(loss_of(whole, (x, y)), (x, y))
        for batch in zip(x.chunk(parts), y.chunk(parts), strict=True):
            split.backward(loss_of(split, batch) / parts, batch)
        split.update()
    if parts == 1:
        assert same_bits(state(whole), state(split))
    pairs = [(p.grad, q.grad) for p, q in zip(whole.model.parameters(), split.model.parameters(), strict=True)]
    assert all(torch.allclose(p, q, atol=1e-5) for p, q in pairs if p is not None and q is not None)
    assert any(p is not None and p.any() for p, _ in pairs)


@every_strategy
def test_a_step_that_shows_no_batch_is_refused_where_it_is_looked_at(name: str) -> None:
    ours = learned(name)
    ours.begin(steps=4)
    before = state(ours)
    if name in ("der", "der++", "dgr", "er-online", "icarl", "lwf", "rtf", "vcl"):
        with pytest.raises(ValueError, match=r"say step\(loss, batch\)"):
            ours.step(loss_of(ours, SECOND))
        assert same_bits(before, state(ours))
        ours.step(loss_of(ours, SECOND), SECOND)
    else:
        ours.step(loss_of(ours, SECOND))
    assert not same_bits(before, state(ours))


@pytest.mark.parametrize("name", ["lwf", "dgr"])
def test_what_looks_at_the_batch_sees_all_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, seen = learned(name), list[int]()
    ours.begin(steps=4)
    inputs = ours.objective.inputs
    monkeypatch.setattr(ours.objective, "inputs", lambda batch: (seen.append(len(batch[0])), inputs(batch))[1])
    for batch in zip(*(part.chunk(4) for part in SECOND), strict=True):
        ours.backward(loss_of(ours, batch) / 4, batch)
    ours.update()
    assert seen[-1] == len(SECOND[0])


@every_strategy
def test_a_loss_that_is_no_number_is_refused_and_nothing_has_changed(name: str) -> None:
    ours = learned(name)
    ours.begin(steps=4)
    before, loss = state(ours), loss_of(ours, SECOND)
    for value in (torch.nan, torch.inf):
        with pytest.raises(NonFiniteError, match=f"the loss is {value} at step 1, which is not taken"):
            ours.step(loss * value, SECOND)
    assert same_bits(before, state(ours))
    ours.step(loss_of(ours, SECOND), SECOND)  # and it goes on
    assert not same_bits(before, state(ours))


@pytest.mark.parametrize(
    ("name", "carry"),
    [(n, carry) for n, row in STRATEGIES.items() for carry in (False, True)
     if not (carry and having(row.kind, "starts anew"))],
)  # fmt: skip
@pytest.mark.parametrize("why", ["rate", "data"])
def test_a_task_that_diverges_leaves_the_learner_as_it_was(name: str, carry: bool, why: str) -> None:
    """Numbers end by a rate without measure, or in the middle of the task with an input that is none."""
    if (why, name) in (("rate", "supsup"), ("data", "dgr"), ("data", "rtf")):
        return  # scores may be of any size; pixels that are no numbers are refused by themselves
    ours, other = (learned(name, carry=carry, steps=8) for _ in range(2))
    before, rates = state(ours), [group["lr"] for group in ours.optimizer.param_groups]
    answers = ours.predict(FIRST[0], 0)
    x, y = SECOND[0].clone(), SECOND[1]
    if why == "rate":
        for group in ours.optimizer.param_groups:
            group["lr"] = 1e30
    else:
        x[40] = torch.nan
    with pytest.raises(NonFiniteError):
        ours.learn((x, y))
    assert same_bits(before, state(ours))
    assert equal(ours.predict(FIRST[0], 0), answers)
    for group, rate in zip(ours.optimizer.param_groups, rates, strict=False):
        group["lr"] = rate
    for each in (ours, other):
        each.learn(SECOND)
    assert same_bits(state(ours), state(other))


# --- what learners are called, and what is out of order ------------------------------------------------------------


@every_strategy
def test_names_and_gaps_change_nothing_but_what_tasks_are_called(name: str, tmp_path: Path) -> None:
    counted, called, ids = make(name, steps=6), make(name, steps=6), ["cats", 17, "a/b"]
    x = FIRST[0]
    for place, id in enumerate(ids):
        counted.learn(tensors("classification", place))
        called.learn(tensors("classification", place), id=id)
    assert same_bits(state(counted), state(called))
    assert (counted.ids, called.ids) == ([0, 1, 2], ids)
    called.save(tmp_path / "l")
    again = make(name, steps=6)
    again.load(tmp_path / "l")
    assert again.ids == ids
    for place, id in enumerate(ids):
        assert equal(counted.predict(x, place), called.predict(x, id))
        assert equal(counted.predict(x, place), again.predict(x, id))
        assert torch.equal(counted.logits(x, place), called.logits(x, id))
        assert counted.score((x, x[:, 0].long()), place) == called.score((x, x[:, 0].long()), id)
    for odd in ("dogs", 0, 3):
        with pytest.raises(ValueError, match=r"task must be one of 'cats', 17, 'a/b' .*, got "):
            called.predict(x, odd)


@every_strategy
def test_what_is_out_of_order_is_refused_and_changes_nothing(name: str) -> None:
    ours, x = make(name), FIRST[0]
    for call in (lambda: ours.step(torch.zeros(())), lambda: ours.end(FIRST)):
        with pytest.raises(RuntimeError, match=r"call begin\(\) first"):
            call()
    before = state(ours)
    for task in ("a", 0):
        with pytest.raises(ValueError, match="learned first"):
            ours.predict(x, task)
    for odd in (1.5, True, -1):
        with pytest.raises(TypeError, match=f"a task is a number from 0 on, a name or a Task, got {odd}"):
            ours.begin(odd)
    with pytest.raises(ValueError, match=r"task 3: 3 was not learned yet \(nothing was\)"):
        ours.begin(3, again=True)
    assert same_bits(before, state(ours))
    ours.begin(0, steps=20)
    before = state(ours)
    with pytest.raises(RuntimeError, match=r"still being learned: call end\(\)"):
        ours.begin(1)
    with pytest.raises(RuntimeError, match=r"still being learned: call end\(\) before load\(\)"):
        ours.load("nowhere")
    with pytest.raises(RuntimeError, match="is still being learned: a learner is copied after end"):
        copy.deepcopy(ours)
    with pytest.raises(RuntimeError, match="belongs to a learner"):
        ours.optimizer.base.step()
    assert same_bits(before, state(ours))
    ours = learned(name)
    for odd in ("a", 3 if STRATEGIES[name].masks else -1):
        with pytest.raises(ValueError, match=r"task must be .*0.* \(the tasks learned so far.*\), .*got|, got 'a'"):
            ours.predict(x, odd)
    for kind in (1.0, True, [0]):
        with pytest.raises(TypeError, match="task must be the number or the name of a task, or None, got"):
            ours.predict(x, kind)


@pytest.mark.parametrize("name", [n for n in STRATEGIES if n not in AGAIN])
def test_methods_that_cannot_learn_a_task_again_say_so(name: str) -> None:
    ours = learned(name)
    before = state(ours)
    with pytest.raises(ValueError, match="does not learn a task again: give what comes now an id of its own"):
        ours.learn(FIRST, id=0, again=True)
    with pytest.raises(ValueError, match="0 was learned already"):
        ours.learn(FIRST, id=0)
    assert same_bits(before, state(ours))


# --- copies, and two learners of one model ------------------------------------------------------------------------


@every_strategy
def test_a_copy_is_a_learner_of_its_own(name: str, tmp_path: Path) -> None:
    ours = make(name, alpha=highest(name), steps=8)
    ours.learn(FIRST)
    other = copy.deepcopy(ours)
    before = state(ours)
    other.learn(SECOND)
    assert same_bits(before, state(ours))
    assert not same_bits(before, state(other))
    ours.learn(SECOND)
    assert same_bits(state(ours), state(other))
    with pytest.raises(RuntimeError, match="belongs to a learner"):
        other.optimizer.base.step()
    other.save(tmp_path / "l")
    del ours
    assert torch.equal(other.logits(FIRST[0], 0), copy.deepcopy(other).logits(FIRST[0], 0))


@every_strategy
def test_the_last_learner_has_the_model_and_an_earlier_one_says_so(name: str) -> None:
    first, x = learned(name), FIRST[0]
    second = Naive(first.model, OPTIMIZERS["adam"], steps=2, batch_size=8)
    first.predict(x, 0)  # a learner that has not begun takes nothing
    second.begin()
    second.give_up()
    for call in (
        lambda: first.predict(x, 0),
        lambda: first.logits(x, 0),
        lambda: first.begin(),
        lambda: first.learn(SECOND),
        lambda: first.score(FIRST, 0),
        lambda: first.save("nowhere"),
    ):
        with pytest.raises(RuntimeError, match="belongs to another learner, Naive, that began with it since"):
            call()
    second.learn(SECOND)
    assert not any(m._forward_pre_hooks for m in second.model.modules())
