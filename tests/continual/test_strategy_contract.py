"""What every strategy promises, for every objective that it claims, in `learn` and in a loop of one's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from powerprop.continual import STRATEGIES as REGISTRY
from powerprop.continual import Strategy, load_learner
from powerprop.continual.combine import having
from powerprop.continual.saving import state_of, write_learner
from strategies import (
    OBJECTIVES,
    PAIRS,
    STRATEGIES,
    data_of,
    inputs_of,
    loss_of,
    make,
    network_of,
    same_bits,
    state,
    tensors,
)

every_pair = pytest.mark.parametrize(("name", "objective"), PAIRS)
every_strategy = pytest.mark.parametrize("name", STRATEGIES)
pytestmark = pytest.mark.filterwarnings("ignore:.*for the tasks to come", "ignore:.*sub-network")
"""Networks this small are soon full, and their sub-networks poor."""


def loader(objective: str, task: int) -> DataLoader:
    """Batches as a user has them, shuffled anew in every epoch by a generator of the user's own."""
    shuffle = torch.Generator().manual_seed(task)
    data = data_of(objective, task)
    rows = TensorDataset(*data) if isinstance(data, tuple) else data
    return DataLoader(rows, 16, shuffle=True, generator=shuffle)


def test_every_strategy_is_in_the_contract() -> None:
    assert {row.kind for row in STRATEGIES.values()} == set(REGISTRY.values())


@every_pair
def test_a_loop_of_ones_own_is_the_same_to_the_bit(name: str, objective: str) -> None:
    ours, own = make(name, objective), make(name, objective)
    for task in range(2):
        ours.learn(loader(objective, task), epochs=3)
        batches = loader(objective, task)
        own.begin(task, steps=3 * len(batches))
        for _ in range(3):
            own.model.train()
            for batch in batches:
                own.step(loss_of(own, batch), batch)
        own.end(batches)
        assert same_bits(state(ours), state(own))


@every_pair
def test_learns_two_tasks(name: str, objective: str) -> None:
    ours = make(name, objective, steps=60)
    for task in range(2):
        data = data_of(objective, task)
        ours.begin(steps=1)
        before = ours.objective.score(ours.bound(task), ours.source(data).in_order(), task)
        ours.give_up()
        ours.learn(data)
        assert ours.score(data, task) > before
    answer = ours.predict(inputs_of(objective, 0), 1)
    assert len(answer[0] if objective == "classification" else answer) == len(tensors(objective, 0)[0])


@every_pair
def test_state_round_trip_and_the_next_task_is_the_same_to_the_bit(name: str, objective: str, tmp_path: Path) -> None:
    ours, again = make(name, objective), make(name, objective)
    ours.learn(data_of(objective, 0))
    ours.save(tmp_path / "learner")
    again.load(tmp_path / "learner")
    assert same_bits(state(ours), state(again))
    for each in (ours, again):
        each.learn(data_of(objective, 1))
    assert same_bits(state(ours), state(again))
    assert ours.memory_bytes() == again.memory_bytes()


@every_strategy
@pytest.mark.parametrize("task", [0, 1, 2])
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_a_learner_saved_in_the_middle_of_a_task_goes_on_bit_for_bit(
    name: str, alpha: float, task: int, tmp_path: Path
) -> None:
    """In another learner, of a model with other weights; then to the end of the task, and through the next one."""
    if alpha not in STRATEGIES[name].alphas:
        pytest.skip("the method takes no such power")
    more = {"total_tasks": 5} if name == "packnet" else {}
    straight, broken = (make(name, alpha=alpha, **more) for _ in range(2))

    def some(learner: Strategy, steps: int) -> None:
        for x, y in list(zip(*(t.split(16) for t in tensors("classification", task)), strict=True))[:steps]:
            learner.model.train()
            learner.step(loss_of(learner, (x, y)), (x, y))

    for each in (straight, broken):
        for earlier in range(task):
            each.learn(tensors("classification", earlier))
        each.begin(f"task {task}", steps=7)
        some(each, 3)
    broken.save(tmp_path / "l")
    assert broken.now is not None
    other = make(name, alpha=alpha, **more)
    other.load(tmp_path / "l")
    made = load_learner(tmp_path / "l", network_of(name))
    for each in (straight, other, made, broken):
        some(each, 4)
        each.end(tensors("classification", task))
        each.learn(tensors("classification", task + 1), id="next")
    assert straight.ids[-1] == "next"
    for each in (other, made, broken):
        assert same_bits(state(straight), state(each))


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
    data = tensors("classification", 1)
    for each in (straight, broken):
        each.learn(tensors("classification", 0))
        each.begin()
        each.step(loss_of(each, data))
        each.prune(data)  # type: ignore[attr-defined]
        each.step(loss_of(each, data))
    broken.save(tmp_path / "l")
    other.load(tmp_path / "l")
    for each in (straight, other):
        each.model.train()
        for _ in range(3):
            each.step(loss_of(each, data))
        each.end(data)
    assert same_bits(state(straight), state(other))
    x = data[0]
    assert all(torch.equal(straight.logits(x, t), other.logits(x, t)) for t in range(2))


