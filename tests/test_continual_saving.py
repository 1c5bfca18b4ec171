"""Learners on disk: what does not fit is refused before anything is touched, and older files are still read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nets import same
from powerprop.continual import Strategy
from powerprop.continual.saving import read_learner, write_learner
from tasks import CLASSES, FEATURES, learner, toy_task


def net(bias: bool = True, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 16, bias=bias), nn.ReLU(), nn.Linear(16, CLASSES, bias=bias))


def saved(path: Path, method: str = "epn", **options: Any) -> Strategy:
    ours = learner(method, steps=10, **options)
    ours.learn(toy_task(0))
    ours.save(path)
    return ours


def refused(ours: Strategy, path: Path, message: str) -> None:
    """The file is an error, and the learner is as it was."""
    before = {n: t.clone() for n, t in ours.state()[0].items()}
    with pytest.raises(ValueError, match=message):
        ours.load(path)
    after = ours.state()[0]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], t) for n, t in after.items())
    assert ours.tasks == []


def test_every_name_and_shape_of_the_model_is_compared(tmp_path: Path) -> None:
    saved(tmp_path / "with", model=net())
    saved(tmp_path / "without", model=net(bias=False))
    there, here = r"\{'model/0.bias': \(16,\), 'model/2.bias': \(3,\)\}", r"\{\}"
    refused(learner(model=net(bias=False)), tmp_path / "with", f"has {there}, this one has {here}")
    refused(learner(model=net()), tmp_path / "without", f"has {here}, this one has {there}")
    normed = nn.Sequential(*net(), nn.BatchNorm1d(CLASSES))
    refused(learner(model=normed), tmp_path / "with", r"has \{\}, this one has .*'model/3.running_mean': \(3,\)")


def test_heads_and_the_number_of_tasks_are_compared(tmp_path: Path) -> None:
    saved(tmp_path / "heads", head_count=2)
    plain = learner(head_count=2)
    plain.heads = None
    refused(plain, tmp_path / "heads", "the saved learner has heads 'heads', this one has None")
    saved(tmp_path / "two", "packnet", tasks=2)
    refused(learner("packnet", tasks=5), tmp_path / "two", "the saved learner has total_tasks 2, this one has 5")


def test_damaged_masks_leave_the_learner_as_it_was(tmp_path: Path) -> None:
    ours = saved(tmp_path / "l")
    tensors, data = ours.state()
    tensors["masks/fc1.weight"] = tensors["masks/fc1.weight"][:0]
    write_learner(tmp_path / "l", tensors, data)
    refused(learner(), tmp_path / "l", "owners among 1 tasks take 1 bit planes, got 0")


def test_the_layers_that_share_tasks_are_compared(tmp_path: Path) -> None:
    saved(tmp_path / "l", model=net())
    frozen = net()
    frozen[0].weight.requires_grad_(False)
    message = r"has masks of \['0.weight', '2.weight'\], this one shares \['2.weight'\]"
    refused(learner(model=frozen), tmp_path / "l", message)


def test_a_file_without_the_newer_fields_is_read(tmp_path: Path) -> None:
    ours = saved(tmp_path / "l")
    tensors, data = read_learner(tmp_path / "l")
    del data["heads"], tensors["masks/signature.sizes"]
    for name in ("means", "variance"):
        tensors[f"masks/signature.{name}"] = tensors.pop(f"masks/signature.{name}.{FEATURES}")
    write_learner(tmp_path / "l", tensors, data)
    again = learner(model=None, seed=0)
    again.load(tmp_path / "l")
    assert same(again.model, ours.model)
    x = toy_task(0).test().x
    assert torch.equal(again.nets.signatures.distance(x), ours.nets.signatures.distance(x))


def test_a_learner_without_tasks_is_saved_and_read(tmp_path: Path) -> None:
    ours, again = learner(), learner()
    ours.save(tmp_path / "l")
    again.load(tmp_path / "l")
    for each in (ours, again):
        each.learn(toy_task(0))
    assert same(ours.model, again.model)
