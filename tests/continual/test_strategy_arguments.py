"""Arguments and inputs of a learner: what is refused, and inputs of every size."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powerprop.continual import (
    Classification,
    EfficientPackNet,
    Naive,
    PackNet,
    Strategy,
    accuracy_on,
    learn_stream,
    make_task,
)
from tasks import (
    CLASSES,
    FEATURES,
    OPTIMIZERS,
    every_masking,
    every_method,
    learner,
    toy_model,
    toy_task,
)

BAD: list[tuple[type[Strategy], dict[str, Any], str]] = [
    (EfficientPackNet, {"gamma": 1.2}, r"gamma must be in \(0, 1\], got 1\.2"),
    (EfficientPackNet, {"search": "random"}, "search must be .*, got 'random'"),
    (EfficientPackNet, {"grid": (0.1, 0.5)}, r"falling fractions .* got \[0\.1, 0\.5\]"),
    (EfficientPackNet, {"distribution": "erk"}, "distribution must be .*, got 'erk'"),
    (EfficientPackNet, {"retrain_steps": -1}, "retrain_steps must be at least 0, got -1"),
    (EfficientPackNet, {"steps": 0}, "steps must be at least 1, got 0"),
    (EfficientPackNet, {"clip": 0.0}, r"clip must be positive, got 0\.0"),
    (EfficientPackNet, {"batch_size": 0}, "batch_size must be at least 1, got 0"),
    (EfficientPackNet, {"seed": -1}, "seed must be at least 0, got -1"),
    (PackNet, {"total_tasks": 0}, "total_tasks must be at least 1, got 0"),
]


@pytest.mark.parametrize(("kind", "options", "message"), BAD)
def test_bad_arguments(kind: type[Strategy], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(toy_model(), OPTIMIZERS["sgd"], **options)


def test_bad_arguments_of_objectives() -> None:
    with pytest.raises(ValueError, match="labels must be .*, got 'both'"):
        Classification("both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 1\), got 1"):
        Classification(label_smoothing=1.0)
    with pytest.raises(ValueError, match="among must be 'all' or 'seen', got 'some'"):
        Classification("stream", among="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="among='seen' is of outputs that count the classes of the stream"):
        Classification(among="seen")
    with pytest.raises(TypeError, match="objective must be an Objective or a function of .*, got 3"):
        Naive(toy_model(), OPTIMIZERS["sgd"], objective=3)  # type: ignore[arg-type]


def test_an_unknown_task_is_named() -> None:
    ours = learner()
    x = toy_task(0).test().x
    with pytest.raises(ValueError, match="task must be learned first: none is yet, got 0"):
        ours.predict(x, 0)
    ours.learn(toy_task(0))
    with pytest.raises(ValueError, match=r"task must be in 0\.\.0 .*got 3"):
        ours.predict(x, 3)


@every_masking
def test_arguments_of_predict_are_checked_with_and_without_a_task(method: str) -> None:
    ours = learner(method, steps=2)
    ours.learn(toy_task(0))
    x = toy_task(0).test().x
    for task in (None, 0):
        with pytest.raises(ValueError, match="method must be one of .*, got 'magic'"):
            ours.predict(x, task, method="magic")
        with pytest.raises(ValueError, match="group must be at least 1, got -1"):
            ours.predict(x, task, group=-1)
        with pytest.raises(ValueError, match="candidates must be at least 1, got 0"):
            ours.predict(x, task, candidates=0)
        for value in (0.0, 7.0):
            with pytest.raises(ValueError, match=rf"unknown must be in \(0, 1\), a rate of false alarms, got {value}"):
                ours.predict(x, task, unknown=value)
            with pytest.raises(ValueError, match=rf"unsure must be in \(0, 1\], .*, got {value}"):
                ours.predict(x, task, unsure=value)


@pytest.mark.parametrize("labels", ["task", "stream"])
@every_method
def test_no_inputs_get_no_answers(method: str, labels: str) -> None:
    ours = learner(method, model=toy_model(outputs=2 * CLASSES), labels=labels, steps=20)
    ours.learn(toy_task(0))
    x = toy_task(0).test().x[:0]
    for found in (ours.predict(x), ours.predict(x, 0)):
        assert [tuple(column.shape) for column in found] == [(0,)] * 4
        assert found.label.dtype == found.task.dtype == torch.long
    if method != "naive":
        assert len(ours.predict(x, unknown=0.5, group=4).task) == 0


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


@every_method
def test_a_task_is_called_by_its_index_and_learned_once(method: str) -> None:
    ours = learner(method, steps=2)
    ours.learn(toy_task(5))
    with pytest.raises(ValueError, match=r"toy 5: 5 was learned already \(5 was\)"):
        ours.learn(toy_task(5))
    ours.learn(toy_task(0))
    assert ours.ids == [5, 0]
    with pytest.raises(ValueError, match=r"task must be one of 5, 0 \(the tasks learned so far\), got 1"):
        ours.predict(toy_task(0).test().x, 1)


class AnySize(nn.Module):
    """Images of any size, pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.conv(x)).mean((2, 3)))


