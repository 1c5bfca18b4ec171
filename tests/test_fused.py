"""The compiled step: against torch's, step by step, with masks and frozen bits, and through checkpoints."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import powerprop as pp
from nets import batch, closing, net, same, train
from powerprop.absorb import masked
from powerprop.fused import build
from powerprop.fused.kernel import GROUP, ITEM, kernel
from powerprop.power import psi

pytestmark = pytest.mark.skipif(kernel() is None, reason="there is no C compiler")

Base = Callable[[Any], torch.optim.Optimizer]
BASES: dict[str, Base] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.1, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "maximize": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.5, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=1e-1),
    "adamw maximize": lambda p: torch.optim.AdamW(p, lr=1e-5, betas=(0.8, 0.95), maximize=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
}
ONE_PASS = [name for name in BASES if name != "rmsprop"]
every_base = pytest.mark.parametrize("base", BASES)
some_bases = pytest.mark.parametrize("base", ["sgd", "nesterov", "adamw", "rmsprop"])
every_alpha = pytest.mark.parametrize("alpha", [1.0, 1.125, 1.3, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 2.75])


def made(base: str, alpha: float, fused: bool | None, **options: Any) -> tuple[nn.Module, pp.Powerprop]:
    """At rates that suit α: a training that diverges amplifies rounding beyond all bounds."""
    model = net(hidden=40)
    optimizer = BASES[base](model.parameters())
    optimizer.param_groups[0]["lr"] /= alpha**2
    return model, pp.Powerprop(optimizer, model, alpha, fused=fused, **options)


def close(a: nn.Module, b: nn.Module, tolerance: float = 2e-3) -> bool:
    """Equal to rounding, which a chaotic training amplifies."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(
        float((x - y).detach().abs().max()) <= tolerance * float(y.detach().abs().max() + 1e-3) for x, y in pairs
    )


def masks(optimizer: pp.Powerprop, share: float, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.rand(m.param.shape, generator=generator) < share for n, m in optimizer.masters.items()}


@every_base
@every_alpha
def test_200_steps_with_masks_and_frozen_bits(base: str, alpha: float) -> None:
    """Dense, then hidden and frozen weights at once, then both masks the same and the rest dropped."""
    (one, fast), (other, slow) = made(base, alpha, True), made(base, alpha, False)
    for optimizer, model in ((fast, one), (slow, other)):
        train(model, optimizer, 70)
        active, trainable = masks(optimizer, 0.8, 1), masks(optimizer, 0.5, 2)
        optimizer.set_masks(active, trainable)
        optimizer.freeze([model[0].bias])
        theta = {n: m.theta().clone() for n, m in optimizer.masters.items()}
        bias = model[0].bias.detach().clone()
        train(model, optimizer, 70, start=70)
        assert torch.equal(model[0].bias, bias)
        for name, master in optimizer.masters.items():
            held = ~trainable[name]
            assert torch.equal(master.theta()[held], theta[name][held]), f"{name}: frozen weights moved"
            assert torch.equal(master.param, master.theta().masked_fill(~active[name], 0))
        optimizer.set_masks(active, active, keep=False)
        train(model, optimizer, 60, start=140)
    assert (fast._one_pass is not None and fast._one_pass.items is not None) == (base in ONE_PASS)
    assert close(one, other)


@every_base
@every_alpha
def test_one_step_is_the_same_to_rounding(base: str, alpha: float) -> None:
    """No room for chaos here: a few units in the last place."""
    (one, fast), (other, slow) = made(base, alpha, True), made(base, alpha, False)
    for step in range(2):
        for model, optimizer in ((one, fast), (other, slow)):
            train(model, optimizer, 1, start=step)
        for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=1e-6)


@some_bases
@pytest.mark.parametrize("alpha", [1.0, 1.375, 2.0])
@pytest.mark.parametrize("method", [lambda: pp.RigL(0.8, steps=60, interval=5), lambda: pp.TopKAST(0.8, decay=1e-2)])
def test_sparsifiers(base: str, alpha: float, method: Callable[[], Any]) -> None:
    (one, fast), (other, slow) = (made(base, alpha, fused, sparsify=method()) for fused in (True, False))
    for model, optimizer in ((one, fast), (other, slow)):
        train(model, optimizer, 4)
    assert close(one, other, 1e-4)
    train(one, fast, 56, start=4)
    assert fast.active.density() == pytest.approx(0.2, abs=0.01)


