"""What every continual learner promises: it learns, keeps what it protects, repeats itself, and survives a restart."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nets import same
from powerprop.continual import Accuracies, EfficientPackNet, PackNet, Strategy, accuracy_on, learn_stream, make_task
from powerprop.continual.saving import FORMAT
from tasks import CLASSES, FEATURES, OPTIMIZERS, NormNet, learner, toy_model, toy_task

METHODS = ["naive", "packnet", "epn"]
MASKING = ["packnet", "epn"]
every_method = pytest.mark.parametrize("method", METHODS)
every_masking = pytest.mark.parametrize("method", MASKING)
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)
both_alphas = pytest.mark.parametrize("alpha", [1.0, 1.5])


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
    ours.nets.open()  # type: ignore[attr-defined]
    ours.step(*toy_task(1).test())
    norms = [p.grad.norm() for p in ours.model.parameters() if p.grad is not None]
    share = ours.optimizer.trainable.density()  # few weights may not move farther than many
    assert 0 < share < 1
    assert torch.stack(norms).norm().item() == pytest.approx(1e-3 * math.sqrt(share), rel=1e-3)
    for name, trained in ours.optimizer.trainable.items():
        grad = ours.model.get_parameter(name).grad
        assert grad is not None
        assert not grad[~trained].any()


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


@every_method
@both_alphas
def test_a_saved_learner_goes_on_bit_for_bit(method: str, alpha: float, tmp_path: Path) -> None:
    straight = learner(method, "adam", alpha)
    for t in range(4):
        straight.learn(toy_task(t))
    broken = learner(method, "adam", alpha)
    for t in range(4):
        broken.learn(toy_task(t))
        broken.save(tmp_path / "learner.safetensors")
        broken = learner(method, "adam", alpha, model=toy_model(seed=9))
        broken.load(tmp_path / "learner.safetensors")
    assert same(straight.model, broken.model)
    for t in range(4):
        x = toy_task(t).test().x
        assert torch.equal(straight.logits(x, t), broken.logits(x, t))
    assert broken.tasks == straight.tasks


def test_norms_and_dropout_resume_too(tmp_path: Path) -> None:
    straight, broken = (learner("epn", "adam", model=NormNet(), heads="out") for _ in range(2))
    for t in range(3):
        straight.learn(toy_task(t))
        broken.learn(toy_task(t))
        broken.save(tmp_path / "l")
        broken = learner("epn", "adam", model=NormNet(), heads="out")
        broken.load(tmp_path / "l")
    assert same(straight.model, broken.model)


def test_loading_refuses_what_does_not_fit(tmp_path: Path) -> None:
    ours = learner()
    ours.learn(toy_task(0))
    path = tmp_path / "learner.safetensors"
    ours.save(path)
    with pytest.raises(ValueError, match=r"alpha 1\.5, this one has 2\.0"):
        learner(alpha=2.0).load(path)
    with pytest.raises(ValueError, match="'EfficientPackNet', this one has 'PackNet'"):
        learner("packnet").load(path)
    with pytest.raises(ValueError, match=r"fc1\.weight': \(32, 12\).*this one has .*\(40, 12\)"):
        learner(model=toy_model(width=40)).load(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        ours.load(path)


def test_a_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(1)}, tmp_path / "x")
    with pytest.raises(ValueError, match=rf"is not a saved learner: expected '{FORMAT}' in its header, got \[\]"):
        learner().load(tmp_path / "x")


@pytest.mark.parametrize(("tasks", "width"), [(5, 200), (40, 200)])
def test_file_size(tasks: int, width: int, tmp_path: Path) -> None:
    ours = learner(model=toy_model(width=width), steps=2, retrain_steps=0, grid=(0.2, 0.1), score=lambda logits, y: 1.0)
    for t in range(tasks):
        ours.learn(toy_task(t, 32))
    ours.save(tmp_path / "l")
    weights = ours.nets.masks.free().numel()
    rest = sum(p.numel() for p in ours.model.parameters()) - weights
    header = 1200 + 160 * tasks  # names, shapes and one threshold per task and layer, as text
    assert (tmp_path / "l").stat().st_size <= 4 * (weights + rest) + 1.1 * weights * tasks / 8 + header
    if tasks == 40:  # far below a bit per weight and task
        assert (tmp_path / "l").stat().st_size <= 4 * (weights + rest) + 6 * weights / 8 + header


def test_three_hundred_tasks(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 3, "retrain_steps": 1, "batch_size": 8, "clip": 1.0}
    options |= {"grid": (0.3, 0.1), "score": lambda logits, y: 1.0}
    ours = learner(**options)
    checked = {}
    for t in range(300):
        task = toy_task(t, 32)
        ours.learn(task)
        if t in (0, 17, 255, 256, 299):
            checked[t] = ours.logits(task.test().x, t)
    ours.save(tmp_path / "l")
    again = learner(model=toy_model(seed=5), **options)
    again.load(tmp_path / "l")
    for t, logits in checked.items():
        assert torch.equal(ours.logits(toy_task(t).test().x, t), logits)
        assert torch.equal(again.logits(toy_task(t).test().x, t), logits)
    assert len(ours.tasks) == 300


def test_packnet_takes_its_share_of_every_layer_among_free_weights() -> None:
    ours = learner("packnet", tasks=5, steps=10)  # layers of 384, 1024 and 96 weights
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
    with pytest.raises(ValueError, match="made for tasks=5, got one more"):
        ours.learn(toy_task(5))


def test_packnet_needs_a_weight_per_task_in_every_layer() -> None:
    with pytest.raises(ValueError, match="tasks must be at most 96, the number of weights of 'fc3.weight', got 97"):
        learner("packnet", tasks=97)


def test_a_network_that_is_nearly_full_says_so_once() -> None:
    ours = learner(grid=(0.995,), gamma=0.1, steps=2)
    with pytest.warns(UserWarning, match=r"toy 0: only 0\.5% of the weights are free for the tasks to come"):
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
    ours = learner(model=mlp_of(2 * CLASSES), labels="stream", steps=120)
    for t in range(2):
        ours.learn(toy_task(t))
        assert accuracy_on(ours, toy_task(t), "task-incremental") > 0.9
    found = ours.predict(toy_task(1).test().x, 1)
    assert int(found.label.max()) < CLASSES
    assert accuracy_on(ours, toy_task(1), "class-incremental") > 0.9
    naive = learner("naive", model=mlp_of(2 * CLASSES), labels="stream", steps=120)
    for t in range(2):
        naive.learn(toy_task(t))
    assert accuracy_on(naive, toy_task(1), "class-incremental") > 0.9


def mlp_of(outputs: int) -> nn.Module:
    from powerprop.models import mlp

    return mlp([FEATURES, 32, 32, outputs], generator=torch.Generator().manual_seed(0))


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


BAD: list[tuple[type[Strategy], dict[str, Any], str]] = [
    (EfficientPackNet, {"gamma": 1.2}, r"gamma must be in \(0, 1\], got 1\.2"),
    (EfficientPackNet, {"search": "random"}, "search must be .*, got 'random'"),
    (EfficientPackNet, {"grid": (0.1, 0.5)}, r"falling fractions .* got \[0\.1, 0\.5\]"),
    (EfficientPackNet, {"distribution": "erk"}, "distribution must be .*, got 'erk'"),
    (EfficientPackNet, {"retrain_steps": -1}, "retrain_steps must not be negative, got -1"),
    (EfficientPackNet, {"steps": 0}, "steps must be at least 1, got 0"),
    (EfficientPackNet, {"labels": "both"}, "labels must be .*, got 'both'"),
    (EfficientPackNet, {"clip": 0.0}, r"clip must be a positive norm, got 0\.0"),
    (PackNet, {"tasks": 0}, "tasks must be at least 1, got 0"),
]


@pytest.mark.parametrize(("kind", "options", "message"), BAD)
def test_bad_arguments(kind: type[Strategy], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(toy_model(), OPTIMIZERS["sgd"], **options)


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
        for unknown in (0.0, 7.0):
            with pytest.raises(ValueError, match=rf"unknown must be in \(0, 1\], .*, got {unknown}"):
                ours.predict(x, task, unknown=unknown)


@pytest.mark.parametrize("labels", ["task", "stream"])
@every_method
def test_no_inputs_get_no_answers(method: str, labels: str) -> None:
    ours = learner(method, model=mlp_of(2 * CLASSES), labels=labels, steps=2)
    ours.learn(toy_task(0))
    x = toy_task(0).test().x[:0]
    for found in (ours.predict(x), ours.predict(x, 0)):
        assert [tuple(column.shape) for column in found] == [(0,)] * 3
        assert found.label.dtype == found.task.dtype == torch.long
    if method != "naive":
        assert len(ours.predict(x, unknown=0.5, group=4).task) == 0


@pytest.mark.parametrize("labels", ["task", "stream"])
def test_the_naive_learner_names_the_tasks_it_knows(labels: str) -> None:
    ours = learner("naive", model=mlp_of(2 * CLASSES), labels=labels, steps=110)
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
def test_tasks_come_in_the_order_of_their_indices(method: str) -> None:
    ours = learner(method, steps=2)
    with pytest.raises(ValueError, match="toy 5: expected the task with index 0, got 5"):
        ours.learn(toy_task(5))
    ours.learn(toy_task(0))
    with pytest.raises(ValueError, match="toy 0: expected the task with index 1, got 0"):
        ours.learn(toy_task(0))


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
        assert (each.predict(images(12, 1).test().x).task == 1).all()
        assert set(each.predict(images(8, 0).test().x, group=1).task.tolist()) <= {0, 2}
        with pytest.raises(ValueError, match=r"expected inputs of 64, 144 numbers each, .*, got \(5, 1, 9, 9\)"):
            each.predict(images(9, 0).test().x[:5])


def test_inputs_of_one_number_each() -> None:
    torch.manual_seed(0)
    ours = learner(model=nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, CLASSES)), steps=10)
    for t in range(2):
        x = torch.arange(60) % 10 + 10 * t
        ours.learn(make_task((x, x % 3), index=t))
    assert (ours.predict(torch.arange(10)).task == 0).all()


def test_an_unreachable_target_takes_the_densest_and_says_so() -> None:
    ours = learner(gamma=1.0, grid=(0.02, 0.01), steps=120)
    with pytest.warns(UserWarning, match="toy 0: no sub-network of 2% of the weights or fewer .* the densest is taken"):
        ours.learn(toy_task(0))
    assert ours.nets.masks.used() == pytest.approx(0.02, abs=1e-3)
