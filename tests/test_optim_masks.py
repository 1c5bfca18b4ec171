"""The two masks of the optimiser: active weights are used, trainable ones move, the others stay bit-identical."""

import math

import pytest
import torch
from torch import Tensor, nn

import powerprop as pp
from nets import BASES, batch, closing, net, one_weight, train, weights, wrap
from unseen import UNSEEN

every_base = pytest.mark.parametrize("base", ["sgd", "adam", "lion"])
every_alpha = pytest.mark.parametrize("alpha", [1.0, 1.25, 2.0, 3.0])


def random_masks(model: nn.Module, seed: int, density: float) -> pp.Masks:
    generator = torch.Generator().manual_seed(seed)
    return pp.Masks({n: torch.rand(m.shape, generator=generator) < density for n, m in pp.Masks.ones(model).items()})


def setup(base: str, alpha: float) -> tuple[nn.Sequential, pp.Powerprop, pp.Masks, pp.Masks]:
    model = net()
    optimizer = pp.Powerprop(BASES[base](list(model.parameters())), model, alpha=alpha)
    train(model, optimizer, 5)
    return model, optimizer, random_masks(model, 1, 0.6), random_masks(model, 2, 0.5)


@every_base
@every_alpha
def test_frozen_weights_are_bit_identical(base: str, alpha: float) -> None:
    model, optimizer, _, trainable = setup(base, alpha)
    before = weights(model)
    optimizer.set_masks(trainable=trainable)
    train(model, optimizer, 20, start=5)
    now = weights(model)
    for name, mask in trainable.items():
        assert torch.equal(now[name][~mask], before[name][~mask]), name
        assert not torch.equal(now[name][mask], before[name][mask]), name


@pytest.mark.parametrize("unseen", UNSEEN)
@every_alpha
def test_masks_hold_where_the_version_counter_shows_nothing(unseen: str, alpha: float) -> None:
    model = net()
    optimizer = pp.Powerprop(UNSEEN[unseen][0](list(model.parameters())), model, alpha)
    active, trainable = random_masks(model, 1, 0.6), random_masks(model, 2, 0.5)
    optimizer.set_masks(active, trainable)
    before = weights(model)
    train(model, optimizer, 10)
    for name, weight in ((n, model.get_parameter(n)) for n in active):
        assert not weight[~active[name]].any()
        assert torch.equal(weight[~trainable[name]], before[name][~trainable[name]])
        both = active[name] & trainable[name]
        assert not torch.equal(weight[both], before[name][both])
    optimizer.set_masks(trainable={n: torch.zeros_like(m) for n, m in active.items()})
    before = weights(model)
    train(model, optimizer, 3, start=10)
    assert all(torch.equal(model.get_parameter(n), before[n]) for n in active)


@every_base
@every_alpha
def test_inactive_weights_are_zero_and_come_back(base: str, alpha: float) -> None:
    model, optimizer, active, _ = setup(base, alpha)
    before = weights(model)
    optimizer.set_masks(active=active, trainable=active)
    for step in range(5):
        train(model, optimizer, 1, start=5 + step)
        assert all(not model.get_parameter(n)[~m].any() for n, m in active.items())
    optimizer.set_masks()
    now = weights(model)
    for name, mask in active.items():
        assert torch.equal(now[name][~mask], before[name][~mask])


@every_alpha
def test_dropped_weights_stay_zero(alpha: float) -> None:
    model, optimizer, active, _ = setup("momentum", alpha)
    optimizer.set_masks(active=active, trainable=active, keep=False)
    train(model, optimizer, 10, start=5)
    optimizer.set_masks()
    assert all(not model.get_parameter(n)[~m].any() for n, m in active.items())


