"""Streams of tasks: what is learned, evaluated and gone on with, and measures by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from powerprop.continual import Accuracies, accuracy_on, learn_stream, make_task
from tasks import CLASSES, FEATURES, learner, toy_model, toy_task


def test_metrics_by_hand() -> None:
    found = Accuracies("task-incremental", [[0.9, 0.2, 0.3], [0.7, 0.8, 0.4], [0.6, 0.9, 1.0]])
    assert found.average() == pytest.approx((0.6 + 0.9 + 1.0) / 3)
    assert found.average(after=1) == pytest.approx(0.75)
    assert found.backward_transfer() == pytest.approx(((0.6 - 0.9) + (0.9 - 0.8)) / 2)
    assert found.forgetting() == pytest.approx(((0.9 - 0.6) + (0.8 - 0.9)) / 2)
    assert found.forward_transfer([0.1, 0.1, 0.1]) == pytest.approx(((0.2 - 0.1) + (0.4 - 0.1)) / 2)
    assert found.summary()["scenario"] == "task-incremental"
    with pytest.raises(ValueError, match="every task evaluated before"):
        Accuracies("task-incremental", [[0.5], [0.5, 0.5]]).forward_transfer([0.1, 0.1])
    with pytest.raises(ValueError, match="this needs 2 or more learned tasks, got 1"):
        Accuracies("task-incremental", [[0.5]]).forgetting()
    with pytest.raises(ValueError, match="scenario must be one of .*, got 'blind'"):
        Accuracies("blind")  # type: ignore[arg-type]


def test_naive_fine_tuning_forgets() -> None:
    ours = learner("naive", steps=120)
    found = learn_stream(ours, [toy_task(t) for t in range(3)])["task-incremental"]
    assert found.forgetting() > 0.1
    assert found.backward_transfer() < -0.1


def test_labels_of_the_whole_stream() -> None:
    ours = learner(model=toy_model(outputs=2 * CLASSES), labels="stream", steps=120)
    for t in range(2):
        ours.learn(toy_task(t))
        assert accuracy_on(ours, toy_task(t), "task-incremental") > 0.9
    found = ours.predict(toy_task(1).test().x, 1)
    assert int(found.label.max()) < CLASSES
    assert accuracy_on(ours, toy_task(1), "class-incremental") > 0.9
    naive = learner("naive", model=toy_model(outputs=2 * CLASSES), labels="stream", steps=120)
    for t in range(2):
        naive.learn(toy_task(t))
    assert accuracy_on(naive, toy_task(1), "class-incremental") > 0.9


def test_a_stream_stopped_and_started_again(tmp_path: Path) -> None:
    stream = [toy_task(t) for t in range(3)]
    scenarios = ("task-incremental", "class-incremental")
    whole = learn_stream(learner(), stream, scenarios)
    heard: list[str] = []
    learn_stream(learner(), stream[:2], scenarios, checkpoint=tmp_path / "l", after_task=lambda t: heard.append(t.name))
    again = learn_stream(
        learner(), stream, scenarios, checkpoint=tmp_path / "l", after_task=lambda t: heard.append(t.name)
    )
    assert heard == ["toy 0", "toy 1", "toy 2"]
    assert whole == again
    assert [len(row) for row in whole["task-incremental"].rows] == [1, 2, 3]
    assert whole["task-incremental"].forgetting() == 0
    assert whole["class-incremental"].scenario == "class-incremental"


def test_the_place_in_the_stream_is_the_index() -> None:
    numbered = [toy_task(t) for t in range(3)]
    ours, same, heard = learner(), learner(), []
    found = learn_stream(
        ours, [replace(task, index=0) for task in numbered], after_task=lambda t: heard.append(t.index)
    )
    assert found == learn_stream(same, numbered)
    assert found["task-incremental"].average() > 0.9
    assert heard == [0, 1, 2]


def test_a_stream_after_tasks_that_were_learned_before() -> None:
    stream = [toy_task(t) for t in range(3)]
    ours = learner()
    ours.learn(stream[0])
    with pytest.raises(ValueError, match="the learner knows 1 tasks and has 0 rows of task-incremental accuracies"):
        learn_stream(ours, stream)
    assert learn_stream(ours, stream, ()) == {}
    assert ours.current == 3
    with pytest.raises(ValueError, match="the learner knows 3 tasks, the stream has 2"):
        learn_stream(ours, stream[:2], ())


def test_a_stream_resumed_with_other_scenarios(tmp_path: Path) -> None:
    stream = [toy_task(t) for t in range(2)]
    learn_stream(learner(), stream[:1], ("task-incremental",), checkpoint=tmp_path / "l")
    message = "scenarios must be task-incremental, in which the learner's tasks were evaluated, got class-incremental"
    with pytest.raises(ValueError, match=message):
        learn_stream(learner(), stream, ("class-incremental",), checkpoint=tmp_path / "l")


# --- forward transfer ------------------------------------------------------------------------------------------------


def test_forward_transfer_of_the_naive_learner() -> None:
    stream = [toy_task(t) for t in range(2)]
    found = learn_stream(learner("naive"), stream, future=True)["task-incremental"]
    assert isinstance(found.forward_transfer([1 / 3, 1 / 3]), float)


def test_forward_transfer_without_outputs_for_it_is_refused() -> None:
    ours = learner("naive", labels="stream", model=toy_model(outputs=6))
    with pytest.raises(ValueError, match="a task has no classes among the outputs before it is learned"):
        learn_stream(ours, [toy_task(0), toy_task(1)], future=True)


@pytest.mark.parametrize("method", ["epn", "packnet"])
def test_a_task_has_no_subnetwork_before_it_is_learned(method: str) -> None:
    stream, ours = [toy_task(t) for t in range(2)], learner(method)
    with pytest.raises(ValueError, match="no sub-network before it is learned.* got task-incremental, domain-incr"):
        learn_stream(ours, stream, ("task-incremental", "domain-incremental"), future=True)
    assert ours.current == 0
    found = learn_stream(ours, stream, ("domain-incremental",), future=True)["domain-incremental"]
    assert [len(row) for row in found.rows] == [2, 2]
    assert found.forward_transfer([0.0, 0.0]) == found.rows[0][1]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_scenarios_are_checked_before_the_first_task() -> None:
    ours = learner()
    with pytest.raises(ValueError, match="scenario must be one of .*, got 'blind'"):
        learn_stream(ours, [toy_task(0)], ("blind",))  # type: ignore[arg-type]
    assert ours.current == 0


def test_arguments_of_predict_are_checked_before_training() -> None:
    for method, message in (("epn", "unexpected keyword argument 'checkpont'"), ("naive", "got also checkpont")):
        ours = learner(method)
        with pytest.raises(TypeError, match=message):
            learn_stream(ours, [toy_task(0)], checkpont="x")
        assert not ours.tasks
    with pytest.raises(ValueError, match="group must be .*, got 0"):
        learn_stream(learner(), [toy_task(0)], group=0)


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
