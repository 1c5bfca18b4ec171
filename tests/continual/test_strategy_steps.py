"""Steps: gradients that accumulate, losses that are no numbers, and what importances are of each objective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop.continual import (
    DGR,
    EWC,
    MAS,
    Classification,
    LwF,
    MultiLabel,
    Objective,
    Regression,
    diagonal_fisher,
)
from powerprop.continual.combine import having
from powerprop.training import NonFiniteError
from strategies import STRATEGIES, data_of, loss_of, make, network, same_bits, state, tensors

pytestmark = pytest.mark.filterwarnings("ignore:.*for the tasks to come", "ignore:.*sub-network")
every_strategy = pytest.mark.parametrize("name", STRATEGIES)
DRAWN = ("dgr", "rtf", "vcl")
"""Noise is drawn for the rows of a batch, so that halves do not have that of the whole."""


def begun(name: str, **options: Any) -> Any:
    """A learner in its second task, so that it rehearses, distils and holds."""
    ours = make(name, steps=4, **options)
    ours.learn(tensors("classification", 0))
    ours.begin(steps=4)
    return ours


# --- gradients that accumulate ------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("name", [n for n in STRATEGIES if n not in DRAWN])
def test_parts_of_a_batch_are_the_step_of_the_whole(name: str, parts: int) -> None:
    whole, split = (begun(name, alpha=1.0) for _ in range(2))
    x, y = tensors("classification", 1)
    for _ in range(2):
        whole.step(loss_of(whole, (x, y)), (x, y))
        for batch in zip(x.chunk(parts), y.chunk(parts), strict=True):
            split.backward(loss_of(split, batch) / parts, batch)
        split.update()
    pairs = [(p.grad, q.grad) for p, q in zip(whole.model.parameters(), split.model.parameters(), strict=True)]
    assert all(torch.allclose(p, q, atol=1e-5) for p, q in pairs if p is not None and q is not None)
    assert any(p is not None and p.any() for p, _ in pairs)


@every_strategy
def test_a_part_shows_its_batch_like_a_step(name: str) -> None:
    """One part is a step, to the bit."""
    first, second = begun(name), begun(name)
    batch = tensors("classification", 1)
    for _ in range(2):
        first.step(loss_of(first, batch), batch)
        second.backward(loss_of(second, batch), batch)
        second.update()
    assert same_bits(state(first), state(second))


@pytest.mark.parametrize("kind", [LwF, DGR])
def test_what_looks_at_the_batch_sees_all_parts(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    name = kind.__name__.lower()
    ours, seen = begun(name), list[int]()
    inputs = ours.objective.inputs
    monkeypatch.setattr(ours.objective, "inputs", lambda batch: (seen.append(len(batch[0])), inputs(batch))[1])
    x, y = tensors("classification", 1)
    for batch in zip(x.chunk(4), y.chunk(4), strict=True):
        ours.backward(loss_of(ours, batch) / 4, batch)
    ours.update()
    assert seen[-1] == len(x)


# --- losses that are no numbers -----------------------------------------------------------------------------------


@every_strategy
def test_a_loss_that_is_no_number_is_refused_and_nothing_has_changed(name: str) -> None:
    ours = begun(name)
    batch = tensors("classification", 1)
    before = state(ours)
    loss = loss_of(ours, batch)
    for value in (torch.nan, torch.inf):
        with pytest.raises(NonFiniteError, match=f"the loss is {value} at step 1, which is not taken"):
            ours.step(loss * value, batch)
    assert same_bits(before, state(ours))
    ours.step(loss_of(ours, batch), batch)  # and it goes on
    assert not same_bits(before, state(ours))


@every_strategy
def test_a_task_of_no_numbers_leaves_the_learner_able_to_learn(name: str) -> None:
    """Also where numbers end in the middle of the task."""
    ours = make(name)
    ours.learn(tensors("classification", 0))
    x, y = tensors("classification", 1)
    answers = ours.logits(tensors("classification", 0)[0], 0)
    spoiled = x.clone()
    spoiled[40:] = torch.nan
    if name not in ("dgr", "rtf"):  # which refuse such pixels by themselves
        with pytest.raises(NonFiniteError, match="which is not taken"):
            ours.learn((spoiled, y))
    assert all(p.isfinite().all() for p in ours.model.parameters())
    if STRATEGIES[name].masks:
        assert torch.equal(ours.logits(tensors("classification", 0)[0], 0), answers)
    ours.learn((x, y))
    assert all(p.isfinite().all() for p in ours.model.parameters())
    assert ours.score((x, y), 1) > 0.4
    if STRATEGIES[name].masks:
        assert torch.equal(ours.logits(tensors("classification", 0)[0], 0), answers)


@pytest.mark.parametrize(
    ("name", "carry"),
    [(n, carry) for n, row in STRATEGIES.items() for carry in (False, True)
     if not (carry and having(row.kind, "starts anew")) and n != "supsup"],  # whose scores may be of any size
)  # fmt: skip
def test_a_task_that_diverges_leaves_the_learner_as_it_was(name: str, carry: bool) -> None:
    ours, other = make(name, carry=carry), make(name, carry=carry)
    for each in (ours, other):
        each.learn(tensors("classification", 0))
    before, rates = state(ours), [group["lr"] for group in ours.optimizer.param_groups]
    for group in ours.optimizer.param_groups:
        group["lr"] = 1e30
    with pytest.raises(NonFiniteError):
        ours.learn(tensors("classification", 1))
    assert same_bits(before, state(ours))
    for group, rate in zip(ours.optimizer.param_groups, rates, strict=False):
        group["lr"] = rate
    for each in (ours, other):
        each.learn(tensors("classification", 1))
    assert same_bits(state(ours), state(other))


# --- the Fisher information of each objective ---------------------------------------------------------------------


def by_hand(model: nn.Module, x: Tensor, weights: Any) -> dict[str, Tensor]:
    """Mean over inputs of Σ_k weight_k (∂f_k)²."""
    total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for row in x:
        outputs = model(row[None])[0]
        for k, weight in enumerate(weights(outputs.detach())):
            grads = torch.autograd.grad(outputs[k], list(model.parameters()), retain_graph=True)
            for (n, _), g in zip(model.named_parameters(), grads, strict=True):
                total[n] += weight * g.square() / len(x)
    return total


@pytest.mark.parametrize(
    ("objective", "weights"),
    [
        (Regression(), lambda outputs: torch.ones_like(outputs)),
        (MultiLabel(), lambda outputs: torch.sigmoid(outputs) * (1 - torch.sigmoid(outputs))),
    ],
)
def test_information_in_closed_form(objective: Objective, weights: Any) -> None:
    torch.manual_seed(0)
    model, x = network(3), torch.rand(12, 8)
    for y in (torch.zeros(12, 3), model(x).detach()):  # whatever the targets, also those that are met exactly
        found = diagonal_fisher(model, [(x, y)], objective)
        expected = by_hand(model, x, weights)
        assert all(torch.allclose(found[n], expected[n], rtol=1e-4, atol=1e-7) for n in expected)


def test_ewc_of_a_regression_in_an_own_loop_has_importance() -> None:
    ours = EWC(network(1), lambda p: torch.optim.Adam(p, lr=1e-2), objective=Regression())
    x = tensors("regression", 0)[0]
    y = x.sum(1, keepdim=True)
    ours.begin()
    for _ in range(200):
        ours.step(F.mse_loss(ours.model(x), y))
    ours.end((x, y))
    expected = by_hand(ours.model, x, torch.ones_like)
    found = ours.consolidated.importance
    assert all(torch.allclose(found[n], expected[n], rtol=1e-3, atol=1e-6) for n in expected)
    assert float(found["5.weight"].mean()) > 0.01


def test_targets_that_are_no_classes_are_refused_by_the_default_objective() -> None:
    x, y = tensors("regression", 0)
    for targets, message in ((y[:, :1], "say objective=Regression"), (torch.zeros(len(x), dtype=torch.long), "two or")):
        ours = EWC(network(1), lambda p: torch.optim.Adam(p, lr=1e-2))
        ours.begin()
        ours.step(F.mse_loss(ours.model(x), y[:, :1]))
        with pytest.raises(ValueError, match=message):
            ours.end((x, targets))


@pytest.mark.parametrize("objective", ["function", "dictionary", "sliced"])
@pytest.mark.parametrize("labels", ["sampled", "expected", "predicted"])
def test_the_information_of_a_function_is_not_guessed(objective: str, labels: str) -> None:
    for name in ("ewc", "laplace"):
        with pytest.raises(TypeError, match="of Function is not known: .* or say labels='empirical'"):
            make(name, objective, labels=labels)
    ours = make("ewc", objective, labels="empirical")
    ours.learn(data_of(objective, 0))
    assert all(float(each.mean()) > 0 for each in ours.consolidated.importance.values())  # type: ignore[attr-defined]


def test_an_objective_that_never_calls_the_model_says_so() -> None:
    class Inner(Objective):
        def loss(self, model: Any, batch: Any, task: int) -> Tensor:
            return model.get_submodule("0")(batch).square().mean()  # type: ignore[no-any-return]

    ours = MAS(network(2), lambda p: torch.optim.SGD(p, lr=0.1), objective=Inner(), steps=1, batch_size=8)
    with pytest.raises(TypeError, match="Inner does not call the model itself: say in its `outputs`"):
        ours.learn(torch.rand(16, 8))


def test_classes_that_are_told_apart_still_have_the_information_of_their_answers() -> None:
    x, y = tensors("classification", 0)
    found = diagonal_fisher(network(3), [(x, y)], Classification(), labels="expected")
    assert all(float(each.sum()) > 0 for each in found.values())
