"""When no weight is free a task learns a mask over the frozen ones: what it knows, and what stays as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from powerprop.continual import INFERENCES, EfficientPackNet, Strategy, entropy_gradient, infer, load_learner
from powerprop.continual.packing.supermasks import FrozenSupermask
from powerprop.continual.packing.task_masks import TaskMasks
from tasks import learner, toy_model, toy_task

FULL = "from now on a task learns a mask over the frozen ones"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*for the tasks to come"),
    pytest.mark.filterwarnings(f"ignore:.*{FULL}"),
]


def crowded(optimizer: str = "sgd", **options: Any) -> EfficientPackNet:
    """Every task takes two fifths of all weights, so that the third finds the network full."""
    settings = {"gamma": None, "grid": (0.45,), "reuse": "output", "steps": 80, "retrain_steps": 40}
    model = options.pop("model", None) or toy_model(width=64, heads=options.get("head_count", 0))
    ours = learner("epn", optimizer, model=model, **{**settings, **options})
    assert isinstance(ours, EfficientPackNet)
    return ours


def answers(ours: Strategy, tasks: int) -> list[Tensor]:
    return [ours.logits(toy_task(t).test().x, t) for t in range(tasks)]


@pytest.mark.parametrize(("optimizer", "alpha"), [("sgd", 1.0), ("momentum", 1.5), ("adam", 1.5), ("adamw", 1.0)])
def test_tasks_go_on_when_the_network_is_full(optimizer: str, alpha: float, tmp_path: Path) -> None:
    ours = crowded(optimizer, alpha=alpha)
    for t in range(2):
        ours.learn(toy_task(t))
    before, free = answers(ours, 2), ours.nets.masks.free()
    theta = {n: w.clone() for n, w in ours.nets.theta().items()}
    for t in range(2, 5):
        ours.learn(toy_task(t))
        assert ours.nets.masks.chosen == list(range(2, t + 1))
    assert all(torch.equal(a, b) for a, b in zip(before, answers(ours, 2), strict=True))
    assert all(torch.equal(theta[n], w) for n, w in ours.nets.theta().items())
    assert ours.nets.masks.free() == free
    for t in range(2, 5):
        x, y = toy_task(t).test()
        assert (ours.predict(x, t).label == y).double().mean() > 0.65  # a third is chance
        assert not any((mask & free[n]).any() for n, mask in ours.nets.masks.mask(t).items())
    known = answers(ours, 5)
    ours.save(tmp_path / "l")
    again = crowded(optimizer, alpha=alpha, model=toy_model(seed=3, width=64))
    again.load(tmp_path / "l")
    made = load_learner(tmp_path / "l", toy_model(seed=4, width=64))
    for other in (again, made):
        assert all(torch.equal(a, b) for a, b in zip(known, answers(other, 5), strict=True))
    for each in (ours, again, made):  # what comes next is the same, to the bit
        each.learn(toy_task(5))
    assert torch.equal(ours.logits(toy_task(5).test().x, 5), again.logits(toy_task(5).test().x, 5))
    assert torch.equal(ours.logits(toy_task(5).test().x, 5), made.logits(toy_task(5).test().x, 5))


def test_it_is_announced_once_or_refused() -> None:
    ours, strict, published = (crowded(when_full=what) for what in ("masks", "error", "train"))
    for each in (ours, strict, published):
        for t in range(2):
            each.learn(toy_task(t))
    with pytest.warns(UserWarning, match=rf"toy 2: fewer than 10% of the weights of fc1.weight.* are free; {FULL}"):
        ours.learn(toy_task(2))
    with pytest.raises(RuntimeError, match="fewer than 10% of the weights of .* are free; with when_full='masks'"):
        strict.learn(toy_task(2))
    assert strict.current == 2
    published.learn(toy_task(2))
    assert published.nets.masks.chosen == []
    with pytest.raises(ValueError, match="when_full must be one of masks, train, error, got 'stop'"):
        crowded(when_full="stop")
    with pytest.raises(ValueError, match=r"least_free must be in \[0, 1\], .*, got 2"):
        crowded(least_free=2)


def test_a_loop_of_ones_own_learns_a_mask_too() -> None:
    ours, looped = crowded(), crowded()
    for each in (ours, looped):
        for t in range(2):
            each.learn(toy_task(t))
    task = toy_task(2)
    x, y = task.train()
    looped.begin(task, steps=80)
    for _ in range(80):
        looped.step(torch.nn.functional.cross_entropy(looped.model(x), y))
    looped.prune((x, y))
    looped.step(torch.nn.functional.cross_entropy(looped.model(x), y))
    looped.end((x, y))
    x, y = task.test()
    assert (looped.predict(x, 2).label == y).double().mean() > 0.75  # a third is chance
    ours.begin(task)
    ours.give_up()
    assert ours.nets.masks.tasks == 2
    ours.learn(task)
    again = crowded()
    for t in range(3):
        again.learn(toy_task(t))
    assert torch.equal(ours.logits(x, 2), again.logits(x, 2))


def test_every_task_has_a_head_of_its_own() -> None:
    ours = crowded(head_count=4)
    for t in range(4):
        ours.learn(toy_task(t))
    assert ours.nets.masks.chosen == [2, 3]
    x, y = toy_task(3).test()
    assert (ours.predict(x, 3).label == y).double().mean() > 0.75  # a third is chance


def test_masks_of_both_kinds_are_mixed_alike() -> None:
    ours = crowded()
    for t in range(4):
        ours.learn(toy_task(t))
    pi = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    masks = [ours.nets.masks.mask(t) for t in range(4)]
    for name in ours.nets.masters:
        expected = sum(float(c) * mask[name] for c, mask in zip(pi, masks, strict=True))
        assert torch.allclose(ours.nets.masks.mixture(name, pi), expected.float(), atol=1e-6)
        values = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
        sums = torch.stack([values[mask[name]].double().sum() for mask in masks])
        assert torch.allclose(ours.nets.masks.sums(name, values), sums, atol=1e-5)
    x = toy_task(3).test().x
    assert entropy_gradient(ours.nets, x, pi, ours.objective).isfinite().all()
    for method in ("shortlist", "exhaustive", "oneshot", "binary"):
        assert method in INFERENCES
        assert set(infer(ours.nets, x, ours.objective, method, None).tolist()) <= {0, 1, 2, 3}


def test_a_mask_has_no_weight_that_nobody_owns() -> None:
    masks = TaskMasks({"w": torch.tensor([1.0, 2.0, 3.0, 4.0])})
    own = torch.tensor([True, True, False, False])
    masks.add(masks.complete({"w": own}))
    with pytest.raises(ValueError, match="the mask of 'w' has weights that no task owns"):
        masks.add_chosen({"w": torch.tensor([True, False, True, False])})
    assert masks.tasks == 1
    masks.add_chosen({"w": torch.tensor([False, True, False, False])})
    assert masks.mask(1)["w"].tolist() == [False, True, False, False]
    assert masks.used() == 0.5


def test_the_gradient_goes_straight_through() -> None:
    ours = crowded(alpha=1.0)
    for t in range(2):
        ours.learn(toy_task(t))
    x, y = toy_task(2).train()
    ours.begin(toy_task(2), steps=1)
    supermask = ours._supermask
    assert isinstance(supermask, FrozenSupermask)
    worn = ours.model.get_parameter("fc1.weight").detach()
    theta, chosen = ours.nets.theta()["fc1.weight"], supermask.chosen()["fc1.weight"]
    assert torch.equal(worn, torch.where(chosen, theta, 0.0))
    torch.nn.functional.cross_entropy(ours.model(x), y).backward()
    grad, score = ours.model.get_parameter("fc1.weight").grad, supermask.scores["fc1.weight"]
    assert grad is not None
    assert score.grad is not None
    among = supermask.among["fc1.weight"]
    assert 0 < among.sum() < among.numel()
    assert torch.equal(score.grad, grad * theta * among)
    assert bool((score[~among] < 0).all())
    ours.give_up()
