"""The loop: data of any kind, steps, heads that come later, tasks by their names, and what a learner refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from powerprop import Powerprop
from powerprop.continual import (
    DER,
    ER,
    EWC,
    HAT,
    DERpp,
    EfficientPackNet,
    Naive,
    Strategy,
    combine,
    learn_stream,
    load_learner,
)
from powerprop.continual.strategy import KINDS
from powerprop_paper.models import mlp
from strategies import STRATEGIES, make, network, same_bits, state, tensors
from tasks import CLASSES, FEATURES, learner, toy_model, toy_task

pytestmark = pytest.mark.filterwarnings("ignore:.*for the tasks to come", "ignore:.*sub-network")
AGAIN = ("naive", "er", "er-online", "der", "der++", "ewc", "laplace", "mas", "si")
"""Methods that learn a task again."""


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.3)


# --- data ------------------------------------------------------------------------------------------------------------


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """A data set that hands out one row at a time."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row], self.y[row]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Rows that come by themselves, whose number nobody knows."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return (self.rows[i] for i in range(len(self.rows)))


@pytest.mark.parametrize("kind", ["tensors", "dataset", "iterable", "loader"])
def test_learn_takes_data_of_any_kind(kind: str) -> None:
    ours = learner(steps=60)
    for task in range(2):
        x, y = toy_task(task).train()
        rows = Rows(x, y)
        data = {"tensors": (x, y), "dataset": rows, "iterable": Stream(rows), "loader": DataLoader(rows, 32)}[kind]
        ours.learn(data)
    x, y = toy_task(0).test()
    assert (ours.predict(x, 0).label == y).double().mean() > 0.8
    assert (ours.predict(x, group=None).task == 0).all()


def test_epochs_go_through_all_the_data() -> None:
    seen: list[int] = []
    ours = Naive(
        toy_model(), sgd, objective=lambda model, batch, task: seen.append(len(batch[0])) or model(batch[0]).mean()
    )  # type: ignore[func-returns-value]
    x, y = toy_task(0).train()
    ours.learn(DataLoader(TensorDataset(x, y), 100), epochs=2)
    assert seen == [100, 100, 56] * 2
    with pytest.raises(TypeError, match="say how many steps, not epochs"):
        ours.learn(Stream(Rows(x, y)), epochs=1)


@pytest.mark.parametrize(
    ("data", "message"),
    [(3, "got int"), (iter([1]), "got list_iterator"), ((torch.ones(3), torch.ones(2)), r"\[3, 2\]")],
)
def test_data_that_cannot_be_learned_is_refused(data: Any, message: str) -> None:
    ours = learner()
    with pytest.raises((TypeError, ValueError), match=message):
        ours.learn(data)
    assert ours.current == 0
    ours.learn(toy_task(0))


def test_a_method_that_needs_the_data_says_so() -> None:
    ours = make("ewc")
    x, y = tensors("classification", 0)
    ours.begin(0)
    ours.step(nn.functional.cross_entropy(ours.model(x), y))
    with pytest.raises(ValueError, match=r"EWC looks at the data of a task when it ends: say end\(loader\)"):
        ours.end()
    ours.end((x, y))
    assert ours.current == 1


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["naive", "ewc", "efficient-packnet"])
def test_a_gradient_scaler_changes_nothing_but_rounding(name: str) -> None:
    plain, scaled = make(name, "regression"), make(name, "regression")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    data = tensors("regression", 0)
    for each, tool in ((plain, None), (scaled, scaler)):
        each.begin(0)
        for _ in range(5):
            each.step(each.objective.loss(each.model, data, 0), data, tool)
        each.end(data)
    first, second = state(plain), state(scaled)
    assert all(torch.allclose(first[n], second[n], atol=1e-5) for n in first)


def test_an_optimiser_or_a_powerprop_serves_as_well_as_a_factory() -> None:
    made = []
    for kind in ("factory", "optimizer", "powerprop"):
        model = toy_model()
        base = torch.optim.SGD(model.parameters(), lr=0.3)
        given: Any = sgd if kind == "factory" else base if kind == "optimizer" else Powerprop(base, model, 1.5)
        ours = Naive(model, given, steps=20, alpha=None if kind == "powerprop" else 1.5)
        ours.learn(toy_task(0))
        made.append(state(ours))
    assert same_bits(made[0], made[1])
    assert same_bits(made[0], made[2])
    with pytest.raises(TypeError, match="alpha, where and rate belong to the Powerprop"):
        Naive(model, Powerprop(torch.optim.SGD(model.parameters(), lr=0.3), model, 1.5), alpha=2.0)


def test_an_optimiser_serves_one_learner() -> None:
    model = network(3)
    base = sgd(list(model.parameters()))
    first = ER(model, base)
    for taken in (base, first.optimizer):
        with pytest.raises(ValueError, match="this optimiser belongs to a learner already"):
            EWC(model, taken)
    first.learn(tensors("classification", 0))


def test_an_optimizer_that_asks_for_a_closure_is_refused() -> None:
    with pytest.raises(TypeError, match="one gradient, but LBFGS asks for a closure"):
        Strategy(toy_model(), torch.optim.LBFGS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"clip": 0.0}, r"clip must be positive, got 0\.0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Naive(toy_model(), sgd, **options)


