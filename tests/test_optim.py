"""Powerprop around any optimiser: the update by hand, the exact base at α = 1, and every way training loops use it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import powerprop as pp
from nets import ALPHAS, BASES, batch, closing, net, one_weight, same, train, weights, wrap
from powerprop.reparam import psi, psi_inverse

every_alpha = pytest.mark.parametrize("alpha", ALPHAS)
every_base = pytest.mark.parametrize("base", BASES)


def test_one_step_by_hand() -> None:
    # α = 2: φ = (2, -3), Δ = -lr·g = (-0.1, -0.1), φ += 2|φ|Δ = (2 - 0.4, -3 - 0.6), w = φ|φ|
    layer = one_weight([4.0, -9.0])
    optimizer = wrap(layer, "sgd", 2.0)
    layer.weight.grad = torch.ones(1, 2)
    optimizer.step()
    assert layer.weight[0].tolist() == pytest.approx([1.6**2, -(3.6**2)], rel=1e-5)


def reference(base: str, alpha: float, steps: int) -> nn.Module:
    """The update as the paper writes it, with fresh tensors and no shortcuts."""
    model = net()
    optimizer = BASES[base](list(model.parameters()))
    chosen = [m.weight for m in model if isinstance(m, nn.Linear)]
    phis = [psi_inverse(w.detach().double(), alpha) for w in chosen]
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before = [w.detach().clone() for w in chosen]
        optimizer.step()
        with torch.no_grad():
            for i, (w, old) in enumerate(zip(chosen, before, strict=True)):
                phis[i] = phis[i] + (w - old).double() * alpha * phis[i].abs() ** (alpha - 1)
                w.copy_(psi(phis[i], alpha))
    return model


@every_base
@pytest.mark.parametrize("alpha", [1.125, 1.3, 2.0, 4.0])
def test_follows_the_paper_s_update(base: str, alpha: float) -> None:
    model = net()
    train(model, wrap(model, base, alpha), 30)
    wanted = weights(reference(base, alpha, 30))
    for name, weight in weights(model).items():
        assert torch.allclose(weight, wanted[name], rtol=2e-3, atol=2e-4), name


@every_base
def test_alpha_one_is_the_base_optimiser_bit_for_bit(base: str) -> None:
    plain, wrapped = net(), net()
    losses = train(plain, BASES[base](list(plain.parameters())), 40)
    assert train(wrapped, wrap(wrapped, base, 1.0), 40) == losses
    assert same(plain, wrapped)


@every_alpha
def test_learns(alpha: float) -> None:
    model = net()
    losses = train(model, wrap(model, "sgd", alpha), 200)
    assert sum(losses[-20:]) < 0.9 * sum(losses[:20])


@pytest.mark.parametrize("alpha", [1.25, 2.0, 3.0])
def test_wrapping_keeps_the_function(alpha: float) -> None:
    model = net()
    x, _ = batch(0)
    before = model(x)
    wrap(model, alpha=alpha)
    assert torch.allclose(model(x), before, atol=1e-6)


def test_schedulers_act_on_the_base() -> None:
    model = net()
    optimizer = wrap(model, "sgd")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    train(model, optimizer, 1)
    scheduler.step()
    assert optimizer.base.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_closures(alpha: float) -> None:
    plain, closed = net(), net()
    train(plain, wrap(plain, "adam", alpha), 5)
    optimizer = wrap(closed, "adam", alpha)
    for step in range(5):
        assert optimizer.step(closing(closed, optimizer, *batch(step))).item() > 0
    assert same(plain, closed)


def test_lbfgs_which_calls_its_closure_many_times() -> None:
    model = net()
    optimizer = pp.Powerprop(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4), model, alpha=1.5)
    closure = closing(model, optimizer, *batch(0, 64))
    before = optimizer.step(closure).item()
    assert closure().item() < before


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


def test_hooks_and_repr() -> None:
    model = net()
    optimizer = wrap(model)
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(model, optimizer, 2)
    assert calls == ["post", "post"]
    assert "Powerprop(alpha=2, 3 weights, base=SGD" in repr(optimizer)