@every_alpha
def test_hidden_but_trainable_weights_move(alpha: float) -> None:
    """Top-KAST: B ⊇ A. What is trained but not shown moves behind the optimiser."""
    model, optimizer, active, _ = setup("sgd", alpha)
    before = {n: m.theta().clone() for n, m in optimizer.masters.items()}
    optimizer.set_masks(active=active)
    train(model, optimizer, 5, start=5)
    for name, master in optimizer.masters.items():
        hidden = ~active[name]
        assert not master.param[hidden].any()
        assert not torch.equal(master.theta()[hidden], before[name][hidden])


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_the_move_of_hidden_weights_by_hand(alpha: float) -> None:
    layer = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[4.0, 9.0]]))
    optimizer = pp.Powerprop(torch.optim.SGD(layer.parameters(), lr=0.1), layer, alpha=alpha, rate="paper")
    optimizer.set_masks(active={"weight": torch.tensor([[True, False]])})
    assert layer.weight.tolist() == [[4.0, 0.0]]
    layer.weight.grad = torch.tensor([[1.0, 1.0]])
    optimizer.step()
    # α = 2: φ = (2, 3) moves by -0.1·2|φ| = (-0.4, -0.6)
    wanted = [3.9, 8.9] if alpha == 1 else [1.6**2, 2.4**2]
    assert optimizer.masters["weight"].theta()[0].tolist() == pytest.approx(wanted, rel=1e-5)
    assert layer.weight[0].tolist() == pytest.approx([wanted[0], 0.0], rel=1e-5)


@every_alpha
def test_no_nan_reaches_frozen_or_hidden_weights(alpha: float) -> None:
    model, optimizer, active, trainable = setup("sgd", alpha)
    before = {n: m.theta().clone() for n, m in optimizer.masters.items()}
    optimizer.set_masks(active=active, trainable=trainable)
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    optimizer.step()
    for name, master in optimizer.masters.items():
        assert torch.equal(master.theta()[~trainable[name]], before[name][~trainable[name]])
        assert not master.param[~active[name]].any()


@pytest.mark.parametrize("frozen", [False, True])
def test_lbfgs_minimises_over_the_trainable_weights_alone(frozen: bool) -> None:
    model = net()
    optimizer = pp.Powerprop(torch.optim.LBFGS(model.parameters(), max_iter=10), model, 1.0)
    masks = random_masks(model, 1, 0.5)
    optimizer.set_masks(None if frozen else masks, masks)
    before = weights(model)
    closure = closing(model, optimizer, *batch(0, 64))
    losses = [optimizer.step(closure).item() for _ in range(4)]
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(model.get_parameter(n)[~m], before[n][~m]) for n, m in masks.items())


def test_reset_state_zeroes_only_the_asked_entries() -> None:
    model, optimizer, _, _ = setup("adam", 2.0)
    where = torch.zeros(12, 6, dtype=torch.bool)
    where[0] = True
    optimizer.reset_state("0.weight", where)
    for key in ("exp_avg", "exp_avg_sq"):
        state: Tensor = optimizer.state[model[0].weight][key]  # type: ignore[index]
        assert not state[0].any()
        assert state[1:].any()


@every_alpha
def test_put_gives_weights_new_values(alpha: float) -> None:
    model, optimizer, _, _ = setup("sgd", alpha)
    where = torch.zeros(12, 6, dtype=torch.bool)
    where[0] = True
    before = weights(model)["0.weight"]
    optimizer.masters["0.weight"].put(where, torch.full((6,), -0.3))
    now = weights(model)["0.weight"]
    assert torch.allclose(now[0], torch.full((6,), -0.3))
    assert torch.equal(now[1:], before[1:])
    train(model, optimizer, 3, start=5)
    assert not torch.equal(model[0].weight[0], now[0])  # type: ignore[index]


def test_without_masks_alpha_one_is_the_base_again() -> None:
    _, optimizer, active, _ = setup("momentum", 1.0)
    optimizer.set_masks(active)
    optimizer.set_masks()
    assert all(m.idle for m in optimizer.masters.values())


def test_clipping_counts_trained_weights_alone() -> None:
    layer = one_weight([4.0, -9.0, 1.0])
    optimizer = wrap(layer, "sgd", 2.0)
    keep = {"weight": torch.tensor([[True, True, False]])}
    optimizer.set_masks(keep, keep)
    layer.weight.grad = torch.tensor([[3.0, 4.0, 12.0]])
    assert optimizer.clip_grad_norm_(10.0).item() == 5.0
    assert layer.weight.grad.tolist() == [[3.0, 4.0, 12.0]]
    optimizer.clip_grad_norm_(1.0)
    assert torch.allclose(layer.weight.grad, torch.tensor([[0.6, 0.8, 2.4]]))
    with pytest.raises(ValueError, match="max_norm must be positive, got 0"):
        optimizer.clip_grad_norm_(0)
