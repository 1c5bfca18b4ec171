"""What every strategy promises, for every objective that it claims, in `learn` and in a loop of one's own."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from powerprop.continual import STRATEGIES as REGISTRY
from powerprop.continual import load_learner
from strategies import PAIRS, STRATEGIES, loss_of, make, network_of, same_bits, state, tensors

every_pair = pytest.mark.parametrize(("name", "objective"), PAIRS)
every_strategy = pytest.mark.parametrize("name", STRATEGIES)
pytestmark = pytest.mark.filterwarnings("ignore:.*for the tasks to come", "ignore:.*sub-network")
"""Networks this small are soon full, and their sub-networks poor."""


def loader(objective: str, task: int) -> DataLoader:
    """Batches as a user has them, shuffled anew in every epoch by a generator of the user's own."""
    shuffle = torch.Generator().manual_seed(task)
    return DataLoader(TensorDataset(*tensors(objective, task)), 16, shuffle=True, generator=shuffle)


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
        data = tensors(objective, task)
        ours.begin(steps=1)
        before = ours.objective.score(ours.bound(task), ours.source(data).in_order(), task)
        ours.give_up()
        ours.learn(data)
        assert ours.score(data, task) > before
    x = tensors(objective, 0)[0]
    assert len(ours.predict(x, 1)[0] if objective == "classification" else ours.predict(x, 1)) == len(x)


@every_pair
def test_state_round_trip_and_the_next_task_is_the_same_to_the_bit(name: str, objective: str, tmp_path: Path) -> None:
    ours, again = make(name, objective), make(name, objective)
    ours.learn(tensors(objective, 0))
    ours.save(tmp_path / "learner")
    again.load(tmp_path / "learner")
    assert same_bits(state(ours), state(again))
    for each in (ours, again):
        each.learn(tensors(objective, 1))
    assert same_bits(state(ours), state(again))
    assert ours.memory_bytes() == again.memory_bytes()


@every_strategy
def test_an_optimiser_that_carries_on_is_saved_too(name: str, tmp_path: Path) -> None:
    if not STRATEGIES[name].kind.carries:
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
    x, answers = tensors(objective, 0)[0], []
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
    with pytest.raises(ValueError, match="expected the task with index 0, got 3"):
        ours.begin(3)
    assert same_bits(before, state(ours))
    ours.begin(0, steps=20)
    before = state(ours)
    with pytest.raises(RuntimeError, match=r"still being learned: call end\(\)"):
        ours.begin(1)
    with pytest.raises(RuntimeError, match=r"saved after end\(\)"):
        ours.save("nowhere")
    with pytest.raises(RuntimeError, match="belongs to a learner"):
        ours.optimizer.base.step()
    assert same_bits(before, state(ours))
