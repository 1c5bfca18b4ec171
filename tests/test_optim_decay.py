"""Decay of φ: by hand, around any optimiser, under masks, along schedules, and refused where it cannot be."""

import copy

import pytest
import torch
from torch.nn import functional as F

import powerprop as pp
from nets import ALPHAS, BASES, batch, net, one_weight, train, weights, wrap
from powerprop.reparam import psi, psi_inverse

every_base = pytest.mark.parametrize("base", BASES)


def test_one_step_by_hand() -> None:
    # α = 2, lr = 0.1: φ = (2, -3) moves to (1.6, -3.6), of which a decay of 0.5 leaves 0.95
    layer = one_weight([4.0, -9.0])
    optimizer = wrap(layer, "sgd", 2.0, decay=0.5, rate="paper")
    layer.weight.grad = torch.ones(1, 2)
    optimizer.step()
    assert layer.weight[0].tolist() == pytest.approx([(0.95 * 1.6) ** 2, -((0.95 * 3.6) ** 2)], rel=1e-5)


@every_base
@pytest.mark.parametrize("alpha", [1.125, 1.5, 2.0, 3.0])
def test_the_move_first_then_the_decay(base: str, alpha: float) -> None:
    """Against the textbook: after every step of the wrapper without it, φ is multiplied."""
    plain, decayed = net(), net()
    reference, optimizer = wrap(plain, base, alpha), wrap(decayed, base, alpha, decay=2.0)
    shrink = 1 - 2.0 * reference.param_groups[0]["lr"]
    for step in range(10):
        train(decayed, optimizer, 1, start=step)
        train(plain, reference, 1, start=step)
        with torch.no_grad():
            for name, master in reference.masters.items():
                w = plain.get_parameter(name)
                w.copy_(psi(psi_inverse(w.double(), alpha) * shrink, alpha))
                master.sync()
    for name, weight in weights(decayed).items():
        assert torch.allclose(weight, weights(plain)[name], rtol=2e-3, atol=2e-4), name


@pytest.mark.parametrize("alpha", ALPHAS[1:])
def test_what_is_not_needed_goes_to_zero(alpha: float) -> None:
    layer = one_weight([1e-3, -1e-3])
    optimizer = wrap(layer, "sgd", alpha, decay=1.0)
    for _ in range(50):
        layer.weight.grad = torch.zeros(1, 2)
        optimizer.step()
    # (1 - lr)^(α·steps) of the first size, where a decay of w would have left nearly all of it
    left = 1e-3 * 0.9 ** (50 * alpha)
    assert layer.weight[0].tolist() == pytest.approx([left, -left], rel=1e-3, abs=0)


@every_base
def test_masks_hold_what_they_hold(base: str) -> None:
    model = net()
    optimizer = wrap(model, base, 1.5, decay=2.0)
    generator = torch.Generator().manual_seed(0)
    used, trained = ({n: torch.rand(w.shape, generator=generator) < 0.5 for n, w in weights(model).items()
                      if n in optimizer.masters} for _ in range(2))  # fmt: skip
    optimizer.set_masks(used, trained)
    before = {n: m.theta().clone() for n, m in optimizer.masters.items()}
    train(model, optimizer, 5)
    for name, master in optimizer.masters.items():
        assert torch.equal(master.theta()[~trained[name]], before[name][~trained[name]]), name
        assert not model.get_parameter(name)[~used[name]].any(), name


def test_hidden_weights_that_are_trained_decay_too() -> None:
    layer = one_weight([4.0, -9.0, 16.0, 25.0])
    optimizer = wrap(layer, "sgd", 2.0, decay=0.5)
    used, trained = torch.tensor([[True, True, False, False]]), torch.tensor([[True, False, True, False]])
    optimizer.set_masks({"weight": used}, {"weight": trained})
    layer.weight.grad = torch.zeros(1, 4)
    optimizer.step()
    optimizer.set_masks()
    assert layer.weight[0].tolist() == pytest.approx([0.95**2 * 4.0, -9.0, 0.95**2 * 16.0, 25.0], rel=1e-6)


def test_it_follows_the_learning_rate() -> None:
    layer = one_weight([4.0, -9.0])
    optimizer = wrap(layer, "sgd", 2.0, decay=0.5)
    optimizer.param_groups[0]["lr"] = 0.0
    layer.weight.grad = torch.ones(1, 2)
    optimizer.step()
    assert layer.weight[0].tolist() == [4.0, -9.0]
    optimizer.param_groups[0]["lr"] = 0.2
    layer.weight.grad = torch.zeros(1, 2)
    optimizer.step()
    assert layer.weight[0].tolist() == pytest.approx([0.9**2 * 4.0, -(0.9**2) * 9.0], rel=1e-6)


def test_each_group_has_its_own_rate_and_power() -> None:
    model = net()
    first, *_, last = (m for m in model if isinstance(m, torch.nn.Linear))
    base = torch.optim.SGD([{"params": [first.weight], "lr": 0.1}, {"params": [last.weight], "lr": 0.2, "alpha": 1.0}])
    optimizer = pp.Powerprop(base, model, alpha=2.0, decay=0.5)
    before = [w.detach().clone() for w in (first.weight, last.weight)]
    first.weight.grad, last.weight.grad = torch.zeros_like(first.weight), torch.zeros_like(last.weight)
    optimizer.step()
    assert torch.allclose(first.weight, before[0] * 0.95**2, rtol=1e-5)
    assert torch.equal(last.weight, before[1])  # without a power there is no φ to decay


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf"), True, "much"])
def test_a_decay_that_cannot_be(bad: object) -> None:
    with pytest.raises(ValueError, match=f"decay must be a number, at least 0, got {bad!r}"):
        wrap(net(), decay=bad)


def test_alpha_one_has_no_phi_to_decay() -> None:
    with pytest.raises(ValueError, match=r"decay is of φ, and alpha = 1 has none: .*, got 0\.5"):
        wrap(net(), alpha=1.0, decay=0.5)


def test_a_step_that_would_turn_phi_around_is_refused_and_changes_nothing() -> None:
    model = net()
    optimizer = wrap(model, "sgd", 2.0, decay=10.0)
    before = copy.deepcopy(model.state_dict())
    x, y = batch(0)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match=r"group 0 would lose lr·decay = 0\.1·10 of φ in a step, which must be"):
        optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_repr_tells_it() -> None:
    assert "decay=0.25" in repr(wrap(net(), decay=0.25))
    assert "Powerprop(alpha=2, 3 weights, base=SGD" in repr(wrap(net()))
    assert "decay" not in repr(wrap(net(), "sgd")).partition("base=")[0]
