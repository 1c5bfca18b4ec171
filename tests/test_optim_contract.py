"""What holds for every optimiser of torch, with all its options: the contract of `Powerprop`."""

import copy
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import powerprop as pp
from nets import flat, same, weights
from optimisers import BASIC, CASES, DIFFERENTIABLE, LOOPS, SPARSE, Case, closing, go, loss_of, small
from powerprop.reparam import psi, psi_inverse

every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
every_loop = pytest.mark.parametrize("case", LOOPS, ids=lambda c: c.name)
every_grouped = pytest.mark.parametrize(
    "case", [c for c in CASES if c.info.supports_param_groups], ids=lambda c: c.name
)
every_basic = pytest.mark.parametrize("case", BASIC, ids=lambda c: c.name)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])

STEPS = 4
MATRICES = ("0.weight", "2.weight")


def every_other(weight: Tensor) -> Tensor:
    """A chessboard: every row and column keeps some weights, so that all of these have gradients."""
    rows, columns = weight.shape
    return (torch.arange(rows)[:, None] + torch.arange(columns)) % 2 == 0


# --- α = 1 is the base optimiser ------------------------------------------------------------------------------------


@every_dtype
@every_case
def test_alpha_one_is_the_base_bit_for_bit_at_every_step(case: Case, dtype: torch.dtype) -> None:
    plain, wrapped = small(dtype=dtype), small(dtype=dtype)
    base, optimizer = case.of(plain), case.wrap(wrapped, 1.0)
    for step in range(STEPS):
        go(case, plain, base, range(step, step + 1))
        go(case, wrapped, optimizer, range(step, step + 1))
        assert same(plain, wrapped), step


@every_grouped
def test_a_group_added_later_is_as_with_the_base(case: Case) -> None:
    plain, wrapped = small(), small()
    for alpha in (1.0, 2.0):
        before = weights(wrapped)
        for model in (plain, wrapped):
            first, *rest = case.taken(model)
            optimizer = case.base([first])
            if model is wrapped:
                optimizer = pp.Powerprop(optimizer, model, alpha)
            go(case, model, optimizer, range(2))
            optimizer.add_param_group({"params": rest})
            go(case, model, optimizer, range(2, 4))
        if alpha == 1:
            assert same(plain, wrapped)
        else:
            assert all((wrapped.get_parameter(n) != before[n]).any() for n in MATRICES)


@pytest.mark.parametrize("case", [c for c in CASES if not c.info.supports_param_groups], ids=lambda c: c.name)
def test_an_optimiser_of_one_group_refuses_another_itself(case: Case) -> None:
    model = small()
    optimizer = pp.Powerprop(case.base([model[0].weight]), model, 2.0)  # type: ignore[list-item]
    optimizer.add_param_group({"params": [model[2].weight]})
    with pytest.raises(AssertionError, match="Expected exactly one param_group, but got 2"):
        go(case, model, optimizer, range(1))


@every_loop
def test_a_scheduler_is_as_with_the_base(case: Case) -> None:
    plain, wrapped = small(), small()
    for model in (plain, wrapped):
        optimizer = case.of(model) if model is plain else case.wrap(model, 1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(STEPS):
            go(case, model, optimizer, range(step, step + 1))
            scheduler.step()
    assert same(plain, wrapped)


# --- α > 1 trains, as the paper has it ------------------------------------------------------------------------------


def calm(case: Case) -> Case:
    """LBFGS takes the curvature from moves of its own, not from what Powerprop makes of them: small ones train."""
    if not case.asks_for_closure:
        return case
    return Case(case.info, {**case.options, "lr": 1e-2, "max_iter": 2, "history_size": 1})


@pytest.mark.parametrize("alpha", [1.5, 2.0])
@every_case
def test_trains(case: Case, alpha: float) -> None:
    model = small()
    optimizer, before = calm(case).wrap(model, alpha), weights(model)
    start = case.sign * loss_of(case, model).item()
    for _ in range(6):
        go(case, model, optimizer, range(1))
    assert case.sign * loss_of(case, model).item() < start
    assert all((model.get_parameter(n) != before[n]).all() for n in MATRICES)


def reference(case: Case, alpha: float, steps: int) -> nn.Module:
    """Virtual targets as the paper writes them: φ is kept, w is Ψ(φ), and the base optimiser moves w for a moment."""
    model = small(dtype=torch.float64)
    base = case.of(model)
    chosen = [model.get_parameter(n) for n in MATRICES]
    phis = [psi_inverse(w.detach(), alpha) for w in chosen]
    for step in range(steps):
        before = [w.detach().clone() for w in chosen]
        go(case, model, base, range(step, step + 1))
        with torch.no_grad():
            for phi, w, old in zip(phis, chosen, before, strict=True):
                phi += (w - old) * alpha * phi.abs() ** (alpha - 1)
                w.copy_(psi(phi, alpha))
    return model


@pytest.mark.parametrize("alpha", [1.5, 2.0])
@every_case
def test_follows_the_virtual_targets_of_the_paper(case: Case, alpha: float) -> None:
    steps = 1 if case.asks_for_closure else STEPS  # LBFGS doubles every rounding error twenty times a step
    model = small(dtype=torch.float64)
    go(case, model, case.wrap(model, alpha, rate="paper"), range(steps))
    wanted = weights(reference(case, alpha, steps))
    for name, weight in weights(model).items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-9, atol=1e-12)


