"""Packing: sub-networks of their own, weights that are free, what is held, and answers in a sub-network."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from powerprop.continual import EfficientPackNet, PackNet, Strategy, accuracy_on, make_task
from powerprop.continual.packing.subnetworks import Subnetworks
from tasks import CLASSES, OPTIMIZERS, NormNet, both_alphas, every_masking, learner, toy_model, toy_task

# --- sub-networks ----------------------------------------------------------------------------------------------------


def test_packnet_takes_its_share_of_every_layer_among_free_weights() -> None:
    ours = learner("packnet", total_tasks=5, steps=10)  # layers of 384, 1024 and 96 weights
    assert isinstance(ours, PackNet)
    shares: dict[str, list[int]] = {name: [] for name in ours.nets.masters}
    for t in range(5):
        ours.learn(toy_task(t))
        for name, owner in ours.nets.masks.owner.items():
            shares[name].append(int((owner == t).sum()))
        assert ours.nets.masks.mask(t) == ~ours.nets.masks.free()
    assert shares["fc1.weight"] == [76, 77, 77, 77, 77]
    assert shares["fc2.weight"] == [204, 205, 205, 205, 205]
    assert shares["fc3.weight"] == [19, 19, 19, 19, 20]
    with pytest.raises(ValueError, match="made for total_tasks=5, got one more"):
        ours.learn(toy_task(5))


def test_packnet_needs_a_weight_per_task_in_every_layer() -> None:
    with pytest.raises(ValueError, match="tasks must be at most 96, the number of weights of 'fc3.weight', got 97"):
        learner("packnet", total_tasks=97)


def test_efficient_packnet_reuses_weights_of_earlier_tasks() -> None:
    ours = learner(grid=(0.5, 0.4, 0.3, 0.2))
    assert isinstance(ours, EfficientPackNet)
    for t in range(3):
        ours.learn(toy_task(t))
    last = ours.nets.masks.mask(2)
    earlier = ours.nets.masks.mask(0) | ours.nets.masks.mask(1)
    assert (last & earlier).count() > 0
    assert (last - earlier).count() > 0


def test_free_weights_are_initialised_again_and_used_ones_kept() -> None:
    ours = learner(alpha=1.5, steps=40)
    spread = ours.nets.spread
    ours.learn(toy_task(0))
    used = {n: m.theta()[ours.nets.masks.mask(0)[n]].clone() for n, m in ours.nets.masters.items()}
    free = ours.nets.masks.free()
    for name, master in ours.nets.masters.items():
        fresh = master.theta()[free[name]]
        assert float(fresh.std()) == pytest.approx(spread[name], rel=0.2)
        assert (fresh != 0).all()
    ours.learn(toy_task(1))
    for name, master in ours.nets.masters.items():
        assert torch.equal(master.theta()[ours.nets.masks.mask(0)[name]], used[name])


def test_the_model_shows_a_plain_sparse_network() -> None:
    ours = learner()
    for t in range(2):
        ours.learn(toy_task(t))
    ours.nets.show(0)
    x = toy_task(0).test().x
    assert torch.equal(ours.model(x), ours.logits(x, 0))
    kept = sum(int(m.param.count_nonzero()) for m in ours.nets.masters.values())
    assert kept == ours.nets.masks.mask(0).count()


def test_a_network_that_is_nearly_full_says_so_once() -> None:
    ours = learner(grid=(0.995,), gamma=0.1, steps=2, distribution="uniform", when_full="train")
    full = r"toy 0: fewer than 1% of the weights of fc1\.weight, .* are free for the tasks to come"
    with pytest.warns(UserWarning, match=full):
        ours.learn(toy_task(0))
    ours.learn(toy_task(1))


def test_an_unreachable_target_takes_the_densest_and_says_so() -> None:
    ours = learner(gamma=1.0, grid=(0.02, 0.01), steps=120, rate="paper")
    spoiled = "toy 0: a performance of .* fell to .* in the task's sub-network"
    with (
        pytest.warns(UserWarning, match="toy 0: no sub-network of 2% of the weights or fewer .* the densest is taken"),
        pytest.warns(UserWarning, match=spoiled),
    ):
        ours.learn(toy_task(0))
    assert ours.nets.masks.used() == pytest.approx(0.02, abs=1e-3)


def test_pruning_in_a_loop_of_ones_own() -> None:
    ours = learner(retrain_steps=0, grid=(0.4,), gamma=None)
    assert isinstance(ours, EfficientPackNet)
    x, y = toy_task(0).train()

    def steps(count: int) -> None:
        for _ in range(count):
            ours.step(nn.functional.cross_entropy(ours.model(x), y))

    ours.begin(0)
    steps(40)
    ours.prune((x, y))
    assert sum(int(m.param.count_nonzero()) for m in ours.nets.masters.values()) == ours._chosen.count()
    steps(10)
    ours.end((x, y))
    assert ours.used() == pytest.approx(0.4, abs=0.01)
    assert (ours.predict(x, 0).label == y).double().mean() > 0.8


def test_gradual_pruning_takes_fewer_weights() -> None:
    once, gradually = (learner(steps=100, retrain_steps=90, gamma=0.9, prunings=p, pruning_steps=30) for p in (0, 3))
    for each in (once, gradually):
        each.learn(toy_task(0))
    assert gradually.used() < once.used()
    with pytest.raises(ValueError, match="3 prunings 30 steps apart do not fit into retrain_steps=50"):
        learner(retrain_steps=50, prunings=3, pruning_steps=30)


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_reusing_the_output_layer_alone(alpha: float, tmp_path: Path) -> None:
    options: dict[str, Any] = {"alpha": alpha, "steps": 80, "retrain_steps": 60, "gamma": 0.95}
    options |= {"reuse": "output", "prunings": 2, "pruning_steps": 20}
    ours, again = learner(**options), learner(**options)
    seen = []
    for t in range(3):
        ours.learn(toy_task(t))
        seen.append(ours.logits(toy_task(t).test().x, t))
    masks = [ours.nets.masks.mask(t) for t in range(3)]
    for hidden in ("fc1.weight", "fc2.weight"):
        assert not (masks[2][hidden] & (masks[0][hidden] | masks[1][hidden])).any()
    assert (masks[2]["fc3.weight"] & masks[0]["fc3.weight"]).equal(masks[0]["fc3.weight"])
    assert all(torch.equal(ours.logits(toy_task(t).test().x, t), logits) for t, logits in enumerate(seen))
    ours.save(tmp_path / "l")
    again.load(tmp_path / "l")
    assert all(torch.equal(again.logits(toy_task(t).test().x, t), logits) for t, logits in enumerate(seen))


def test_a_task_takes_no_more_than_its_share_of_a_layer() -> None:
    ours = learner(max_layer_fraction=0.1, gamma=0.6, grid=(0.5, 0.3), retrain_steps=20)
    for t in range(3):
        ours.learn(toy_task(t))
        own = ours.nets.masks.owner
        assert all(int((owner == t).sum()) <= math.ceil(0.1 * owner.numel()) for owner in own.values())


def test_several_tasks_are_kept_at_hand() -> None:
    ours = learner(steps=20)
    for t in range(3):
        ours.learn(toy_task(t))
    first = [ours.nets.weights(t) for t in range(3)]
    assert all(ours.nets.weights(t) is first[t] for t in (2, 0, 1, 0))


# --- what is held ----------------------------------------------------------------------------------------------------


@every_masking
def test_frozen_weights_take_no_part_in_clipping(method: str) -> None:
    ours = learner(method, clip=1e-3)
    ours.learn(toy_task(0))
    ours.begin(toy_task(1))
    x, y = toy_task(1).test()
    ours.step(nn.functional.cross_entropy(ours.model(x), y))
    trained = ours.optimizer.trainable
    norms = [ours.model.get_parameter(n).grad[trained[n]].norm() for n in trained]
    share = ours.optimizer.trainable.density()  # few weights may not move farther than many
    assert 0 < share < 1
    assert torch.stack(norms).norm().item() == pytest.approx(1e-3 * math.sqrt(share), rel=1e-3)


@every_masking
def test_biases_norms_and_heads_freeze(method: str) -> None:
    ours = learner(method, "adamw", model=NormNet(), heads="out")
    seen: list[torch.Tensor] = []
    for t in range(3):
        ours.learn(toy_task(t))
        rest = {n: p.clone() for n, p in ours.model.state_dict().items() if n.startswith(("fc1.bias", "bn", "ln"))}
        seen.append(ours.logits(toy_task(t).test().x, t))
    ours.learn(toy_task(3))
    assert len(rest) == 8
    assert all(torch.equal(ours.model.state_dict()[n], p) for n, p in rest.items())
    for t, logits in enumerate(seen):
        assert torch.equal(ours.logits(toy_task(t).test().x, t), logits)
        assert accuracy_on(ours, toy_task(t), "task-incremental") > 0.8
    assert ours.model.bn.num_batches_tracked > 0


@every_masking
def test_packing_that_was_interrupted_is_noticed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    ours = learner(method, steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(Subnetworks, "show", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ours.learn(toy_task(0))
    with pytest.raises(RuntimeError, match="1 tasks are packed, but the learner has learned 0"):
        ours.learn(toy_task(0))


def test_a_network_that_moves_answers_at_once() -> None:
    ours = learner(steps=20)
    ours.learn(toy_task(0))
    x = toy_task(0).test().x
    before = ours.logits(x, 0)
    ours.model.double()
    assert torch.allclose(ours.logits(x.double(), 0).float(), before, atol=1e-5)
    assert all(m.theta().dtype == torch.float64 for m in ours.optimizer.masters.values())


@every_masking
@both_alphas
@pytest.mark.usefixtures("deterministic")
def test_deterministic_algorithms(method: str, alpha: float) -> None:
    ours = learner(method, alpha=alpha, steps=20)
    for t in range(2):
        ours.learn(toy_task(t))
    assert len(ours.predict(toy_task(1).test().x).label) == 128


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("float64_by_default")
@pytest.mark.parametrize("how", ["shortlist", "exhaustive", "oneshot", "binary"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_tasks_are_inferred_in_every_precision(how: str, dtype: torch.dtype) -> None:
    ours = learner(steps=20, model=toy_model().to(dtype))
    for index in range(2):
        x, y = toy_task(index).train()
        ours.learn(make_task((x.to(dtype), y), index=index))
    assert ours.predict(toy_task(1).test().x.to(dtype), method=how, group=None).task.unique().numel() == 1  # type: ignore[call-arg]


@pytest.mark.parametrize("labels", ["task", "stream"])
@pytest.mark.parametrize("method", ["naive", "packnet", "epn"])
def test_no_inputs_get_no_answers(method: str, labels: str) -> None:
    ours = learner(method, model=toy_model(outputs=2 * CLASSES), labels=labels, steps=20)
    ours.learn(toy_task(0))
    x = toy_task(0).test().x[:0]
    for found in (ours.predict(x), ours.predict(x, 0)):
        assert [tuple(column.shape) for column in found] == [(0,)] * 4
        assert found.label.dtype == found.task.dtype == torch.long
    if method != "naive":
        assert len(ours.predict(x, unknown=0.5, group=4).task) == 0


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


# --- what is refused -------------------------------------------------------------------------------------------------


BAD: list[tuple[type[Strategy], dict[str, Any], str]] = [
    (EfficientPackNet, {"gamma": 1.2}, r"gamma must be in \(0, 1\], got 1\.2"),
    (EfficientPackNet, {"search": "random"}, "search must be .*, got 'random'"),
    (EfficientPackNet, {"grid": (0.1, 0.5)}, r"falling fractions .* got \[0\.1, 0\.5\]"),
    (EfficientPackNet, {"distribution": "erk"}, "distribution must be .*, got 'erk'"),
    (EfficientPackNet, {"retrain_steps": -1}, "retrain_steps must not be negative, got -1"),
    (PackNet, {"total_tasks": 0}, "total_tasks must be at least 1, got 0"),
]


@pytest.mark.parametrize(("kind", "options", "message"), BAD)
def test_bad_arguments(kind: type[Strategy], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(toy_model(), OPTIMIZERS["sgd"], **options)


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
