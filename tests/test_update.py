"""Powerprop's rule in its forms: the textbook through φ in float64, torch's two, and the kernel's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from powerprop import kernel, update
from powerprop.update import Move, power_update_, textbook

INF, NAN = math.inf, math.nan
TINY = torch.finfo(torch.float32).tiny
NO_KERNEL = (None, "off")
ALPHAS = [1.01, 1.125, 1.375, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0]
FORMS = ["torch", "batched", *(["kernel"] if "kernel" in kernel.backend() and kernel._loaded()[0] else [])]
every_form = pytest.mark.parametrize("form", FORMS)
every_alpha = pytest.mark.parametrize("alpha", ALPHAS)


@contextmanager
def only(form: str) -> Iterator[None]:
    """`power_update_` in one form: the kernel's, torch's for a CPU, or the one for all devices."""
    with (
        mock.patch.object(kernel, "_loaded", wraps=kernel._loaded) as loaded,
        mock.patch.object(update, "_by_bits", wraps=update._by_bits) as by_bits,
    ):
        if form != "kernel":
            loaded.side_effect = lambda: NO_KERNEL
        if form == "batched":
            by_bits.side_effect = lambda *_: False
        yield


def moved(form: str, target: Tensor, before: Tensor, alpha: float, **options: object) -> Tensor:
    """What a form makes of copies of these."""
    move = Move(target.clone(), before.clone(), alpha, **options)  # type: ignore[arg-type]
    with only(form):
        power_update_([move])
    return move.target


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def agree(form: str, a: Tensor, b: Tensor, before: Tensor) -> bool:
    """To the bit by the kernel; torch's functions round another way in vectors than in what is left over."""
    if form == "kernel":
        return torch.equal(a, b)
    return bool(((a == b) | ((a - b).abs() <= 1e-5 * (b - before).abs() + 2 * ulp(b))).all())


def ulp(x: Tensor) -> Tensor:
    """The distance to the next float32, as float64."""
    x = x.abs().float()
    return torch.nextafter(x, torch.tensor(INF)).double() - x.double()