@every_dtype
@every_loop
def test_a_closure_that_clears_gradients_is_the_loop(case: Case, dtype: torch.dtype) -> None:
    looped, closed = small(dtype=dtype), small(dtype=dtype)
    go(case, looped, case.wrap(looped, 2.0), range(STEPS), closures=False)
    go(case, closed, case.wrap(closed, 2.0), range(STEPS), closures=True)
    assert same(looped, closed)


@pytest.mark.parametrize("to_none", [False, True])
@every_dtype
@every_basic
def test_gradients_after_a_closure_are_those_of_its_batch(case: Case, dtype: torch.dtype, to_none: bool) -> None:
    model = small(dtype=dtype)
    optimizer = case.wrap(model, 2.0)
    seen: list[list[Tensor]] = []

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=to_none)
        loss = loss_of(case, model)
        loss.backward()
        seen.append([p.grad.clone() for p in case.taken(model) if p.grad is not None])
        twice = torch.autograd.grad(loss_of(case, model), case.taken(model))
        assert all(torch.equal(g, t) for g, t in zip(seen[-1], twice, strict=True))
        assert all(g.dtype == dtype for g in seen[-1])
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert len(seen) >= 3
    assert all(p.grad is not None and p.grad.dtype == p.dtype == dtype for p in case.taken(model))


