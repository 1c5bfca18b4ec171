"""Powerprop around any optimiser: the update by hand, the exact base at α = 1, and every way training loops use it."""

import copy

import pytest
import torch
from torch.nn import functional as F

import powerprop as pp
from nets import batch, net, one_weight, train, weights, wrap


def test_one_step_by_hand() -> None:
    # α = 2: φ = (2, -3), Δ = -lr·g = (-0.1, -0.1), φ += 2|φ|Δ = (2 - 0.4, -3 - 0.6), w = φ|φ|
    layer = one_weight([4.0, -9.0])
    optimizer = wrap(layer, "sgd", 2.0, rate="paper")
    layer.weight.grad = torch.ones(1, 2)
    optimizer.step()
    assert layer.weight[0].tolist() == pytest.approx([1.6**2, -(3.6**2)], rel=1e-5)


@pytest.mark.parametrize("alpha", [1.25, 2.0, 3.0])
def test_wrapping_keeps_the_function(alpha: float) -> None:
    model = net()
    x, _ = batch(0)
    before = model(x)
    wrap(model, alpha=alpha)
    assert torch.allclose(model(x), before, atol=1e-6)


def test_grad_scaler() -> None:
    plain, scaled = net(), net()
    train(plain, wrap(plain, "momentum"), 10)
    optimizer = wrap(scaled, "momentum")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(10):
        x, y = batch(step)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(scaled(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    for name, weight in weights(plain).items():
        assert torch.allclose(weights(scaled)[name], weight, rtol=1e-4, atol=1e-5)


def test_the_model_stays_plain() -> None:
    model = net()
    keys = list(model.state_dict())
    train(model, wrap(model), 3)
    assert list(model.state_dict()) == keys
    assert list(copy.deepcopy(model).state_dict()) == keys


def test_pruned_weights_stay_pruned() -> None:
    model = net()
    optimizer = wrap(model, "momentum", 2.0)
    train(model, optimizer, 5)
    masks = pp.prune(model, 0.7)
    train(model, optimizer, 20, start=5)
    assert pp.Masks.nonzero(model) == masks


def test_parameters_without_gradient_are_left_alone() -> None:
    model = net()
    optimizer = wrap(model, "sgd")
    before = weights(model)
    model[0].weight.grad = torch.ones_like(model[0].weight)  # type: ignore[union-attr,arg-type]
    optimizer.step()
    now = weights(model)
    assert not torch.equal(now["0.weight"], before["0.weight"])
    assert all(torch.equal(now[n], before[n]) for n in before if n != "0.weight")
