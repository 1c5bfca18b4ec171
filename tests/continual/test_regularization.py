"""One quadratic penalty, four importances: computed by hand on a network of two weights, y = w·x."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powerprop.continual import EWC, MAS, SI, Laplace, Regression, combine
from powerprop.continual.regularization import Importances, Quadratic
from strategies import make, tensors
from tasks import toy_model, toy_task

KINDS: dict[str, type[Quadratic]] = {"EWC": EWC, "Laplace": Laplace, "MAS": MAS, "SI": SI}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
RATE = 0.125


def line() -> nn.Linear:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -0.5]]))
    return model


def learner(kind: type[Quadratic], **options: Any) -> Any:
    return kind(line(), lambda p: torch.optim.SGD(p, lr=RATE), objective=Regression(), **options)


X = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
Y = torch.tensor([[0.5], [1.0]])


def step(ours: Any, x: Tensor = X, y: Tensor = Y) -> None:
    ours.step(ours.objective.loss(ours.model, (x, y), 0))


def weight(ours: Any) -> Tensor:
    return ours.model.weight.detach().clone()


# --- importances ------------------------------------------------------------------------------------------------


def test_ewc_with_the_labels_of_the_data_is_the_squared_gradient_of_every_input() -> None:
    """Input 0: 2(w₀ - ½) to w₀. Input 1: 2(2w₁ - 1)·2 to w₁. Each counts half."""
    ours = learner(EWC, labels="empirical")
    ours.begin(0)
    ours.end((X, Y))
    w = weight(ours)[0]
    wanted = torch.stack([(2 * (w[0] - 0.5)).square() / 2, (4 * (2 * w[1] - 1)).square() / 2])
    torch.testing.assert_close(ours.consolidated.importance["weight"][0], wanted)
    assert torch.equal(ours.consolidated.anchor["weight"], weight(ours))


@pytest.mark.parametrize("kind", [EWC, Laplace])
def test_damping_adds_a_part_of_the_mean_information(kind: type[Quadratic]) -> None:
    """A weight whose output is always right has none of its own, and is held all the same."""
    x, y = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[0.5], [-1.0]])  # the second as the network says it
    plain, damped = (learner(kind, labels="empirical", damping=damping) for damping in (0.0, 0.5))
    for ours in (plain, damped):
        ours.begin(0)
        ours.end((x, y))
    first = (2 * (1.0 - 0.5)) ** 2 / 2
    assert plain.consolidated.importance["weight"].tolist() == [[first, 0.0]]
    assert damped.consolidated.importance["weight"].tolist() == [[first * 1.25, first * 0.25]]


@pytest.mark.parametrize("damping", [-0.1, float("nan"), float("inf")])
def test_damping_that_cannot_be_is_refused(damping: float) -> None:
    with pytest.raises(ValueError, match=f"damping must be a number of at least 0, got {damping}"):
        learner(EWC, damping=damping)


def test_mas_is_the_gradient_of_the_squared_output() -> None:
    """∂(w₀)²/∂w₀ = 2w₀ and ∂(2w₁)²/∂w₁ = 8w₁, half of each; targets play no part, and tasks add up."""
    ours = learner(MAS)
    for task in range(2):
        ours.begin(task)
        ours.end((X, Y * 1000))
        wanted = (task + 1) * torch.tensor([[abs(1.0), abs(4 * -0.5)]])
        torch.testing.assert_close(ours.consolidated.importance["weight"], wanted)


def test_si_is_the_fall_of_the_loss_per_squared_distance() -> None:
    """Of the gradients of the task alone: the penalty of the task before has no part in ω."""
    ours = learner(SI, strength=3.0, xi=0.25)
    wanted = torch.zeros(1, 2)
    for task in range(2):
        ours.begin(task)
        start, path = weight(ours), torch.zeros(1, 2)
        for _ in range(3):
            before = weight(ours)
            gradient = torch.autograd.grad(ours.objective.loss(ours.model, (X, Y + task), 0), ours.model.weight)[0]
            step(ours, X, Y + task)
            path -= gradient * (weight(ours) - before)
        ours.end()
        wanted += path.clamp(min=0) / ((weight(ours) - start).square() + 0.25)
        torch.testing.assert_close(ours.consolidated.importance["weight"], wanted)
    assert float(wanted.min()) > 0


# --- the penalty ------------------------------------------------------------------------------------------------


@every_kind
def test_a_step_goes_down_the_loss_and_the_penalty(kind: type[Quadratic]) -> None:
    ours = learner(kind, strength=0.5)
    ours.begin(0)
    step(ours)
    ours.end((X, Y))
    ours.begin(1)
    for _ in range(2):
        before = weight(ours)
        loss = torch.autograd.grad(ours.objective.loss(ours.model, (X, -Y), 0), ours.model.weight)[0]
        pull = 0.5 * ours.consolidated.importance["weight"] * (before - ours.consolidated.anchor["weight"])
        step(ours, X, -Y)
        torch.testing.assert_close(weight(ours), before - RATE * (loss + pull))


def test_ewc_holds_every_task_at_its_own_weights() -> None:
    """Two numbers per weight have the gradient of one penalty per task."""
    ours, kept = learner(EWC), []
    for task in range(3):
        ours.begin(task)
        step(ours, X, Y + 2 * task)
        ours.end((X, Y + 2 * task))
        before = sum(fisher for fisher, _ in kept) if kept else 0
        kept.append((ours.consolidated.importance["weight"] - before, weight(ours)))
    place = torch.tensor([[3.0, 7.0]])
    wanted = sum(fisher * (place - at) for fisher, at in kept)
    torch.testing.assert_close(
        ours.consolidated.importance["weight"] * (place - ours.consolidated.anchor["weight"]), wanted
    )


def test_laplace_fades_and_holds_at_the_latest_weights() -> None:
    ours = learner(Laplace, decay=0.25)
    ours.begin(0)
    ours.end((X, Y))
    first = ours.consolidated.importance["weight"].clone()
    ours.begin(1)
    step(ours)
    ours.end((X, Y))
    fresh = learner(Laplace)
    with torch.no_grad():
        fresh.model.weight.copy_(weight(ours))
    fresh.begin(0)
    fresh.end((X, Y))
    torch.testing.assert_close(
        ours.consolidated.importance["weight"], 0.25 * first + fresh.consolidated.importance["weight"]
    )
    assert torch.equal(ours.consolidated.anchor["weight"], weight(ours))


def test_weights_without_importance_are_free() -> None:
    held = Importances()
    held.importance, held.anchor = {"w": torch.tensor([0.0, 2.0])}, {"w": torch.tensor([5.0, 1.0])}
    w = nn.Parameter(torch.tensor([1.0, 4.0]))
    assert held.distance({"w": w}) is None  # the loss does not use it
    w.grad = torch.zeros(2)
    assert held.distance({"w": w}).item() == 2 * 3**2  # type: ignore[union-attr]


@every_kind
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_answers_to_the_first_task_move_less(kind: type[Quadratic], alpha: float) -> None:
    """With any α, answers to the first task move less: the penalty reaches φ as the loss does."""
    moved, x = [], toy_task(0).test().x
    for strength in (0.0, 1e5):
        ours = kind(
            toy_model(), lambda p: torch.optim.Adam(p, lr=2e-3), strength=strength, alpha=alpha, steps=60, batch_size=32
        )
        ours.learn(toy_task(0))
        before = ours.logits(x, 0)
        ours.learn(toy_task(1))
        moved.append(float((ours.logits(x, 0) - before).square().mean()))
    assert moved[1] < 0.3 * moved[0]


@every_kind
def test_heads_of_other_tasks_stay_as_they_are(kind: type[Quadratic]) -> None:
    """Weight decay moves what has a gradient, be it zero: heads that the loss does not use must have none."""
    ours = kind(
        toy_model(heads=2), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), heads="heads", strength=1.0,
        steps=5, batch_size=32,
    )  # fmt: skip
    ours.learn(toy_task(0))
    before = [p.detach().clone() for p in ours.model.get_submodule("heads.0").parameters()]
    ours.learn(toy_task(1))
    after = list(ours.model.get_submodule("heads.0").parameters())
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


# --- what is kept, and what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ewc", "laplace", "mas", "si"])
def test_keeps_two_numbers_per_weight_however_many_tasks(name: str) -> None:
    ours = make(name)
    assert ours.memory_bytes() == 0
    for task in range(3):
        ours.learn(tensors("classification", task))
        assert ours.memory_bytes() == 2 * 4 * sum(p.numel() for p in ours.model.parameters())


@pytest.mark.parametrize("kind", [EWC, Laplace, MAS])
def test_importances_need_the_data(kind: type[Quadratic]) -> None:
    ours = learner(kind)
    ours.begin(0)
    with pytest.raises(ValueError, match=rf"{kind.__name__} looks at the data of a task when it ends: say end\(load"):
        ours.end()


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: learner(EWC, strength=-1.0), "strength must be at least 0, got -1.0"),
        (lambda: learner(EWC, labels="true"), "labels must be one of sampled, .*, got 'true'"),
        (lambda: learner(Laplace, decay=1.5), r"decay must be in \[0, 1\], got 1.5"),
        (lambda: learner(SI, xi=0.0), "xi must be positive, got 0.0"),
    ],
)
def test_wrong_arguments(make_it: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_it()


def test_two_importances_do_not_go_together() -> None:
    with pytest.raises(TypeError, match="EWC and SI both have importances, and a learner can have one only"):
        combine(EWC, SI)