@pytest.mark.parametrize("alpha", [1.5, 2.0])
@every_loop
def test_every_weight_moves_in_half_precision_as_in_float32(case: Case, alpha: float) -> None:
    dtype = torch.bfloat16 if alpha == 2 else torch.float16
    narrow, wide = small(dtype=dtype), small(dtype=dtype).float()
    optimizers = case.wrap(narrow, alpha), case.wrap(wide, alpha)
    before = weights(wide)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        for p, q in zip(narrow.parameters(), wide.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            q.grad = p.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    for name in MATRICES:
        theta, wanted = optimizers[0].masters[name].theta(), wide.get_parameter(name)
        assert (theta != before[name]).all()
        torch.testing.assert_close(theta - before[name], wanted - before[name], rtol=1e-2, atol=1e-5)
        assert torch.equal(narrow.get_parameter(name), theta.to(dtype))


@pytest.mark.parametrize("masked", [False, True])
@every_dtype
@pytest.mark.parametrize("case", [c for c in CASES if c.asks_for_closure], ids=lambda c: c.name)
def test_lbfgs_moves_all_that_masks_let_move(case: Case, dtype: torch.dtype, masked: bool) -> None:
    for alpha in (1.0, 1.5):
        model = small(dtype=dtype)
        optimizer = calm(case).wrap(model, alpha)
        masks = pp.Masks({n: every_other(model.get_parameter(n)) for n in MATRICES}) if masked else pp.Masks.ones(model)
        if masked:
            optimizer.set_masks(masks, masks)
        before = {n: m.theta() for n, m in optimizer.masters.items()}
        start = loss_of(case, copy.deepcopy(model).float()).item()
        for _ in range(3):
            optimizer.step(closing(case, model, optimizer, 0))
        rounds = dtype == torch.bfloat16 and optimizer.masters["0.weight"].kept is None  # α = 1: torch's own affair
        assert rounds or loss_of(case, copy.deepcopy(model).float()).item() < start
        for name, mask in masks.items():
            assert rounds or (optimizer.masters[name].theta() != before[name])[mask].all()
            assert not model.get_parameter(name)[~mask].any()


# --- state ----------------------------------------------------------------------------------------------------------


def resumed(case: Case, model: nn.Module, optimizer: pp.Powerprop) -> tuple[nn.Module, pp.Powerprop]:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = small(7, next(model.parameters()).dtype)
    other = case.wrap(again, 3.0)
    other.load_state_dict(saved["optimizer"])
    again.load_state_dict(saved["model"])
    return again, other


@pytest.mark.parametrize(
    ("case", "alpha", "dtype"),
    [(c, 1.5, d) for c in CASES for d in (torch.float32, torch.bfloat16)] + [(c, 1.0, torch.bfloat16) for c in BASIC],
    ids=lambda x: x.name if isinstance(x, Case) else str(x),
)
def test_resume_is_bit_identical(case: Case, alpha: float, dtype: torch.dtype) -> None:
    model = small(dtype=dtype)
    optimizer = case.wrap(model, alpha)
    go(case, model, optimizer, range(3))
    goes_on_as(case, (model, optimizer), resumed(case, model, optimizer))


def goes_on_as(case: Case, one: tuple[nn.Module, pp.Powerprop], other: tuple[nn.Module, pp.Powerprop]) -> None:
    for model, optimizer in (one, other):
        go(case, model, optimizer, range(3, 5))
    assert same(one[0], other[0])
    assert all(torch.equal(m.theta(), other[1].masters[n].theta()) for n, m in one[1].masters.items())


@every_dtype
@every_loop
def test_copies_and_pickles_go_on_bit_identically(case: Case, dtype: torch.dtype) -> None:
    model = small(dtype=dtype)
    optimizer = case.wrap(model, 2.0)
    go(case, model, optimizer, range(2))
    copied, pickled = copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))
    goes_on_as(case, copied, pickled)
    goes_on_as(case, (model, optimizer), copy.deepcopy((model, optimizer)))
    assert same(model, copied[0])


@pytest.mark.parametrize("case", [c for c in BASIC if c.asks_for_closure], ids=lambda c: c.name)
def test_what_torch_cannot_copy_is_not_copied_here_either(case: Case) -> None:
    model = small()
    for optimizer in (case.of(model), case.wrap(model, 2.0)):
        other = copy.deepcopy(optimizer)
        with pytest.raises(AttributeError, match="'LBFGS' object has no attribute '_params'"):
            go(case, model, other, range(1))


@every_dtype
@every_basic
def test_masks_are_resumed_with_every_optimiser(case: Case, dtype: torch.dtype) -> None:
    model, again = small(dtype=dtype), small(7, dtype)
    optimizer, other = (case.wrap(m, 1.5, sparsify=pp.RigL(0.5, steps=40, interval=3)) for m in (model, again))
    go(case, model, optimizer, range(5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert same(model, again)
    go(case, model, optimizer, range(5, 10))
    go(case, again, other, range(5, 10))
    assert same(model, again)
    assert other.active == optimizer.active


@pytest.mark.parametrize("alpha", [1.0, 2.0])
@every_basic
def test_masks_laid_on_half_precision_in_the_middle(case: Case, alpha: float) -> None:
    """The base optimiser's memory is of half precision until then, and of single from then on."""
    model, case = small(dtype=torch.bfloat16), calm(case)
    optimizer = case.wrap(model, alpha)
    go(case, model, optimizer, range(3))
    masks = {n: every_other(model.get_parameter(n)) for n in MATRICES}
    optimizer.set_masks(masks, masks)
    before = {n: m.theta() for n, m in optimizer.masters.items()}
    for step in range(3, 8):
        go(case, model, optimizer, range(step, step + 1))
    for name, mask in masks.items():
        moved = (optimizer.masters[name].theta() != before[name])[mask]
        assert moved.any() if case.asks_for_closure else moved.all()  # LBFGS has taken its tiny steps
        assert not model.get_parameter(name)[~mask].any()
    again, other = resumed(case, model, optimizer)
    go(case, model, optimizer, range(3))
    go(case, again, other, range(3))
    assert same(model, again)


# --- options that not every optimiser takes -------------------------------------------------------------------------


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda c: c.name)
def test_differentiable_is_for_alpha_one(case: Case) -> None:
    plain, wrapped = (small().requires_grad_(False) for _ in range(2))
    grads = []
    for model in (plain, wrapped):
        optimizer = case.of(model) if model is plain else case.wrap(model, 1.0, where=list(MATRICES))
        lent = [torch.full_like(p, 0.1).requires_grad_() for p in case.taken(model)]
        for p, g in zip(case.taken(model), lent, strict=True):
            p.grad = g.clone()
        optimizer.step()
        total = torch.stack([p.square().sum() for p in case.taken(model)]).sum()
        if total.requires_grad:  # SGD detaches its first momentum
            total.backward()  # type: ignore[no-untyped-call]
        grads.append([g.grad for g in lent])
    assert same(plain, wrapped)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*grads, strict=True))  # type: ignore[arg-type]


