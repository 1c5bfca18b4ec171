"""Learners on disk: what does not fit is refused before anything is touched, and older files are still read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nets import same
from powerprop.continual import Strategy, make_task
from powerprop.continual.saving import FORMAT, state_of, write_learner
from tasks import (
    CLASSES,
    FEATURES,
    NormNet,
    both_alphas,
    learner,
    toy_model,
    toy_task,
)


def net(bias: bool = True, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 16, bias=bias), nn.ReLU(), nn.Linear(16, CLASSES, bias=bias))


def quick(*kind: Any, **options: Any) -> Strategy:
    return learner(*kind, **{"steps": 10, **options})


def saved(path: Path, method: str = "epn", **options: Any) -> Strategy:
    ours = quick(method, **options)
    ours.learn(toy_task(0))
    ours.save(path)
    return ours


def refused(ours: Strategy, path: Path, message: str) -> None:
    """The file is an error, and the learner is as it was."""
    before = {n: t.clone() for n, t in state_of(ours)[0].items()}
    with pytest.raises(ValueError, match=message):
        ours.load(path)
    after = state_of(ours)[0]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], t) for n, t in after.items())
    assert ours.tasks == []


def test_every_name_and_shape_of_the_model_is_compared(tmp_path: Path) -> None:
    saved(tmp_path / "with", model=net())
    saved(tmp_path / "without", model=net(bias=False))
    there, here = r"\{'model/0.bias': \(16,\), 'model/2.bias': \(3,\)\}", r"\{\}"
    refused(quick(model=net(bias=False)), tmp_path / "with", f"has {there}, this one has {here}")
    refused(quick(model=net()), tmp_path / "without", f"has {here}, this one has {there}")
    normed = nn.Sequential(*net(), nn.BatchNorm1d(CLASSES))
    refused(quick(model=normed), tmp_path / "with", r"has \{\}, this one has .*'model/3.running_mean': \(3,\)")


def test_heads_and_the_number_of_tasks_are_compared(tmp_path: Path) -> None:
    saved(tmp_path / "heads", head_count=2)
    plain = quick(head_count=2)
    plain.heads = None
    refused(plain, tmp_path / "heads", "the saved learner has heads 'heads', this one has None")
    saved(tmp_path / "two", "packnet", total_tasks=2)
    refused(quick("packnet", total_tasks=5), tmp_path / "two", "the saved learner has total_tasks 2, this one has 5")


def test_damaged_masks_leave_the_learner_as_it_was(tmp_path: Path) -> None:
    ours = saved(tmp_path / "l")
    tensors, data = state_of(ours)
    tensors["masks/fc1.weight"] = tensors["masks/fc1.weight"][:0]
    write_learner(tmp_path / "l", tensors, data)
    refused(quick(), tmp_path / "l", "owners among 1 tasks take 1 bit planes, got 0")


def test_the_layers_that_share_tasks_are_compared(tmp_path: Path) -> None:
    saved(tmp_path / "l", model=net())
    frozen = net()
    frozen[0].weight.requires_grad_(False)
    message = r"has alphas {'0.weight': 1.5, '2.weight': 1.5}, this one has {'2.weight': 1.5}"
    refused(quick(model=frozen), tmp_path / "l", message)


def test_a_learner_without_tasks_is_saved_and_read(tmp_path: Path) -> None:
    ours, again = quick(), quick()
    ours.save(tmp_path / "l")
    again.load(tmp_path / "l")
    for each in (ours, again):
        each.learn(toy_task(0))
    assert same(ours.model, again.model)


def test_norms_and_dropout_resume_too(tmp_path: Path) -> None:
    straight, broken = (quick("epn", "adam", model=NormNet(), heads="out") for _ in range(2))
    for t in range(3):
        straight.learn(toy_task(t))
        broken.learn(toy_task(t))
        broken.save(tmp_path / "l")
        broken = quick("epn", "adam", model=NormNet(), heads="out")
        broken.load(tmp_path / "l")
    assert same(straight.model, broken.model)


def test_loading_refuses_what_does_not_fit(tmp_path: Path) -> None:
    ours = quick()
    ours.learn(toy_task(0))
    path = tmp_path / "learner.safetensors"
    ours.save(path)
    with pytest.raises(ValueError, match=r"alpha 1\.5, this one has 2\.0"):
        quick(alpha=2.0).load(path)
    with pytest.raises(ValueError, match="'EfficientPackNet', this one has 'PackNet'"):
        quick("packnet").load(path)
    with pytest.raises(ValueError, match=r"fc1\.weight': \(32, 12\).*this one has .*\(40, 12\)"):
        quick(model=toy_model(width=40)).load(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="learner.safetensors is damaged: its content does not have the checksum"):
        ours.load(path)


def test_a_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(1)}, tmp_path / "x")
    with pytest.raises(ValueError, match=f"expected a file of format '{FORMAT}', got None"):
        quick().load(tmp_path / "x")


@pytest.mark.filterwarnings("ignore:.*for the tasks to come")  # a network of this size is soon full
@pytest.mark.parametrize(("tasks", "width"), [(5, 200), (40, 200)])
def test_file_size(tasks: int, width: int, tmp_path: Path) -> None:
    ours = quick(
        model=toy_model(width=width),
        steps=2,
        retrain_steps=0,
        grid=(0.2, 0.1),
        score=lambda logits, y: 1.0,
        when_full="train",
    )
    for t in range(tasks):
        ours.learn(toy_task(t, 32))
    ours.save(tmp_path / "l")
    weights = ours.nets.masks.free().numel()
    rest = sum(p.numel() for p in ours.model.parameters()) - weights
    header = 2600 + 300 * tasks  # settings, names, shapes, a threshold per task and layer as text; what inputs are like
    assert (tmp_path / "l").stat().st_size <= 4 * (weights + rest) + 1.1 * weights * tasks / 8 + header
    if tasks == 40:  # far below a bit per weight and task
        assert (tmp_path / "l").stat().st_size <= 4 * (weights + rest) + 6 * weights / 8 + header


@pytest.mark.filterwarnings("ignore:.*for the tasks to come")  # a network of this size is soon full
def test_three_hundred_tasks(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 3, "retrain_steps": 1, "batch_size": 8, "clip": 1.0}
    options |= {"grid": (0.3, 0.1), "score": lambda logits, y: 1.0, "when_full": "train"}
    ours = quick(**options)
    checked = {}
    for t in range(300):
        task = toy_task(t, 32)
        ours.learn(task)
        if t in (0, 17, 255, 256, 299):
            checked[t] = ours.logits(task.test().x, t)
    ours.save(tmp_path / "l")
    again = quick(model=toy_model(seed=5), **options)
    again.load(tmp_path / "l")
    for t, logits in checked.items():
        assert torch.equal(ours.logits(toy_task(t).test().x, t), logits)
        assert torch.equal(again.logits(toy_task(t).test().x, t), logits)
    assert len(ours.tasks) == 300


@both_alphas
def test_half_precision_learners_are_the_same_after_loading(alpha: float, tmp_path: Path) -> None:
    ours, again = (quick("epn", alpha=alpha, steps=20, model=toy_model().bfloat16()) for _ in range(2))
    for index in range(2):
        x, y = toy_task(index).train()
        ours.learn(make_task((x.bfloat16(), y), index=index))
    ours.save(tmp_path / "l")
    again.load(tmp_path / "l")
    inputs = toy_task(0).test().x.bfloat16()
    assert all(torch.equal(ours.logits(inputs, index), again.logits(inputs, index)) for index in range(2))


def test_powers_of_groups_are_compared(tmp_path: Path) -> None:
    def make(alpha: float) -> Strategy:
        return Strategy(toy_model(), lambda p: torch.optim.SGD([{"params": p, "alpha": alpha}], lr=0.1), steps=2)

    ours = make(2.0)
    ours.learn(toy_task(0))
    ours.save(tmp_path / "l")
    with pytest.raises(ValueError, match=r"alphas.*2\.0.*3\.0"):
        make(3.0).load(tmp_path / "l")