@some_bases
@pytest.mark.parametrize("alpha", [1.0, 1.375, 2.0, 3.0])
@pytest.mark.parametrize("first", [True, False])
def test_checkpoints_in_both_directions(base: str, alpha: float, first: bool) -> None:
    model, optimizer = made(base, alpha, first)
    optimizer.set_masks(masks(optimizer, 0.8, 1), masks(optimizer, 0.5, 2))
    train(model, optimizer, 10)
    again, resumed = made(base, alpha, not first)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [set(s) for s in resumed.state_dict()["state"].values()] == [
        set(s) for s in optimizer.state_dict()["state"].values()
    ]
    train(model, optimizer, 10, start=10)
    train(again, resumed, 10, start=10)
    assert close(again, model, 1e-4)


@pytest.mark.parametrize("base", ONE_PASS)
@pytest.mark.parametrize("alpha", [1.3, 2.0])
def test_the_state_is_the_one_that_torch_makes(base: str, alpha: float) -> None:
    states = []
    for fused in (True, False):
        model, optimizer = made(base, alpha, fused)
        train(model, optimizer, 3)
        states.append(optimizer.state_dict()["state"])
    for mine, theirs in zip(states[0].values(), states[1].values(), strict=True):
        assert list(mine) == list(theirs)
        for key, value in mine.items():
            assert (value.dtype, value.shape, value.device) == (
                theirs[key].dtype,
                theirs[key].shape,
                theirs[key].device,
            )
            torch.testing.assert_close(value, theirs[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_no_bit(threads: int) -> None:
    before = torch.get_num_threads()
    models = []
    for number in (1, threads):
        torch.set_num_threads(number)
        model = nn.Linear(300, 200)
        with torch.no_grad():
            model.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
            model.bias.zero_()
        optimizer = pp.Powerprop(torch.optim.AdamW(model.parameters()), model, 1.375, fused=True)
        for step in range(3):
            model.weight.grad = torch.randn(200, 300, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        models.append(model)
    torch.set_num_threads(before)
    assert same(*models)


@settings(max_examples=60)
@given(
    alpha=st.one_of(st.sampled_from([1.125, 1.25, 1.375, 1.5, 1.75, 2.0, 3.0, 4.0, 5.0, 9.0]), st.floats(1.01, 9.5)),
    values=st.lists(st.floats(-(2.0**12), 2.0**12, width=32), min_size=1, max_size=70),
)
def test_the_power_is_accurate(alpha: float, values: list[float]) -> None:
    """|φ|^(α-1) to a millionth, and exactly 0 at 0."""
    ours = kernel()
    assert ours is not None
    phi = torch.tensor(values)
    phi[phi.abs() < 1e-30 ** (1 / alpha)] = 0
    wanted = phi.double().abs().pow(alpha - 1)
    torch.testing.assert_close(ours.power(phi, alpha).double(), wanted, rtol=2e-6, atol=0.0)


@pytest.mark.parametrize("alpha", [1.125, 1.3, 1.5, 1.9])
def test_the_power_over_the_whole_range(alpha: float) -> None:
    ours = kernel()
    assert ours is not None
    phi = torch.logspace(-126 / alpha, 100 / alpha, 20001, base=2.0, dtype=torch.float64).float()
    found = ours.power(phi, alpha).double()
    exact = phi.double().pow(alpha - 1)
    assert float(((found - exact) / exact).abs().max()) < 4e-7


@settings(max_examples=100)
@given(
    values=st.lists(
        st.one_of(
            st.floats(width=32, allow_nan=False), st.sampled_from([0.0, -0.0, 1.0, float("inf"), -float("inf"), 1e-45])
        ),
        min_size=1,
        max_size=50,
    ),
    nans=st.integers(0, 3),
    data=st.data(),
)
def test_the_kth_smallest_is_that_of_a_sorted_list(values: list[float], nans: int, data: st.DataObject) -> None:
    ours = kernel()
    assert ours is not None
    numbers = torch.tensor([*values, *[float("nan"), -float("nan"), float("nan")][:nans]])
    k = data.draw(st.integers(0, len(numbers) - 1))
    assert np.array_equal(ours.kth_smallest(numbers, k), np.sort(numbers.numpy())[k], equal_nan=True)


def test_tables_have_the_kernel_s_layout() -> None:
    assert ITEM.itemsize == 9 * 8 + 5 * 8 + 3 * 8 + 8
    assert GROUP.itemsize == 9 * 8


# --- what a step must not overlook ----------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.375, 2.0])
def test_a_write_through_data_is_part_of_the_next_step(alpha: float) -> None:
    models = []
    for fused in (True, False):
        model, optimizer = made("sgd", alpha, fused)
        train(model, optimizer, 3)
        model[0].weight.data.mul_(0.9)
        train(model, optimizer, 1, start=3)
        models.append(model)
    assert close(*models, 1e-4)


def test_replaced_tensors_are_found() -> None:
    """New memory for a weight, for its gradient, for the optimiser's state, new groups, other masks: every time."""
    models = []
    for fused in (True, False):
        model, optimizer = made("nesterov", 2.0, fused)
        train(model, optimizer, 2)
        model[0].weight.data = model[0].weight.data.clone()
        train(model, optimizer, 2, start=2)
        state = optimizer.base.state[model[2].weight]
        state["momentum_buffer"] = torch.zeros_like(state["momentum_buffer"])
        train(model, optimizer, 2, start=4)
        optimizer.base.state.clear()
        train(model, optimizer, 2, start=6)
        optimizer.param_groups[0]["lr"] = 0.001
        optimizer.param_groups[0]["momentum"] = 0.0
        optimizer.param_groups[0]["nesterov"] = False
        train(model, optimizer, 2, start=8)
        optimizer.param_groups[0]["momentum"] = 0.5
        train(model, optimizer, 2, start=10)
        model[0].weight.requires_grad_(False)
        train(model, optimizer, 2, start=12)
        models.append(model)
    assert close(*models, 1e-4)


def test_a_parameter_that_has_no_gradient_for_a_while() -> None:
    models = []
    for fused in (True, False):
        model, optimizer = made("adam", 1.5, fused)
        for step in range(6):
            x, y = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if step in (0, 3):
                model[2].weight.grad = None
            optimizer.step()
        assert [float(optimizer.base.state[model[i].weight]["step"]) for i in (0, 2)] == [6.0, 4.0]
        models.append(model)
    assert close(*models, 1e-4)


def test_gradients_of_another_layout() -> None:
    models = []
    for fused in (True, False):
        model, optimizer = made("sgd", 2.0, fused)
        x, y = batch(0)
        F.cross_entropy(model(x), y).backward()
        grad = model[0].weight.grad
        assert grad is not None
        model[0].weight.grad = grad.t().contiguous().t()
        optimizer.step()
        models.append(model)
    assert close(*models, 1e-5)


def test_copies_and_pickles_have_tables_of_their_own() -> None:
    model, optimizer = made("adamw", 1.375, True)
    train(model, optimizer, 3)
    other, twin = copy.deepcopy((model, optimizer))
    buffer = io.BytesIO()
    torch.save((model, optimizer), buffer)
    buffer.seek(0)
    third, read = torch.load(buffer, weights_only=False)
    train(model, optimizer, 5, start=3)
    assert not same(model, other)
    train(other, twin, 5, start=3)
    train(third, read, 5, start=3)
    assert same(model, other)
    assert same(model, third)


def test_closures_hooks_and_schedulers() -> None:
    model, optimizer = made("sgd", 2.0, True)
    seen: list[str] = []
    optimizer.base.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.base.register_step_post_hook(lambda *_: seen.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loss = optimizer.step(closing(model, optimizer, *batch(0)))
    scheduler.step()
    assert float(loss.detach()) > 0
    assert seen == ["before", "after"]
    assert optimizer.base.param_groups[0]["lr"] == pytest.approx(0.1 / 4 / 10)


def test_a_scheduler_of_the_base_sees_its_steps() -> None:
    """It counts the calls of the base optimiser's own step, and warns if there were none."""
    model = net()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(base, 1)
    optimizer = pp.Powerprop(base, model, 2.0, fused=True)
    train(model, optimizer, 1)
    scheduler.step()


def test_alpha_one_without_masks_is_still_the_base_bit_for_bit() -> None:
    model, optimizer = made("adamw", 1.0, True)
    plain = net(hidden=40)
    train(model, optimizer, 10)
    train(plain, BASES["adamw"](plain.parameters()), 10)
    assert same(model, plain)


@pytest.mark.parametrize("option", [{"amsgrad": True}, {"fused": True}, {"capturable": False, "foreach": True}])
def test_options_with_other_arithmetic_are_left_to_torch(option: dict[str, bool]) -> None:
    models = []
    for fused in (True, False):
        model = net()
        optimizer = pp.Powerprop(torch.optim.Adam(model.parameters(), **option), model, 2.0, fused=fused)
        train(model, optimizer, 10)
        models.append(model)
    assert close(*models, 1e-4)


@pytest.mark.parametrize("bad", ["yes", 2, []])
def test_fused_is_none_true_or_false(bad: Any) -> None:
    model = net()
    with pytest.raises(TypeError, match="fused must be None, True or False, got"):
        pp.Powerprop(torch.optim.SGD(model.parameters()), model, fused=bad)


# --- the compiler ---------------------------------------------------------------------------------------------------


def test_without_a_compiler_everything_works_and_true_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powerprop.optim.kernel", lambda: None)
    monkeypatch.setattr(build, "_compiler", lambda: None)
    model, optimizer = made("sgd", 2.0, None)
    train(model, optimizer, 2)
    assert not optimizer.fused
    with pytest.raises(RuntimeError, match="fused=True needs the compiled step, but no C compiler"):
        made("sgd", 2.0, True)


def test_a_compiler_that_fails_is_warned_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho out of paper >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="could not be compiled.*out of paper"):
        assert build.compiled.__wrapped__() is None
    assert not list((tmp_path / "powerprop").glob("*"))


def test_the_library_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[Any] = []
    fake = lambda compiler, path: (calls.append(compiler), path.write_bytes(b"not a library"))  # noqa: E731
    monkeypatch.setattr(build, "_build", fake)
    for _ in range(2):
        with pytest.warns(UserWarning, match="could not be compiled"):
            build.compiled.__wrapped__()
    assert len(calls) == 1


def test_the_weight_is_psi_of_phi() -> None:
    model, optimizer = made("nesterov", 1.375, True)
    train(model, optimizer, 20)
    for master in optimizer.masters.values():
        assert master.phi is not None
        torch.testing.assert_close(master.param, psi(master.phi, 1.375), rtol=2e-6, atol=1e-12)
        assert torch.equal(master.param, master.theta())
    assert np.isfinite(sum(float(p.detach().sum()) for p in model.parameters()))


def test_an_optimiser_is_freed_at_once() -> None:
    """No cycle holds φ until the collector comes by."""
    model, optimizer = made("sgd", 2.0, True)
    train(model, optimizer, 1)
    phi = weakref.ref(next(iter(optimizer.masters.values())).phi)
    gc.disable()
    try:
        del optimizer
        assert phi() is None
    finally:
        gc.enable()


def test_masks_that_were_replaced_are_let_go() -> None:
    model, optimizer = made("sgd", 2.0, True)
    optimizer.set_masks(masks(optimizer, 0.8, 1), masks(optimizer, 0.5, 2))
    train(model, optimizer, 2)
    old = [weakref.ref(m.trainable) for m in optimizer.masters.values()]  # type: ignore[arg-type]
    optimizer.set_masks(masks(optimizer, 0.8, 3), masks(optimizer, 0.5, 4))
    assert [ref() for ref in old] == [None] * len(old)
    train(model, optimizer, 2, start=2)


@pytest.mark.parametrize("kind", ["float32", "float64", "transposed", "gaps"])
def test_a_masked_copy_is_torch_s(kind: str) -> None:
    """To the bit, whatever stands where the mask is not; what the kernel does not suit is left to torch."""
    ours = kernel()
    assert ours is not None
    values = torch.randn(37, 53, generator=torch.Generator().manual_seed(0))
    values[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40])
    mask = torch.rand(37, 53, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[0, :2], mask[0, 2:4] = False, True
    values = {"float64": values.double(), "transposed": values.t().contiguous().t(), "gaps": values[:, ::2]}.get(
        kind, values
    )
    mask = mask[:, ::2] if kind == "gaps" else mask
    found, wanted = ours.masked(values, mask), masked(values, mask)
    assert torch.equal(found, wanted)
    assert torch.equal(found.signbit(), wanted.signbit())


def test_clipping_is_the_same_to_the_bit() -> None:
    norms, grads = [], []
    for fused in (True, False):
        model, optimizer = made("sgd", 2.0, fused)
        optimizer.set_masks(None, masks(optimizer, 0.3, 1))
        x, y = batch(0)
        F.cross_entropy(model(x), y).backward()
        norms.append(optimizer.clip_grad_norm_(1e-3))
        grads.append(model[0].weight.grad)
    assert torch.equal(*norms)
    assert torch.equal(*grads)