SWITCHES = {"foreach", "fused", "differentiable"}


@pytest.mark.parametrize("case", [c for c in DIFFERENTIABLE if not {*c.options} - SWITCHES], ids=lambda c: c.name)
def test_differentiable_under_a_power_or_masks_is_refused(case: Case) -> None:
    message = "differentiable=True is for alpha = 1 without masks"
    model = small()
    with pytest.raises(ValueError, match=message):
        case.wrap(model, 1.5)
    for change in (
        lambda o: o.set_alpha(2.0),
        lambda o: o.param_groups[0].update(alpha=2.0, powerprop_alpha=2.0),
        lambda o: o.set_masks(pp.magnitude_masks(o.model, 0.5)),
    ):
        model = small()
        optimizer = case.wrap(model, 1.0)
        change(optimizer)
        before = weights(model)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        assert all(torch.equal(model.state_dict()[n], w) for n, w in before.items())
    optimizer = next(c for c in BASIC if c.info is case.info).wrap(small(), 2.0)
    optimizer.param_groups[0]["differentiable"] = True
    with pytest.raises(ValueError, match=message):
        optimizer.step()


def embedded(case: Case, alpha: float | None) -> tuple[nn.Embedding, torch.optim.Optimizer]:
    model = nn.Embedding(9, 4, sparse=True)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 36).view(9, 4))
    base = case.of(model)
    return model, base if alpha is None else pp.Powerprop(base, model, alpha, where="weight")


@pytest.mark.parametrize("case", SPARSE, ids=lambda c: c.name)
def test_sparse_gradients(case: Case) -> None:
    models = []
    for alpha in (None, 1.0, 1.5):
        model, optimizer = embedded(case, alpha)
        before = model.weight.detach().clone()
        for step in range(3):
            optimizer.zero_grad()
            (case.sign * model(torch.tensor([1, 4, step])).square().sum()).backward()
            optimizer.step()
        assert torch.equal(model.weight[5:], before[5:])
        assert (model.weight[:3] != before[:3]).all()
        models.append(model)
    assert same(models[0], models[1])
    assert not same(models[0], models[2])


