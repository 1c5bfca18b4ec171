"""Learners as objects: copies, two on one model, layers that are replaced, and the odd networks of HAT."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powerprop.continual import ER, EWC, GPM, HAT, OWM, EfficientPackNet, Naive, PackNet, SupSup
from strategies import STRATEGIES, loss_of, make, network, same_bits, state, tensors

pytestmark = pytest.mark.filterwarnings("ignore:.*for the tasks to come", "ignore:.*sub-network")
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


# --- copies -------------------------------------------------------------------------------------------------------


@every_strategy
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_a_copy_is_a_learner_of_its_own(name: str, alpha: float, tmp_path: Path) -> None:
    if alpha not in STRATEGIES[name].alphas:
        return
    ours = make(name, alpha=alpha)
    ours.learn(tensors("classification", 0))
    other = copy.deepcopy(ours)
    before = state(ours)
    other.learn(tensors("classification", 1))
    assert same_bits(before, state(ours))
    assert not same_bits(before, state(other))
    ours.learn(tensors("classification", 1))
    assert same_bits(state(ours), state(other))
    with pytest.raises(RuntimeError, match="belongs to a learner"):
        other.optimizer.base.step()
    other.save(tmp_path / "l")
    x = tensors("classification", 0)[0]
    del ours
    assert torch.equal(other.logits(x, 0), copy.deepcopy(other).logits(x, 0))


@every_strategy
def test_a_learner_in_the_middle_of_a_task_is_not_copied(name: str) -> None:
    ours = make(name)
    ours.begin(steps=3)
    with pytest.raises(RuntimeError, match="is still being learned: a learner is copied after end"):
        copy.deepcopy(ours)


# --- two learners -------------------------------------------------------------------------------------------------


@every_strategy
def test_the_last_learner_has_the_model_and_an_earlier_one_says_so(name: str) -> None:
    first = make(name)
    first.learn(tensors("classification", 0))
    second = Naive(first.model, adam, steps=2, batch_size=8)
    first.predict(tensors("classification", 0)[0], 0)  # a learner that has not begun takes nothing
    second.begin()
    second.give_up()
    x = tensors("classification", 0)[0]
    for call in (
        lambda: first.predict(x, 0),
        lambda: first.logits(x, 0),
        lambda: first.begin(),
        lambda: first.learn(tensors("classification", 1)),
        lambda: first.score(tensors("classification", 0), 0),
        lambda: first.save("nowhere"),
    ):
        with pytest.raises(RuntimeError, match="belongs to another learner, Naive, that began with it since"):
            call()
    second.learn(tensors("classification", 1))
    assert not any(m._forward_pre_hooks for m in second.model.modules())


def test_an_optimiser_serves_one_learner() -> None:
    model = network(3)
    base = adam(list(model.parameters()))
    first = ER(model, base)
    for taken in (base, first.optimizer):
        with pytest.raises(ValueError, match="this optimiser belongs to a learner already"):
            EWC(model, taken)
    first.learn(tensors("classification", 0))


# --- layers that are replaced -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [HAT, GPM, OWM, EfficientPackNet, PackNet, SupSup])
def test_a_layer_that_was_replaced_between_tasks_is_refused_by_name(kind: type) -> None:
    options = {"total_tasks": 3} if kind is PackNet else {}
    ours = kind(network(3), adam, steps=3, batch_size=16, **options)
    ours.learn(tensors("classification", 0))
    first, groups = ours.model[2], len(ours.optimizer.param_groups)
    ours.model[2] = nn.Linear(16, 16)
    with pytest.raises(RuntimeError, match="'2.weight', '2.bias' of the model are not what it was when earlier tasks"):
        ours.learn(tensors("classification", 1))
    assert len(ours.optimizer.param_groups) == groups
    ours.model[2] = first
    ours.learn(tensors("classification", 1))


def test_methods_that_hold_nothing_learn_with_a_new_layer() -> None:
    ours = Naive(network(3), adam, steps=30, batch_size=16)
    ours.learn(tensors("classification", 0))
    ours.model[5] = layer = nn.Linear(16, 3)
    before = layer.weight.detach().clone()
    ours.learn(tensors("classification", 1))
    assert not torch.equal(layer.weight, before)


# --- HAT ----------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x.view(len(x), 2, 4))[0][:, -1])  # type: ignore[no-any-return]


@pytest.mark.parametrize(("net", "name"), [(lambda: nn.Linear(8, 3), ""), (Recurrent, "out")])
def test_hat_without_a_layer_for_gates_says_what_to_do(net: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"no layer is left for gates: '{name}' is the only one, .* say inputs="):
        HAT(net(), adam)
    ours, x = HAT(net(), adam, inputs=[], steps=20, batch_size=16), tensors("classification", 0)[0]
    answers = []
    for task in range(3):
        ours.learn(tensors("classification", task))
        answers.append(ours.logits(x, task))
        assert all(torch.equal(ours.logits(x, t), before) for t, before in enumerate(answers))


def test_steps_beyond_those_that_were_announced_have_the_hardest_gates() -> None:
    ours, found = HAT(network(3), adam, periods=2), []
    ours.begin(steps=6)
    batch = tensors("classification", 0)
    for _ in range(10):
        found.append(ours._s())
        ours.step(loss_of(ours, batch))
    assert found[:6] == pytest.approx([1 / 400, 200.00125, 400] * 2)
    assert found[6:] == [400.0] * 4
    ours.end(batch)
