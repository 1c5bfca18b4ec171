"""Matched rates: one number ρ for each tensor, so that the plain optimiser's learning rate serves every power."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import powerprop as pp
from nets import net, one_weight, train, wrap
from powerprop.update import FARTHEST, STEEPEST, Move, _pieces, match, power_update_, textbook
from test_update import every_form, moved, only

POWERS = [1.25, 1.5, 2.0, 3.0, 5.0]
every_power = pytest.mark.parametrize("alpha", POWERS)


def proposals(count: int = 4_000, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights, and proposals with a long tail."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(count // 40, 40, generator=draw) * 0.05
    push = torch.randn(weight.shape, generator=draw) * torch.rand(weight.shape, generator=draw) ** 4 * 1e-3
    return weight, push


def rate_of(weight: Tensor, push: Tensor, alpha: float, **options: object) -> Move:
    return match([Move(weight + push, weight, alpha, rate=None, **options)])[0]  # type: ignore[arg-type]


def test_one_step_by_hand() -> None:
    # α = 2: s² = 4|w| = (16, 36), both below 4 · 4 · 6.5, and p = (-0.1, -0.1), so that ρ is their mean, 26
    # φ = (2, -3) moves by p/26 · 2|φ|
    layer = one_weight([4.0, -9.0])
    optimizer = wrap(layer, "sgd", 2.0)
    layer.weight.grad = torch.ones(1, 2)
    optimizer.step()
    phi = 2 - 0.1 / 26 * 4, 3 + 0.1 / 26 * 6
    assert layer.weight[0].tolist() == pytest.approx([phi[0] ** 2, -(phi[1] ** 2)], rel=1e-6)


@pytest.mark.parametrize("rate", ["auto", None, 2.0])
def test_other_rates_are_an_error(rate: object) -> None:
    with pytest.raises(ValueError, match='rate must be "matched" or "paper", got'):
        wrap(net(), rate=rate)


@every_form
@every_power
@pytest.mark.parametrize("masks", [0, 1, 2])
def test_every_form_is_that_of_float64(form: str, alpha: float, masks: int) -> None:
    weight, push = proposals()
    draw = torch.Generator().manual_seed(1)
    active = torch.rand(weight.shape, generator=draw) < 0.3 if masks else None
    trainable = torch.rand(weight.shape, generator=draw) < 0.6 if masks > 1 else None
    shown = weight if active is None else weight * active
    options = {"active": active, "trainable": trainable, "rate": None}
    new = moved(form, shown + push, weight, alpha, **options).double()
    wanted = textbook(Move(shown + push, weight, alpha, **options))  # type: ignore[arg-type]
    wanted = wanted if active is None else wanted * active
    assert (new - wanted).abs().max() < 2e-5 * (wanted - shown).abs().max()


@every_power
def test_the_sum_of_squared_slopes_over_proposals_is_the_equation(alpha: float) -> None:
    weight, push = (x.double() for x in proposals())
    square = alpha**2 * weight.abs() ** (2 - 2 / alpha)
    most = STEEPEST * alpha**2 * weight.abs().mean() ** (2 - 2 / alpha)
    bent = square.clamp(max=float(most))
    found = rate_of(weight, push, alpha)
    assert float(found.rate) == pytest.approx(float((bent * push**2).sum() / (push**2).sum()), rel=1e-6)  # type: ignore[arg-type]
    assert float(found.limit) == pytest.approx(float(most), rel=1e-6)


@every_form
@every_power
def test_no_step_is_farther_than_a_fraction_of_the_tensor(form: str, alpha: float) -> None:
    weight, push = proposals()
    new = moved(form, weight + 1e3 * push, weight, alpha, rate=None)
    # to first order: few weights go so far that the rule bends
    assert (new - weight).norm() < 1.5 * FARTHEST * weight.norm()


@every_form
@given(alpha=st.sampled_from(POWERS), size=st.floats(1e-4, 1e4), speed=st.floats(1e-3, 10.0), seed=st.integers(0, 1000))
def test_the_unit_of_the_weights_does_not_matter(form: str, alpha: float, size: float, speed: float, seed: int) -> None:
    """ρ has the dimension of s²: weights and proposals times c move to c times where they did."""
    weight, push = proposals(400, seed)
    push = push * speed
    there = moved(form, size * (weight + push), size * weight, alpha, rate=None)
    here = moved(form, weight + push, weight, alpha, rate=None)
    error = (there / size - here).abs()
    assert (error <= 1e-4 * (here - weight).abs() + 1e-5 * weight.abs() + 1e-6 * push.abs().max()).all()


@every_form
def test_what_is_hidden_or_frozen_has_no_part_in_it(form: str) -> None:
    weight, push = proposals()
    active, trainable = (torch.rand(weight.shape, generator=torch.Generator().manual_seed(s)) < 0.5 for s in (1, 2))
    seen = active & trainable
    wild, wilder = torch.where(seen, weight, 7.0 * weight), torch.where(seen, push, -30.0 * push)
    news = [
        moved(form, torch.where(active, w, 0) + p, w, 1.5, active=active, trainable=trainable, rate=None)
        for w, p in ((weight, push), (wild, wilder))
    ]
    torch.testing.assert_close(news[0][seen], news[1][seen], rtol=1e-5, atol=1e-9)


@every_form
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_one_proposal_that_is_no_number_does_not_spread(form: str, wrong: float) -> None:
    weight, push = proposals()
    push[3, 4] = wrong
    new = moved(form, weight + push, weight, 2.0, rate=None)
    assert new[3, 4].isnan() or new[3, 4].isinf()
    assert new.isfinite().sum() == new.numel() - 1


@every_form
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 0), ()])
def test_tensors_of_hardly_anything(form: str, shape: tuple[int, ...]) -> None:
    weight = torch.full(shape, 0.5)
    for push in (0.0, 0.01):
        new = moved(form, weight + push, weight, 1.5, rate=None)
        assert new.isfinite().all()
        if new.numel():
            assert (new.item() > 0.5) == (push > 0)


@every_form
def test_a_tensor_of_zeros_stays(form: str) -> None:
    weight = torch.zeros(4, 5)
    assert torch.equal(moved(form, weight + 0.1, weight, 2.0, rate=None), weight)


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_threads_do_not_change_a_bit(alpha: float) -> None:
    weight, push = proposals(400_000)

    def run(threads: int) -> Tensor:
        target = weight + push
        torch.set_num_threads(threads)
        try:
            power_update_([Move(target, weight, alpha, rate=None)])
        finally:
            torch.set_num_threads(1)
        return target

    assert torch.equal(run(1), run(2))


@pytest.mark.parametrize("base", ["sgd", "momentum", "adam", "adamw", "lion"])
@every_power
def test_one_learning_rate_serves_every_power(base: str, alpha: float) -> None:
    plain, powered = net(hidden=64), net(hidden=64)  # wide, for no weight changes its sign under α > 1
    reached = sum(train(plain, wrap(plain, base, 1.0), 150)[-30:])
    begun = train(powered, wrap(powered, base, alpha), 150)
    first, last = sum(begun[:30]), sum(begun[-30:])
    assert last < first
    assert last < 1.15 * reached


def test_a_chunked_tensor_is_matched_as_a_whole() -> None:
    weight, push = proposals(80_000)
    with only("torch"):
        target = weight + push
        assert len(list(_pieces(match([Move(target, weight, 1.5, rate=None)])[0]))) == 3
        power_update_([Move(target, weight, 1.5, rate=None)])
    torch.testing.assert_close(
        target.double(), textbook(Move(weight + push, weight, 1.5, rate=None)), rtol=1e-4, atol=1e-8
    )


def sharded(rank: int, folder: str) -> None:
    """One of two ranks, which train a network whose parts they share; the first writes down what comes of it."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for alpha in (1.5, 2.0):
        model = net(hidden=13)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        train(model, wrap(model, "momentum", alpha), 30)
        whole = {name: p.full_tensor() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
        if rank == 0:
            torch.save(whole, f"{folder}/{alpha}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_with_half_of_each_tensor_are_one_process(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(sharded, (str(tmp_path),), nprocs=2)
    for alpha in (1.5, 2.0):
        alone, together = net(hidden=13), torch.load(tmp_path / f"{alpha}.pt", weights_only=True)
        train(alone, wrap(alone, "momentum", alpha), 30)
        for name, p in alone.named_parameters():
            torch.testing.assert_close(together[name], p.detach(), rtol=1e-4, atol=1e-5)


def test_a_learner_says_which_rate_it_has() -> None:
    from powerprop.continual import Strategy

    learner = Strategy(net(), lambda p: torch.optim.SGD(p, lr=0.1), alpha=1.5, rate="paper")
    assert learner.optimizer.rate == "paper"
    assert Strategy(net(), lambda p: torch.optim.SGD(p, lr=0.1), alpha=1.5).optimizer.rate == "matched"
    model = net()
    given = pp.Powerprop(torch.optim.SGD(model.parameters(), lr=0.1), model, 1.5)
    with pytest.raises(
        TypeError, match="belong to the Powerprop that was given, got alpha=None, where=None, rate=paper"
    ):
        Strategy(model, given, rate="paper")