@pytest.mark.parametrize("case", SPARSE, ids=lambda c: c.name)
def test_sparse_gradients_under_masks(case: Case) -> None:
    model, optimizer = embedded(case, 1.5)
    masks = {"weight": torch.rand(9, 4, generator=torch.Generator().manual_seed(0)) < 0.5}
    optimizer.set_masks(masks, masks)  # type: ignore[attr-defined]
    before = weights(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = case.sign * model(torch.tensor([1, 4, 2])).square().sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    for _ in range(2):
        optimizer.step(closure)
    now = weights(model)
    assert not now["weight"][~masks["weight"]].any()
    assert torch.equal(now["weight"][5:], before["weight"][5:])
    assert (now["weight"] != before["weight"])[[1, 2, 4]][masks["weight"][[1, 2, 4]]].all()


# --- hooks, scalers, errors -----------------------------------------------------------------------------------------


@contextmanager
def global_hooks(calls: list[str]) -> Iterator[None]:
    handles = [
        register_optimizer_step_pre_hook(lambda o, a, k: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda o, a, k: calls.append("global post")),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("alpha", [1.0, 2.0])
@every_basic
def test_every_hook_fires_once_a_step(case: Case, alpha: float) -> None:
    model, calls = small(), []
    optimizer = case.wrap(model, alpha)
    for name, one in (("own", optimizer), ("base", optimizer.base)):
        one.register_step_pre_hook(lambda o, a, k, name=name: calls.append(f"{name} pre"))
        one.register_step_post_hook(lambda o, a, k, name=name: calls.append(f"{name} post"))
    with global_hooks(calls):
        go(case, model, optimizer, range(1))
    assert sorted(calls) == ["base post", "base pre", "global post", "global pre", "own post", "own pre"]
    assert calls[0] == "own pre"
    assert calls[-1] == "own post"


def test_a_hook_may_replace_the_arguments() -> None:
    case = BASIC[0]
    model = small()
    optimizer = case.wrap(model, 2.0)
    calls: list[str] = []

    def other() -> Tensor:
        calls.append("other")
        return torch.tensor(3.0)

    optimizer.register_step_pre_hook(lambda o, args, kwargs: ((o, other), {}))
    assert optimizer.step(lambda: pytest.fail("replaced")).item() == 3.0
    assert calls == ["other"]


FUSED = [c for c in LOOPS if c.options.get("fused")]


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("case", FUSED, ids=lambda c: c.name)
def test_scales_and_overflows_are_honoured_as_by_the_base(case: Case, found: float) -> None:
    plain, wrapped, powered = small(), small(), small()
    before = weights(powered)
    for model, optimizer in (
        (plain, case.of(plain)),
        (wrapped, case.wrap(wrapped, 1.0)),
        (powered, case.wrap(powered, 2.0)),
    ):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(found)  # type: ignore[attr-defined]
        optimizer.step()
        base = optimizer if model is plain else optimizer.base  # type: ignore[attr-defined]
        assert model is plain or not ({"grad_scale", "found_inf"} & vars(base).keys())
    assert same(plain, wrapped)
    assert same(powered, small()) == bool(found)
    assert all(torch.equal(powered.state_dict()[n], w) for n, w in before.items()) == bool(found)


@every_dtype
@pytest.mark.parametrize("case", [*(c for c in BASIC if not c.asks_for_closure), *FUSED], ids=lambda c: c.name)
def test_a_skipped_step_of_the_scaler_changes_nothing(case: Case, dtype: torch.dtype) -> None:
    model = small(dtype=dtype)
    method = pp.RigL(0.5, steps=20, interval=2)
    optimizer = case.wrap(model, 2.0, sparsify=method, decay=0.0 if "lr" not in case.options else 1e-3)
    go(case, model, optimizer, range(1))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(case, model) * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
    assert flat(before) == flat((model.state_dict(), optimizer.state_dict()))
    assert method.step == 1


def test_weights_without_memory_are_an_error_that_names_them() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to("meta")
    with pytest.raises(ValueError, match=r"'0\.weight' is on the meta device and has no values yet"):
        pp.Powerprop(torch.optim.SGD(model.parameters(), lr=0.1), model)


@every_basic
@every_dtype
def test_a_closure_that_raises_leaves_every_weight_its_memory(case: Case, dtype: torch.dtype) -> None:
    model = small(dtype=dtype)
    optimizer = case.wrap(model, 2.0)
    go(case, model, optimizer, range(2))
    places = {n: p.data_ptr() for n, p in model.named_parameters()}
    before = weights(model)
    thetas = {n: m.theta() for n, m in optimizer.masters.items()}

    def fails() -> Tensor:
        closing(case, model, optimizer, 0)()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(fails)
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == places
    assert all(p.dtype == dtype and p.grad is not None and p.grad.dtype == dtype for p in case.taken(model))
    assert all(torch.equal(model.state_dict()[n], w) for n, w in before.items())
    go(case, model, optimizer, range(2))
    assert not any(torch.equal(m.theta(), thetas[n]) for n, m in optimizer.masters.items())