def images(size: int, index: int) -> Any:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(64, 1, size, size, generator=generator) + torch.arange(64)[:, None, None, None] % 2
    return make_task((x, torch.arange(64) % 2), index=index)


def test_inputs_of_different_sizes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ours, again = (learner(model=AnySize(), steps=20) for _ in range(2))
    for t, size in enumerate((8, 12, 8)):
        ours.learn(images(size, t))
    ours.save(tmp_path / "l")
    again.load(tmp_path / "l")
    for each in (ours, again):
        assert (each.predict(images(12, 1).test().x, group=None).task == 1).all()
        assert set(each.predict(images(8, 0).test().x).task.tolist()) <= {0, 2}
        strange = images(9, 0).train().x[:5]  # no task has such inputs: the surest sub-network answers
        assert torch.equal(each.predict(strange).task, each.predict(strange, method="exhaustive").task)


def test_inputs_of_one_number_each() -> None:
    torch.manual_seed(0)
    ours = learner(model=nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, CLASSES)), steps=10)
    for t in range(2):
        x = torch.arange(60) % 10 + 10 * t
        ours.learn(make_task((x, x % 3), index=t))
    assert (ours.predict(torch.arange(10), group=None).task == 0).all()


def test_an_optimizer_that_asks_for_a_closure_is_refused() -> None:
    with pytest.raises(TypeError, match="one gradient, but LBFGS asks for a closure"):
        Strategy(toy_model(), torch.optim.LBFGS)


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


def test_arguments_of_predict_are_checked_before_training() -> None:
    for method, message in (("epn", "unexpected keyword argument 'checkpont'"), ("naive", "got also checkpont")):
        ours = learner(method)
        with pytest.raises(TypeError, match=message):
            learn_stream(ours, [toy_task(0)], checkpont="x")
        assert not ours.tasks
    with pytest.raises(ValueError, match="group must be .*, got 0"):
        learn_stream(learner(), [toy_task(0)], group=0)


def test_forward_transfer_without_outputs_for_it_is_refused() -> None:
    ours = learner("naive", labels="stream", model=toy_model(outputs=6))
    with pytest.raises(ValueError, match="a task has no classes among the outputs before it is learned"):
        learn_stream(ours, [toy_task(0), toy_task(1)], future=True)


def test_class_incremental_needs_classes_of_its_own_for_each_task() -> None:
    x, y = torch.randn(20, FEATURES), torch.arange(20) % 2
    stream = [make_task((x, y), index=i) for i in range(2)]
    message = r"classes that no two tasks share, got \[0, 1\] more than once"
    ours = learner(steps=1)
    with pytest.raises(ValueError, match=message):
        learn_stream(ours, stream, ("class-incremental",))
    assert len(ours.tasks) == 1
    ours.learn(stream[1])
    with pytest.raises(ValueError, match=message):
        accuracy_on(ours, stream[0], "class-incremental")
    for classes in ((4, 4), (-1, -2)):
        with pytest.raises(ValueError, match=rf"classes must be different numbers from 0 on, got \({classes[0]}, "):
            make_task((x, y), classes=classes)
