"""What every continual learner promises: it learns, keeps what it protects, repeats itself, and survives a restart."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from nets import same
from powerprop.continual import Accuracies, EfficientPackNet, PackNet, accuracy_on, learn_stream, make_task
from powerprop.continual.packing.subnetworks import Subnetworks
from powerprop_paper.train import NonFiniteError
from tasks import (
    CLASSES,
    NormNet,
    both_alphas,
    every_masking,
    every_method,
    every_optimizer,
    learner,
    toy_model,
    toy_task,
)


@every_method
@both_alphas
def test_learns_two_tasks(method: str, alpha: float) -> None:
    ours = learner(method, alpha=alpha, steps=120)
    for t in range(2):
        ours.learn(toy_task(t))
        assert accuracy_on(ours, toy_task(t), "task-incremental") > 0.9
    assert [task.name for task in ours.tasks] == ["toy 0", "toy 1"]


@every_masking
@every_optimizer
@both_alphas
def test_logits_of_earlier_tasks_are_bit_identical(method: str, optimizer: str, alpha: float) -> None:
    ours = learner(method, optimizer, alpha, clip=1.0)
    seen: list[torch.Tensor] = []
    for t in range(4):
        ours.learn(toy_task(t))
        seen.append(ours.logits(toy_task(t).test().x, t))
        for earlier, logits in enumerate(seen):
            assert torch.equal(ours.logits(toy_task(earlier).test().x, earlier), logits)


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


def test_naive_fine_tuning_forgets() -> None:
    ours = learner("naive", steps=120)
    found = learn_stream(ours, [toy_task(t) for t in range(3)])["task-incremental"]
    assert found.forgetting() > 0.1
    assert found.backward_transfer() < -0.1


@every_method
def test_same_seed_same_result(method: str) -> None:
    first, second, other = (learner(method, seed=seed) for seed in (3, 3, 4))
    for t in range(2):
        for each in (first, second, other):
            torch.rand(1)  # the global generator plays no part
            each.learn(toy_task(t))
    assert same(first.model, second.model)
    assert not same(first.model, other.model)


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


def test_a_network_that_is_nearly_full_says_so_once() -> None:
    ours = learner(grid=(0.995,), gamma=0.1, steps=2, distribution="uniform", when_full="train")
    full = r"toy 0: fewer than 1% of the weights of fc1\.weight, .* are free for the tasks to come"
    with pytest.warns(UserWarning, match=full):
        ours.learn(toy_task(0))
    ours.learn(toy_task(1))


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


def test_forward_transfer_of_the_naive_learner() -> None:
    stream = [toy_task(t) for t in range(2)]
    found = learn_stream(learner("naive"), stream, future=True)["task-incremental"]
    assert isinstance(found.forward_transfer([1 / 3, 1 / 3]), float)


def test_make_task() -> None:
    x, y = torch.rand(20, 3), torch.arange(20) % 2
    task = make_task((x, y))
    assert len(task.train().x) == 18
    assert len(task.validation().x) == 2
    assert task.classes == (0, 1)
    with pytest.raises(ValueError, match="as many labels as inputs, got 20 and 19"):
        make_task((x, y[:-1]))


def test_an_unreachable_target_takes_the_densest_and_says_so() -> None:
    ours = learner(gamma=1.0, grid=(0.02, 0.01), steps=120, rate="paper")
    spoiled = "toy 0: a performance of .* fell to .* in the task's sub-network"
    with (
        pytest.warns(UserWarning, match="toy 0: no sub-network of 2% of the weights or fewer .* the densest is taken"),
        pytest.warns(UserWarning, match=spoiled),
    ):
        ours.learn(toy_task(0))
    assert ours.nets.masks.used() == pytest.approx(0.02, abs=1e-3)


@every_masking
def test_a_task_that_diverges_leaves_the_others_alone(method: str) -> None:
    ours = learner(method, steps=20)
    ours.learn(toy_task(0))
    before = ours.logits(toy_task(0).test().x, 0)
    (group,) = ours.optimizer.param_groups
    group["lr"], rate = 1e30, group["lr"]
    with pytest.raises(NonFiniteError):
        ours.learn(toy_task(1))
    assert torch.equal(ours.logits(toy_task(0).test().x, 0), before)
    group["lr"] = rate
    ours.learn(toy_task(1))
    assert torch.equal(ours.logits(toy_task(0).test().x, 0), before)
    assert accuracy_on(ours, toy_task(1), "task-incremental") > 0.5


@every_masking
def test_a_step_outside_of_a_task_moves_nothing(method: str) -> None:
    ours = learner(method, steps=20)
    for index in range(2):
        ours.learn(toy_task(index))
    x = toy_task(0).test().x
    before = [ours.logits(x, index) for index in range(2)]
    ours.model.train()
    for _ in range(2):
        nn.functional.cross_entropy(ours.model(x), toy_task(0).test().y).backward()
        ours.optimizer.step()
    assert all(torch.equal(ours.logits(x, index), before[index]) for index in range(2))


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


@every_masking
@both_alphas
@pytest.mark.usefixtures("deterministic")
def test_deterministic_algorithms(method: str, alpha: float) -> None:
    ours = learner(method, alpha=alpha)
    for t in range(3):
        ours.learn(toy_task(t))
    assert len(ours.predict(toy_task(1).test().x).label) == 128