def cases(alpha: float, count: int = 40_000, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Targets, weights from 1e-38 to 1e3, and r from 1e-8 to 1e4, of all signs."""
    draw = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (2, count), generator=draw).double() * 2 - 1
    before = (signs[0] * 10 ** (torch.rand(count, generator=draw, dtype=torch.float64) * 40.9 - 37.9)).float()
    wanted = signs[1] * 10 ** (torch.rand(count, generator=draw, dtype=torch.float64) * 12 - 8)
    slope = alpha * before.double().sign() * before.double().abs() ** (1 - 2 / alpha)
    target = (before.double() + wanted / slope).float()
    before, target = before[target.isfinite()], target[target.isfinite()]
    r = (target - before).double() * alpha * before.double().sign() * before.double().abs() ** (1 - 2 / alpha)
    return target, before, r


# --- the forms against each other -----------------------------------------------------------------------------------


@every_form
@every_alpha
def test_a_step_is_that_of_float64(form: str, alpha: float) -> None:
    target, before, r = cases(alpha)
    new, wanted, start = (
        moved(form, target, before, alpha).double(),
        textbook(Move(target, before, alpha)),
        before.double(),
    )
    step = (target - before).double()  # as the forms have it, rounded once
    wanted = textbook(Move(start + step, start, alpha))
    wanted = torch.where(wanted.abs() < TINY, 0.0, wanted)
    inside = (wanted.abs() < 3.4e38) & ((wanted == 0) | (wanted.abs() > 1.001 * TINY))
    near = inside & (r.abs() < 0.01)
    assert near.sum() > 10_000
    error = (new - wanted).abs() / ulp(torch.maximum(wanted.abs(), start.abs()))
    if form == "kernel":
        assert error[near].max() <= 1
    else:  # log2 of float32 and exponents of float32 are coarse where |w| is far from 1 and α large
        usual = near & (start.abs() > 1e-10)
        assert error[usual].max() <= (1 if alpha <= 4 else 1.5)
        assert error[near].max() <= (2 if alpha <= 4 else 5)
    far = inside & (r.abs() >= 0.01)
    assert far.sum() > 3_000
    assert ((new - wanted).abs()[far] <= 1e-5 * (wanted - start).abs()[far]).all()
    beyond = wanted.abs() > 3.5e38
    assert (new[beyond] == wanted[beyond].sign() * INF).all()


@every_alpha
def test_float64_weights_keep_their_precision(alpha: float) -> None:
    target, before, r = cases(alpha)
    target, before = target.double(), before.double()
    wanted, new = textbook(Move(target, before, alpha)), target.clone()
    power_update_([Move(new, before, alpha)])
    usual = r.abs() < 1e3
    change = torch.maximum((wanted - before).abs(), before.abs() * 1e-5)
    assert ((new - wanted).abs()[usual] <= 1e-9 * change[usual]).all()


def noisy(steps: int, weights: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    before = torch.randn(weights, generator=draw) * 0.3
    before += before.sign() * 0.1
    return before, torch.randn(steps, weights, generator=draw) * 1e-4


def keeping_phi(before: np.ndarray, noise: np.ndarray, alpha: float) -> np.ndarray:
    """φ in the precision of the weights from step to step, as Powerprop was first written."""
    phi = (np.sign(before) * np.abs(before).astype(np.float64) ** (1 / alpha)).astype(before.dtype)
    for push in noise:
        power = np.abs(phi) ** before.dtype.type(alpha - 1)
        weight = phi * power
        phi += alpha * power * ((weight + push) - weight)
    return phi * np.abs(phi) ** (alpha - 1)


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_fifty_thousand_noisy_steps_stay_as_near_to_float64_as_with_phi_kept(alpha: float) -> None:
    before, noise = noisy(50_000, 48)
    exact = keeping_phi(before.double().numpy(), noise.double().numpy(), alpha)
    limit = np.median(np.abs(keeping_phi(before.numpy(), noise.numpy(), alpha) / exact - 1))
    for form in [f for f in FORMS if f != "batched"]:
        weight, old = before.clone(), torch.empty_like(before)
        move = Move(weight, old, alpha)
        with only(form), torch.no_grad():
            for push in noise:
                old.copy_(weight)
                weight.add_(push)
                power_update_([move])
        assert np.median(np.abs(weight.numpy() / exact - 1)) <= 1.1 * limit


# --- what must hold to the bit --------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("alpha", [1.0, *ALPHAS, 7.0, 50.0])
def test_a_move_of_zero_changes_no_bit(form: str, alpha: float) -> None:
    before = torch.cat([cases(3.0)[1], floats(TINY, -TINY, 3.4e38, -3.4e38, 1.0, 0.0)])
    assert same_bits(moved(form, before, before, alpha), before)


@every_form
@pytest.mark.parametrize("alpha", [*ALPHAS, 7.0])
def test_zero_stays_zero_whatever_the_move(form: str, alpha: float) -> None:
    target = floats(0.0, 1e-30, -1.0, 1e30, INF, -INF, NAN, -0.0)
    for zero in (0.0, -0.0):
        assert same_bits(moved(form, target, torch.full((8,), zero), alpha), torch.zeros(8))


@every_form
@pytest.mark.parametrize("alpha", [1.01, 1.5, 2.0, 5.0, 7.0])
def test_infinite_and_undefined_moves_show(form: str, alpha: float) -> None:
    before = floats(1.0, -1.0, 1.0, -1.0, 1.0, 1e-38, INF, NAN)
    target = floats(INF, INF, -INF, -INF, NAN, INF, 1.0, 1.0)
    new = moved(form, target, before, alpha)
    np.testing.assert_array_equal(new, [INF, INF, -INF, -INF, NAN, INF, NAN, NAN])


@every_form
@pytest.mark.parametrize("alpha", [1.0, 1.01, 1.5, 2.0, 5.0, 7.0])
def test_hidden_weights_that_are_undefined_stay_so(form: str, alpha: float) -> None:
    theta = torch.zeros(8)
    target, before = floats(0.0, 1e-20, 1e-3, -1e-3, 0.2, -1.0, 1e3, -1e30), torch.full((8,), NAN)
    moved(form, target, before, alpha, active=torch.zeros(8, dtype=torch.bool), theta=theta)
    assert theta.isnan().all()


@every_form
def test_results_that_are_no_normal_numbers_are_zero(form: str) -> None:
    """w₀(1 + r)² with r = 2·move: a move of -1/2 makes an end of any weight, one of 0 leaves the smallest."""
    before = floats(2 * TINY, 2 * TINY, TINY, TINY / 2, -TINY / 4)
    target = floats(-0.2, 2 * TINY, TINY, TINY / 2, -TINY / 4)
    assert same_bits(moved(form, target, before, 2.0), floats(0.0, 2 * TINY, TINY, 0.0, 0.0))


@every_form
def test_alpha_one_takes_the_target_as_it_is(form: str) -> None:
    target = floats(0.1, -0.0, NAN, INF, TINY / 8, 1e38)
    assert same_bits(moved(form, target, floats(1e8, 1, 2, 3, 4, 5), 1.0), target)


@every_form
def test_signs_may_be_crossed(form: str) -> None:
    """α = 2, w₀ = 1/4: φ = 1/2 moves by 2·|φ|·(-1) to -1/2, and w to -1/4."""
    np.testing.assert_array_equal(moved(form, floats(-0.75), floats(0.25), 2.0), [-0.25])
    np.testing.assert_allclose(moved(form, floats(-1.75), floats(0.25), 4.0), [-(3**4) * 0.25], rtol=1e-6)


# --- masks, θ, decay, shrink ----------------------------------------------------------------------------------------

ON = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0]).bool()
FREE = torch.tensor([1, 1, 0, 0, 1, 1, 0, 0]).bool()
START = floats(0.25, -0.25, 0.5, 0.0, 0.25, -1.0, 2.0, 0.0)
# α = 2: the weight w₀ = ±1/4 that is pushed outwards by 1/4 has r = 1/2, w = w₀·(3/2)² = ±9/16; inwards w₀/4 = ±1/16.
MASKED = {
    (False, False): ([0.5, -0.5, 0.75, 1.0, 0.5, -1.5, 1.75, 1.0], [0.5625, -0.5625, 1.125, 0, 0.5625, -4.0, 0.5, 0]),
    (True, False): ([0.5, -0.5, 0.75, 1.0, 0.25, -0.5, -0.25, 1.0], [0.5625, -0.5625, 1.125, 0, 0.5625, -4.0, 0.5, 0]),
    (False, True): ([0.5, -0.5, 0.75, 1.0, 0.5, -1.5, 1.75, 1.0], [0.5625, -0.5625, 0.5, 0, 0.5625, -4.0, 2.0, 0]),
    (True, True): ([0.5, -0.5, 0.75, 1.0, 0.25, -0.5, -0.25, 1.0], [0.5625, -0.5625, 0.5, 0, 0.5625, -4.0, 2.0, 0]),
}


@every_form
@pytest.mark.parametrize("masks", MASKED)
def test_masks_worked_out_by_hand(form: str, masks: tuple[bool, bool]) -> None:
    """The target is that of what was shown: hidden weights start from 0 there, and from θ in the rule."""
    target, wanted = map(floats_of, MASKED[masks])
    active, trainable, theta = ON if masks[0] else None, FREE if masks[1] else None, torch.full((8,), NAN)
    shown = moved(form, target, START, 2.0, active=active, trainable=trainable, theta=theta)
    assert same_bits(theta, wanted)
    assert same_bits(shown, wanted if active is None else torch.where(ON, wanted, 0.0))


def floats_of(values: list[float]) -> Tensor:
    return floats(*values)


@every_form
@pytest.mark.parametrize("masks", [(False, False), (True, False), (False, True), (True, True)])
def test_alpha_one_with_masks_adds_to_what_is_hidden(form: str, masks: tuple[bool, bool]) -> None:
    target, theta = floats(1, 2, 3, 4, 5, 6, 7, 8), START.clone()
    active, trainable = ON if masks[0] else None, FREE if masks[1] else None
    shown = moved(form, target, START, 1.0, active=active, trainable=trainable, theta=theta)
    wanted = target if active is None else torch.where(ON, target, START + target)
    wanted = wanted if trainable is None else torch.where(FREE, wanted, START)
    assert same_bits(theta, wanted)
    assert same_bits(shown, wanted if active is None else torch.where(ON, wanted, 0.0))


@every_form
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_frozen_weights_keep_their_bits_and_hidden_ones_are_zero(form: str, alpha: float) -> None:
    """Whatever stands there: NaN with a payload, infinities, denormals, -0."""
    odd = torch.tensor([0x7FC12345, 0x7F800000, -0x800000, 1, -0x80000000, 0x3F800000] * 24).int().view(torch.float32)
    for junk in (NAN, INF, -INF, 1.0):
        frozen = torch.zeros(odd.shape, dtype=torch.bool)
        theta = torch.empty_like(odd)
        kept = moved(form, torch.full_like(odd, junk), odd, alpha, trainable=frozen, theta=theta, shrink=0.5)
        assert same_bits(kept, odd)
        assert same_bits(theta, odd)
        hidden = moved(form, torch.full_like(odd, junk), odd, alpha, active=frozen)
        assert same_bits(hidden, torch.zeros_like(odd))


@every_form
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 3.0])
def test_decays_and_shrinking_are_those_of_the_textbook(form: str, alpha: float) -> None:
    draw = torch.Generator().manual_seed(3)
    before = torch.randn(300, generator=draw)
    active, trainable = torch.rand(300, generator=draw) < 0.5, torch.rand(300, generator=draw) < 0.7
    target = torch.where(active, before, 0.0) + 0.01 * torch.randn(300, generator=draw)
    for shrink in (1.0, 0.75, -0.25, torch.tensor(0.75)):
        for decay in ((0.0, 0.0), (0.01, 0.02), (0.0, 0.5)):
            options = {"active": active, "trainable": trainable, "shrink": shrink, "decay": decay}
            theta = torch.empty_like(before)
            moved(form, target, before, alpha, theta=theta, **options)
            wanted = textbook(Move(target, before, alpha, **options))  # type: ignore[arg-type]
            torch.testing.assert_close(theta.double(), wanted, rtol=3e-6, atol=1e-7)
            assert same_bits(theta[~trainable], before[~trainable])


@every_form
def test_theta_may_be_the_memory_of_before(form: str) -> None:
    target, before, _ = cases(1.5, 70_000)
    wanted, theta = moved(form, target, before, 1.5), before.clone()
    with only(form):
        power_update_([Move(target, theta, 1.5, theta=theta)])
    assert same_bits(theta, wanted)
    assert same_bits(target, wanted)


# --- shapes, places, devices ----------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("size", [0, 1, 15, 16, 127, 128, 129, 300, (1 << 15) + 1, 100_003])
def test_a_weight_does_not_depend_on_its_neighbours(form: str, size: int) -> None:
    target, before, _ = cases(1.5, 101_000)
    target, before = target[:size], before[:size]
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    assert agree(
        form, moved(form, target[order], before[order], 1.5), moved(form, target, before, 1.5)[order], before[order]
    )


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels last": lambda t: t.view(20, 30, 10, 10).contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.view(600, 100).t(),
    "every other": lambda t: torch.stack([t, t], 1)[:, 0],
    "a row of more": lambda t: torch.stack([t, t])[1],
    "no dimensions": lambda t: t[5],
    "none": lambda t: t[:0].view(0, 7),
}


@every_form
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_weight_does_not_depend_on_its_place_in_memory(form: str, layout: str) -> None:
    target, before, _ = cases(1.5, 61_000)
    active = before > 0
    wanted = moved(form, target[:60_000], before[:60_000], 1.5, active=active[:60_000])
    laid = [LAYOUTS[layout](t[:60_000]) for t in (target, before, active)]
    with only(form):
        power_update_([Move(laid[0], laid[1], 1.5, laid[2])])
    dense = layout != "every other"  # which the kernel leaves to torch
    assert agree(form if dense else "torch", laid[0], LAYOUTS[layout](wanted), laid[1])


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_results_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    target, before, _ = cases(1.5, 300_000)
    active, now = before > 0, torch.get_num_threads()
    wanted = moved("kernel", target, before, 1.5, active=active)
    torch.set_num_threads(threads)
    try:
        assert same_bits(moved("kernel", target, before, 1.5, active=active), wanted)
    finally:
        torch.set_num_threads(now)


def everything(device: str, alpha: float) -> list[Move]:
    draw = torch.Generator().manual_seed(5)
    moves = []
    for shape in ((3, 4), (5,), ()):
        before, target = (torch.randn(shape, generator=draw) for _ in range(2))
        active, trainable = (torch.rand(shape, generator=draw) < 0.5 for _ in range(2))
        tensors = [t.to(device) for t in (target, before, active, trainable, torch.zeros(shape))]
        options = {"shrink": 0.9, "decay": (0.1, 0.2)} if shape == (5,) else {}
        moves += [Move(*tensors[:2], alpha, *tensors[2:], **options), Move(tensors[1].clone(), tensors[1], alpha)]  # type: ignore[arg-type]
    return moves


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_no_form_for_an_accelerator_asks_it_for_an_answer(alpha: float) -> None:
    """Tensors without numbers refuse to say any."""
    power_update_(everything("meta", alpha))


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_it_compiles_to_one_graph(alpha: float) -> None:
    torch.compiler.reset()
    compiled, plain = everything("cpu", alpha), everything("cpu", alpha)
    torch.compile(power_update_, backend="eager", fullgraph=True)(compiled)
    power_update_(plain)
    for a, b in zip(compiled, plain, strict=True):
        torch.testing.assert_close(a.target, b.target, rtol=1e-5, atol=0)
        torch.testing.assert_close(a.theta, b.theta, rtol=1e-5, atol=0)


def test_it_can_be_differentiated_by_the_target() -> None:
    """∂w/∂target = α²|w₀|^(2-2/α) where the move is 0: the paper's effective rate."""
    start = floats(0.5, -0.25, 0.1)
    leaf = start.clone().requires_grad_()
    target = leaf * 1
    power_update_([Move(target, start, 1.5)])
    target.sum().backward()
    torch.testing.assert_close(leaf.grad, 1.5**2 * start.abs() ** (2 - 2 / 1.5))


# --- invariants -----------------------------------------------------------------------------------------------------

weights = st.floats(-1e3, 1e3, width=32).filter(lambda x: abs(x) >= TINY)
powers = st.floats(1.01, 5.0)


@given(weights, st.floats(-1e3, 1e3, width=32), st.floats(-1e3, 1e3, width=32), powers)
def test_further_targets_lead_further(before: float, one: float, other: float, alpha: float) -> None:
    for form in FORMS:
        low, high = moved(form, floats(min(one, other), max(one, other)), floats(before, before), alpha)
        assert low <= high or low - high <= 1e-5 * abs(float(low - before))


@given(weights, st.floats(-1e3, 1e3, width=32), powers)
def test_forms_agree(before: float, target: float, alpha: float) -> None:
    start = floats(before)
    step = (floats(target) - start).double()
    wanted = textbook(Move(start.double() + step, start.double(), alpha))
    for form in FORMS:
        new = moved(form, floats(target), start, alpha).double()
        error, scale = (new - wanted).abs(), torch.maximum(wanted.abs(), start.double().abs())
        assert error <= 1e-5 * (wanted - start).abs() + 5 * ulp(scale) or wanted.abs() < 1.001 * TINY or wanted > 3.4e38


@given(weights, st.floats(-1e3, 1e3, width=32), powers)
def test_the_mirror_image_moves_to_the_mirror_image(before: float, target: float, alpha: float) -> None:
    for form in FORMS:
        new = moved(form, floats(target, -target), floats(before, -before), alpha)
        assert new[0] == -new[1]
