"""Sparse inference: the rule that chooses between dense and sparse layers, by measured times."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import powerprop as pp
from powerprop.export import choose, sparse_layers
from powerprop_paper.models import mlp
from sparse_nets import MODELS, pruned, seeded, set_times


def test_the_rule() -> None:
    assert choose(1.0, 0.95) == "sparse"
    assert choose(1.0, 0.96) == "dense"
    assert choose(1.0, 0.5, margin=0.4) == "dense"
    assert choose(1.0, None) == "dense"


def test_the_rule_decides_by_the_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = iter([(1.0, 0.1), (1.0, 0.98), (1.0, 0.3)])  # of fc1, fc2, fc3

    def measured(calls: dict[str, object], device: object, seconds: float = 0.0) -> dict[str, float]:
        if "smaller" in calls:
            return {"dense": 9.0, "smaller": 8.0, "sparse": 5.0}
        layer = next(queue, (9.0, 5.0))  # the network once more
        return dict(zip(("dense", "sparse"), layer, strict=True))

    set_times(monkeypatch, measured)
    net = mlp([20, 40, 30, 5], generator=seeded())
    pp.prune(net, 0.8)
    made = pp.export.sparse(net, torch.randn(3, 20)).plan
    assert [(c.layer, c.form, c.dense, c.sparse) for c in made.choices] == [
        ("fc1", "sparse", 1.0, 0.1),
        ("fc2", "dense", 1.0, 0.98),
        ("fc3", "sparse", 1.0, 0.3),
    ]
    assert (made.network, made.batch, made.margin, made.speedup) == ("sparse", 3, 0.95, 1.8)


def test_a_network_that_was_fast_only_once_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(calls: dict[str, object], device: object, seconds: float = 0.0) -> dict[str, float]:
        return {n: 1.0 if n == "dense" else (2.0 if seconds == 0.1 else 0.5) for n in calls}

    set_times(monkeypatch, measured)
    made = pp.export.sparse(pruned("mlp"), MODELS["mlp"][1](3)).plan
    assert made.network == "dense"
    assert made.speedup == 1.0


def test_layers_that_are_not_sparse_are_not_measured() -> None:
    fast = pp.export.sparse(mlp([20, 40, 5], generator=seeded()), torch.randn(3, 20))
    assert [c.form for c in fast.plan.choices] == ["dense", "dense"]
    assert all(c.dense is None and "less than 50% is zero" in c.reason for c in fast.plan.choices)


def test_half_precision_stays_dense_where_there_is_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(layer: nn.Module, many: bool) -> nn.Module:
        raise RuntimeError('"addmm" not implemented')

    monkeypatch.setattr(sparse_layers, "sparse_layer", refuse)
    net = pruned("mlp").bfloat16()
    x = torch.randn(4, 20).bfloat16()
    fast = pp.export.sparse(net, x)
    assert all(c.form == "dense" and "no sparse product here" in c.reason for c in fast.plan.choices)
    torch.testing.assert_close(fast(x), net(x), rtol=0.05, atol=0.05)


def test_half_precision_runs() -> None:
    net, x = pruned("mlp").bfloat16(), torch.randn(4, 20).bfloat16()
    torch.testing.assert_close(pp.export.sparse(net, x)(x), net(x), rtol=0.05, atol=0.05)