# --- heads and tasks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Naive, EfficientPackNet])
def test_heads_are_added_while_learning(kind: type[Strategy], tmp_path: Path) -> None:
    model = mlp([FEATURES, 24, CLASSES], heads=1, generator=torch.Generator().manual_seed(0))
    ours = kind(model, sgd, heads="heads", steps=60, alpha=1.5)
    for t in range(3):
        ours.learn(toy_task(t))
    assert sorted(name for name, _ in model.heads.named_children()) == ["0", "1", "2"]
    x, y = toy_task(2).test()
    assert (ours.predict(x, 2).label == y).double().mean() > 0.8
    ours.save(tmp_path / "l")
    again = load_learner(tmp_path / "l", mlp([FEATURES, 24, CLASSES], heads=1))
    assert torch.equal(again.logits(x, 2), ours.logits(x, 2))


def test_without_the_task_all_heads_are_asked() -> None:
    ours = learner("naive", head_count=3, steps=80)
    for t in range(3):
        ours.learn(toy_task(t))
    x = toy_task(2).test().x
    found = ours.predict(x)
    logits = torch.cat([ours.logits(x, t) for t in range(3)], 1)
    assert torch.equal(found.number, logits.argmax(1))
    assert torch.equal(found.task, logits.argmax(1) // CLASSES)


class Shifted(nn.Module):
    """Takes the task without having heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.shift = toy_model(), nn.Embedding(4, FEATURES)

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.body(x + self.shift.weight[task])  # type: ignore[no-any-return]


def test_a_model_may_take_the_task_without_heads() -> None:
    ours = learner(model=Shifted(), takes_task=True, steps=60)
    for t in range(2):
        ours.learn(toy_task(t))
    x, y = toy_task(1).test()
    assert (ours.predict(x, 1).label == y).double().mean() > 0.8


def test_clipping_does_not_depend_on_heads_that_are_not_there_yet() -> None:
    few, many = (learner("naive", head_count=heads, clip=0.1, steps=20, model=None) for heads in (2, 40))
    for each in (few, many):
        each.learn(toy_task(0))
    assert torch.allclose(few.model.fc1.weight, many.model.fc1.weight, atol=1e-6)


class ListedHeads(nn.Module):
    """A list of heads, which cannot add one by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(FEATURES, 8), nn.ModuleList([nn.Linear(8, CLASSES)])

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.out[task](torch.relu(self.fc(x)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"model": toy_model(outputs=2)},
            r"labels='task' needs 3 outputs for its classes \(0, 1, 2\), the model has 2",
        ),
        ({"labels": "stream"}, r"labels='stream' needs 6 outputs for its classes \(3, 4, 5\), the model has 3"),
        (
            {"model": ListedHeads(), "heads": "out"},
            "toy 1: 'out' has no head '1', it has 0; add one",
        ),
    ],
)
def test_a_network_with_too_few_outputs_is_named(options: dict[str, Any], message: str) -> None:
    ours = learner("naive", steps=1, **options)
    with pytest.raises(ValueError, match=message):
        learn_stream(ours, [toy_task(0), toy_task(1)])


def test_methods_that_hold_nothing_learn_with_a_new_layer() -> None:
    ours = Naive(network(3), sgd, steps=30, batch_size=16)
    ours.learn(tensors("classification", 0))
    ours.model[5] = layer = nn.Linear(16, 3)
    before = layer.weight.detach().clone()
    ours.learn(tensors("classification", 1))
    assert not torch.equal(layer.weight, before)


# --- what tasks are called -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", ["task", "stream"])
def test_the_naive_learner_names_the_tasks_it_knows(labels: str) -> None:
    ours = learner("naive", model=toy_model(outputs=2 * CLASSES), labels=labels, steps=110)
    x = toy_task(0).test().x
    for task in (None, 0):
        with pytest.raises(ValueError, match=f"task must be learned first: none is yet, got {task}"):
            ours.predict(x, task)
    asked = []
    ours.learn(toy_task(0), lambda phase, step, loss: asked.append(ours.predict(x, 0).label))
    assert asked
    with pytest.raises(ValueError, match=r"task must be in 0\.\.0 .*, got -1"):
        ours.predict(x, -1)
    if labels == "stream":
        with pytest.raises(ValueError, match=r"task must be in 0\.\.0 .*, got 1"):
            ours.predict(x, 1)
    else:  # forward transfer
        assert (ours.predict(x, 1).task == 1).all()


def test_a_task_is_called_by_its_index_and_learned_once() -> None:
    ours = learner(steps=2)
    ours.learn(toy_task(5))
    with pytest.raises(ValueError, match=r"toy 5: 5 was learned already \(5 was\)"):
        ours.learn(toy_task(5))
    ours.learn(toy_task(0))
    assert ours.ids == [5, 0]
    with pytest.raises(ValueError, match=r"task must be one of 5, 0 \(the tasks learned so far\), got 1"):
        ours.predict(toy_task(0).test().x, 1)


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


def test_a_method_from_outside_is_made_again_and_takes_no_name_from_the_library(tmp_path: Path) -> None:
    def defined(name: str) -> Any:
        return type(name, (EWC,), {})

    first, second = defined("Mine"), defined("Mine")
    for kind in (second, combine(ER, EWC)):
        kind(network(3), sgd, steps=2).save(tmp_path / kind.__name__)
    assert type(load_learner(tmp_path / "Mine", network(3))) is second is not first
    with pytest.raises(ValueError, match="ERWithEWC, not one of .*: make the learner yourself"):
        load_learner(tmp_path / "ERWithEWC", network(3))
    assert defined("Naive") is not KINDS["Naive"] is Naive
