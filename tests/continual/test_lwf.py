"""LwF: the old network's answers to the new inputs."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from powerprop.continual import Classification, LwF, Regression
from powerprop.continual.lwf import distillation
from tasks import NormNet, toy_model, toy_task


def learner(model: nn.Module | None = None, **options: Any) -> LwF:
    options = {"steps": 40, "batch_size": 32, **options}
    return LwF(toy_model() if model is None else model, lambda p: torch.optim.SGD(p, lr=0.05), **options)


def test_distillation_by_hand() -> None:
    """At T = 2 the teacher's (0, 2·log 3) are (¼, ¾); the student's zeros are (½, ½), or ⅓ each with one more."""
    teacher = torch.tensor([[0.0, 2 * math.log(3)]])
    assert distillation(torch.zeros(1, 2), teacher, 2.0).item() == pytest.approx(4 * math.log(2))
    assert distillation(torch.zeros(1, 3), teacher, 2.0).item() == pytest.approx(4 * math.log(3))
    entropy = -(math.log(0.25) / 4 + 3 * math.log(0.75) / 4)
    assert distillation(teacher, teacher, 2.0).item() == pytest.approx(4 * entropy, rel=1e-6)


@pytest.mark.parametrize("heads", [0, 3])
def test_the_penalty_is_one_term_for_every_earlier_task(heads: int) -> None:
    ours = learner(toy_model(heads=heads), heads="heads" if heads else None, strength=0.5, temperature=2.0)
    for task in range(2):
        ours.learn(toy_task(task))
    x, y = toy_task(2).train()
    old = [ours.logits(x, task) for task in range(2)]
    ours.begin(2)
    with torch.no_grad():
        for parameter in ours.model.parameters():
            parameter.mul_(1.25)
    assert ours.now is not None
    ours.now.batch = (x, y)
    now = [ours.bound(task)(x) for task in range(2)]
    wanted = 0.5 * sum(distillation(new, before, 2.0) for new, before in zip(now, old, strict=True))
    found = ours.penalty()
    assert found is not None
    torch.testing.assert_close(found, wanted)


def test_of_one_output_layer_for_all_classes_the_teacher_knows_the_earlier_ones() -> None:
    objective = Classification("stream")
    ours = learner(toy_model(outputs=9), objective=objective)
    ours.learn(toy_task(0))
    x, y = toy_task(1).train()
    old = ours.logits(x, 0)
    ours.begin(toy_task(1))
    assert ours.now is not None
    ours.now.batch = (x, y)
    found = ours.penalty()
    assert found is not None
    torch.testing.assert_close(found, distillation(ours.model(x)[:, :6], old[:, :3], 2.0))


def test_answers_of_earlier_tasks_move_less() -> None:
    found = []
    for strength in (0.0, 1.0):
        ours = learner(toy_model(heads=2), heads="heads", strength=strength, steps=80)
        ours.learn(toy_task(0))
        x = toy_task(1).test().x
        before = ours.logits(x, 0)
        ours.learn(toy_task(1))
        found.append(float((ours.logits(x, 0) - before).square().mean()))
        assert ours.score(toy_task(1).test(), 1) > 0.9
    assert found[1] < 0.2 * found[0]


def test_running_statistics_see_every_batch_once() -> None:
    means = []
    for strength in (0.0, 1e-20):
        ours = learner(NormNet(), heads="out", strength=strength, steps=5)
        for task in range(2):
            ours.learn(toy_task(task))
        means.append(ours.model.bn.num_batches_tracked.item())  # type: ignore[union-attr, operator]
    assert means == [10, 10]


def test_the_teacher_is_kept_while_a_task_is_learned() -> None:
    ours = learner()
    ours.learn(toy_task(0))
    assert ours.memory_bytes() == 0
    ours.begin(1)
    assert ours.memory_bytes() == 4 * sum(p.numel() for p in ours.model.parameters())
    ours.end()
    assert ours.memory_bytes() == 0


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="objective must be Classification, got Regression"):
        learner(objective=Regression())
    with pytest.raises(ValueError, match="strength must be at least 0, got -2"):
        learner(strength=-2.0)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        learner(temperature=0.0)
