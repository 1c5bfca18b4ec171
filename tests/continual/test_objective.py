"""Objectives: losses and answers by hand, the Fisher information of each, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop.continual import (
    EWC,
    MAS,
    Classification,
    MultiLabel,
    Naive,
    Objective,
    OneVsRest,
    Regression,
    diagonal_fisher,
)
from strategies import OPTIMIZERS, data_of, make, network, tensors


def empty(count: int) -> Tensor:
    return torch.zeros(count, 1)


def test_a_class_is_told_from_those_that_were_seen() -> None:
    """Cross-entropy by hand among the classes 4, 0 | 2, wherever they stand; other outputs get no gradient."""
    objective, outputs = Classification("stream", among="seen"), torch.arange(18.0).sin().view(3, 6).requires_grad_()
    objective.begin(0, (4, 0))
    y, tasks = torch.tensor([0, 1, 0]), torch.tensor([0, 0, 1])
    objective.loss(lambda x: outputs, (empty(3), y), 0).backward()
    assert outputs.grad.ne(0).any(0).tolist() == [True, False, False, False, True, False]
    objective.begin(1, (2,))
    loss = objective.loss(lambda x: outputs, (empty(3), y), tasks)
    columns = outputs[:, [0, 2, 4]].log_softmax(1)
    assert float(loss.detach()) == pytest.approx(float(-columns[[0, 1, 2], [2, 0, 1]].mean().detach()))
    assert objective.score(lambda x: torch.eye(6)[[4, 0]], [(empty(2), torch.tensor([0, 1]))], 0) == 1.0


def test_one_versus_rest_by_hand() -> None:
    """Outputs of other tasks are left alone."""
    objective, logits = OneVsRest("stream"), torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.0, -1.0]])
    objective.begin(0, (2, 0))
    found = objective.loss(lambda x: logits, (empty(2), torch.tensor([1, 0])), 0)
    # rows: class 0 is it, 2 is not; class 2 is it (softplus(1)), 0 is not (softplus(1))
    by_hand = [F.softplus(torch.tensor(each)) for each in (2.0, -0.5, 1.0, 1.0)]
    assert torch.allclose(found, torch.stack(by_hand).sum() / 2)
    with pytest.raises(ValueError, match=r"expects labels that are integers \(N,\), got torch.float32 \(2,\)"):
        objective.loss(lambda x: logits, (empty(2), torch.zeros(2)), 0)


def test_a_loss_of_ones_own_gets_batches_of_one_task() -> None:
    class Own(Classification):
        def loss(self, model: Any, batch: tuple[Tensor, Tensor], task: Any) -> Tensor:
            return super().loss(model, batch, task)

    assert Classification.mixes_tasks
    assert not Own.mixes_tasks


# --- the Fisher information ---------------------------------------------------------------------------------------


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
        found, expected = diagonal_fisher(model, [(x, y)], objective), by_hand(model, x, weights)
        assert all(torch.allclose(found[n], expected[n], rtol=1e-4, atol=1e-7) for n in expected)


def test_the_information_of_one_versus_rest_is_that_of_its_sigmoids() -> None:
    """One layer: E x² Σ p (1 - p), of each output for itself."""
    layer, x = nn.Linear(2, 3, bias=False), torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
    found = diagonal_fisher(layer, [(x, torch.zeros(16).long())], OneVsRest())["weight"]
    p = layer(x).sigmoid().detach()
    assert torch.allclose(found, (p * (1 - p)).T @ x.square() / 16, atol=1e-6)


def test_classes_that_are_told_apart_still_have_the_information_of_their_answers() -> None:
    found = diagonal_fisher(network(3), [tensors("classification", 0)], Classification(), labels="expected")
    assert all(float(each.sum()) > 0 for each in found.values())


def test_ewc_of_a_regression_in_an_own_loop_has_importance() -> None:
    ours = EWC(network(1), OPTIMIZERS["adam"], objective=Regression())
    x = tensors("regression", 0)[0]
    y = x.sum(1, keepdim=True)
    ours.begin()
    for _ in range(60):
        ours.step(F.mse_loss(ours.model(x), y))
    ours.end((x, y))
    expected, found = by_hand(ours.model, x, torch.ones_like), ours.consolidated.importance
    assert all(torch.allclose(found[n], expected[n], rtol=1e-3, atol=1e-6) for n in expected)
    assert float(found["5.weight"].mean()) > 0.01


@pytest.mark.parametrize("objective", ["function", "dictionary", "sliced"])
def test_the_information_of_a_function_is_not_guessed(objective: str) -> None:
    for name in ("ewc", "laplace"):
        for labels in ("sampled", "expected", "predicted"):
            with pytest.raises(TypeError, match="of Function is not known: .* or say labels='empirical'"):
                make(name, objective, labels=labels)
    ours = make("ewc", objective, labels="empirical")
    ours.learn(data_of(objective, 0))
    assert all(float(each.mean()) > 0 for each in ours.consolidated.importance.values())


# --- what is refused ----------------------------------------------------------------------------------------------


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="labels must be .*, got 'both'"):
        Classification("both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 1\), got 1"):
        Classification(label_smoothing=1.0)
    with pytest.raises(ValueError, match="among must be 'all' or 'seen', got 'some'"):
        Classification("stream", among="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="among='seen' is of outputs that count the classes of the stream"):
        Classification(among="seen")
    with pytest.raises(TypeError, match="objective must be an Objective or a function of .*, got 3"):
        Naive(network(3), OPTIMIZERS["sgd"], objective=3)  # type: ignore[arg-type]


def test_labels_of_the_stream_need_classes() -> None:
    ours = Naive(network(6), OPTIMIZERS["sgd"], objective=Classification("stream"))
    with pytest.raises(ValueError, match="labels='stream' needs the classes of task 0"):
        ours.begin(0)
    ours.begin(0, classes=(0, 1, 2))


def test_targets_that_are_no_classes_are_refused_by_the_default_objective() -> None:
    x, y = tensors("regression", 0)
    for targets, message in ((y[:, :1], "say objective=Regression"), (torch.zeros(len(x), dtype=torch.long), "two or")):
        ours = EWC(network(1), OPTIMIZERS["adam"])
        ours.begin()
        ours.step(F.mse_loss(ours.model(x), y[:, :1]))
        with pytest.raises(ValueError, match=message):
            ours.end((x, targets))


def test_an_objective_that_never_calls_the_model_says_so() -> None:
    class Inner(Objective):
        def loss(self, model: Any, batch: Any, task: int) -> Tensor:
            return model.get_submodule("0")(batch).square().mean()  # type: ignore[no-any-return]

    ours = MAS(network(2), OPTIMIZERS["sgd"], objective=Inner(), steps=1, batch_size=8)
    with pytest.raises(TypeError, match="Inner does not call the model itself: say in its `outputs`"):
        ours.learn(torch.rand(16, 8))
