"""Batch-norm recalibration: the plain average over the batches, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from powerprop import prune, recalibrate

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def batches(count: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, *shape, generator=generator) * 3 + 1 for _ in range(count)]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_statistics_are_the_average_over_the_batches(dims: int) -> None:
    norm = NORMS[dims](4, momentum=0.3)
    norm.running_mean.fill_(17.0)
    data = batches(5, 4, *[2] * dims)
    assert recalibrate(norm, data) is norm
    means = torch.stack([x.transpose(0, 1).flatten(1).mean(1) for x in data])
    variances = torch.stack([x.transpose(0, 1).flatten(1).var(1) for x in data])
    assert torch.allclose(norm.running_mean, means.mean(0), atol=1e-5)
    assert torch.allclose(norm.running_var, variances.mean(0), atol=1e-4)
    assert norm.momentum == 0.3
    assert norm.num_batches_tracked == 5


def net() -> nn.Sequential:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 16, 5),
        nn.BatchNorm1d(5, affine=False),
    )  # fmt: skip
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3, generator=generator)
    return model


def test_only_the_statistics_change() -> None:
    model = net()
    model[3].train()
    model[6].eval()
    modes = [m.training for m in model.modules()]
    before = {n: t.clone() for n, t in model.state_dict().items()}
    random = torch.get_rng_state()
    recalibrate(model, batches(3, 3, 6, 6))
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random), "dropout was active"
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == {f"{i}.{name}" for i in (1, 6) for name in ("running_mean", "running_var", "num_batches_tracked")}


def test_a_pruned_network_is_normalised_again() -> None:
    """After pruning, the outputs of the last norm have mean 0 and variance 1 again, as they had before it."""
    model, data = net(), batches(6, 3, 6, 6)
    recalibrate(model, data)
    prune(model, 0.8)
    model.eval()
    off = model(torch.cat(data)).std(0) - 1
    recalibrate(model, data)
    out = model(torch.cat(data))
    assert off.abs().max() > 0.2
    assert (out.std(0) - 1).abs().max() < 0.1
    assert out.mean(0).abs().max() < 0.1


def test_labels_may_come_along() -> None:
    one, two = net(), net()
    recalibrate(one, batches(3, 3, 6, 6))
    recalibrate(two, [(x, torch.zeros(8)) for x in batches(3, 3, 6, 6)])
    assert torch.equal(one[1].running_mean, two[1].running_mean)


def test_nothing_to_recalibrate() -> None:
    """No batch norm, or one without statistics: the model comes back, and no batch is even taken."""
    for model in (nn.Linear(3, 3), nn.GroupNorm(1, 3), nn.BatchNorm1d(3, track_running_stats=False)):
        assert recalibrate(model, iter(())) is model


def test_no_batches_is_an_error_and_changes_nothing() -> None:
    model = net()
    model[1].running_mean.fill_(2.0)
    with pytest.raises(ValueError, match="recalibrate needs at least one batch, got none"):
        recalibrate(model, [])
    with pytest.raises(TypeError, match="a batch must be a tensor, begin with one or map keywords to them, got str"):
        recalibrate(model, ["image.jpg"])
    assert (model[1].running_mean == 2).all()


def test_a_failing_batch_leaves_the_old_statistics() -> None:
    def failing() -> Iterator[Tensor]:
        yield from batches(2, 3, 6, 6)
        raise OSError("the disk is gone")

    model = net()
    model[1].running_mean.fill_(2.0)
    with pytest.raises(OSError, match="the disk is gone"):
        recalibrate(model, failing())
    assert (model[1].running_mean == 2).all()
    assert model[1].num_batches_tracked == 0
    assert model[1].momentum == 0.1
    assert model.training