def test_gradients_that_are_coming_together_are_no_place_to_save(tmp_path: Path) -> None:
    ours, data = make("naive"), tensors("classification", 0)
    ours.begin()
    ours.backward(loss_of(ours, data) / 2, data)
    with pytest.raises(RuntimeError, match=r"a learner is saved after update\(\)"):
        ours.save(tmp_path / "l")
    assert not (tmp_path / "l").exists()


def test_a_file_of_the_middle_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    ours, other = make("hat"), make("hat")
    ours.begin("a", steps=3)
    ours.step(loss_of(ours, tensors("classification", 0)))
    found, data = state_of(ours)
    other.learn(tensors("classification", 1))
    before, x = state(other), tensors("classification", 1)[0]
    answers = other.logits(x, 0)
    for part in ("own/", "model/"):
        spoiled = {name: tensor for name, tensor in found.items() if part not in name}
        write_learner(tmp_path / "l", spoiled, data)
        with pytest.raises(ValueError, match="not a learner that this one can become"):
            other.load(tmp_path / "l")
        assert same_bits(before, state(other))
        assert other.now is None
        assert torch.equal(other.logits(x, 0), answers)


@pytest.mark.parametrize(
    ("name", "objective"), [(n, o) for n, row in STRATEGIES.items() for o in OBJECTIVES if o not in row.objectives]
)
def test_an_objective_that_a_method_cannot_protect_is_refused(name: str, objective: str) -> None:
    with pytest.raises(TypeError, match=r"objective must be Classification, got"):
        make(name, objective)


@every_strategy
def test_an_optimiser_that_carries_on_is_saved_too(name: str, tmp_path: Path) -> None:
    if having(STRATEGIES[name].kind, "starts anew"):
        with pytest.raises(ValueError, match=r"starts every task anew: expected carry=False"):
            make(name, carry=True)
        return
    ours, fresh = make(name, carry=True), make(name)
    for learner in (ours, fresh):
        learner.learn(tensors("classification", 0))
    assert same_bits(state(ours), state(fresh))
    ours.save(tmp_path / "learner.safetensors")
    again = load_learner(tmp_path / "learner.safetensors", network_of(name))
    assert ours.memory_bytes() == again.memory_bytes() == fresh.memory_bytes()
    for learner in (ours, again, fresh):
        learner.learn(tensors("classification", 1))
    assert same_bits(state(ours), state(again))
    assert not same_bits(state(ours), state(fresh))


@every_strategy
def test_a_file_makes_the_learner(name: str, tmp_path: Path) -> None:
    ours = make(name)
    ours.learn(tensors("classification", 0))
    ours.save(tmp_path / "learner")
    made = load_learner(tmp_path / "learner", network_of(name))
    assert type(made) is type(ours)
    for each in (ours, made):
        each.learn(tensors("classification", 1))
    assert same_bits(state(ours), state(made))


@every_strategy
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_same_seed_same_result(name: str, alpha: float) -> None:
    if alpha not in STRATEGIES[name].alphas:
        with pytest.raises(ValueError, match="alpha"):
            make(name, alpha=alpha)
        return
    first, second, other = (make(name, alpha=alpha, seed=seed) for seed in (3, 3, 4))
    for task in range(2):
        for each in (first, second, other):
            torch.rand(1)  # the global generator plays no part
            each.learn(tensors("classification", task))
    assert same_bits(state(first), state(second))
    assert not same_bits(state(first), state(other))


@pytest.mark.parametrize(("name", "objective"), [pair for pair in PAIRS if STRATEGIES[pair[0]].masks])
def test_earlier_tasks_answer_as_before_whatever_calls_the_optimiser(name: str, objective: str) -> None:
    ours = make(name, objective)
    x, answers = inputs_of(objective, 0), []
    for task in range(3):
        ours.begin(task, steps=20)
        for batch in loader(objective, task):
            ours.model.train()
            ours.optimizer.zero_grad()
            loss_of(ours, batch).backward()
            ours.optimizer.step()  # no verb of the learner has a part in it
        ours.end(loader(objective, task))
        answers.append(ours.predict(x, task))
        for earlier, answer in enumerate(answers):
            again = ours.predict(x, earlier)
            pairs = zip(again, answer, strict=True) if objective == "classification" else [(again, answer)]
            assert all(torch.equal(*pair) for pair in pairs)


@every_strategy
def test_what_is_out_of_order_is_refused_and_changes_nothing(name: str) -> None:
    ours, data = make(name), tensors("classification", 0)
    for call in (lambda: ours.step(torch.zeros(())), lambda: ours.end(data)):
        with pytest.raises(RuntimeError, match=r"call begin\(\) first"):
            call()
    before = state(ours)
    for odd in (1.5, True, -1):
        with pytest.raises(TypeError, match=f"a task is a number from 0 on, a name or a Task, got {odd}"):
            ours.begin(odd)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"task 3: 3 was not learned yet \(nothing was\)"):
        ours.begin(3, again=True)
    assert same_bits(before, state(ours))
    ours.begin(0, steps=20)
    before = state(ours)
    with pytest.raises(RuntimeError, match=r"still being learned: call end\(\)"):
        ours.begin(1)
    with pytest.raises(RuntimeError, match=r"still being learned: call end\(\) before load\(\)"):
        ours.load("nowhere")
    with pytest.raises(RuntimeError, match="belongs to a learner"):
        ours.optimizer.base.step()
    assert same_bits(before, state(ours))
