"""Other people's optimisers: those that evaluate twice, average, wrap others, or look at more than gradients."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree, SGDScheduleFree
from torch import Tensor, nn
from torch.nn import functional as F

import powerprop as pp
from nets import batch, closing, net, same, train, weights, wrap
from sparse import make

DTYPES = [torch.float32, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
every_alpha = pytest.mark.parametrize("alpha", [1.0, 2.0])
MATRICES = ("0.weight", "2.weight", "4.weight")


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return F.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return closure


# --- SAM ------------------------------------------------------------------------------------------------------------


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation as in the textbook (Foret et al. 2021): the gradient of the worst near weights."""

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        groups = [(g, p, p.clone()) for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.float().norm() for _, p, _ in groups]).norm() + 1e-12
        for group, p, _ in groups:
            p.add_(p.grad * (group["rho"] / norm))
        with torch.enable_grad():
            closure()
        for group, p, old in groups:
            p.copy_(old).sub_(p.grad, alpha=group["lr"])
        return loss

    def first_step(self, zero_grad: bool = False) -> None:
        """The other interface of SAM: half a step."""

    def second_step(self, zero_grad: bool = False) -> None:
        """The other half."""


def by_hand(model: nn.Module, steps: int, masks: pp.Masks | None = None) -> list[dict[str, Tensor]]:
    """The loop without closures; the weights at every evaluation."""
    seen = []
    named = dict(model.named_parameters())

    def gradients(step: int) -> dict[str, Tensor]:
        seen.append(weights(model))
        grads = torch.autograd.grad(loss_of(model, step), list(named.values()))
        each = dict(zip(named, grads, strict=True))
        return each if masks is None else {n: g * masks[n] if n in masks else g for n, g in each.items()}

    for step in range(steps):
        grads = gradients(step)
        old = {n: p.detach().clone() for n, p in named.items()}
        norm = torch.stack([g.float().norm() for g in grads.values()]).norm() + 1e-12
        with torch.no_grad():
            for n, p in named.items():
                p.add_(grads[n] * (0.05 / norm))
        grads = gradients(step)
        with torch.no_grad():
            for n, p in named.items():
                p.copy_(old[n]).sub_(grads[n], alpha=0.1)
    return seen


def run_sam(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[dict[str, Tensor]]:
    seen = []
    for step in range(steps):
        closure = closure_of(model, optimizer, step)
        optimizer.step(lambda: (seen.append(weights(model)), closure())[1])  # type: ignore[func-returns-value]  # noqa: B023
    return seen


def alike(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(w, b[n]) for a, b in pairs for n, w in a.items())


@every_dtype
def test_sam_at_alpha_one_is_the_loop_by_hand(dtype: torch.dtype) -> None:
    hand, model = net().to(dtype), net().to(dtype)
    optimizer = pp.Powerprop(SAM(model.parameters()), model, 1.0)
    assert alike(by_hand(hand, 5), run_sam(model, optimizer, 5))
    assert same(hand, model)


@pytest.mark.parametrize("method", [None, pp.Static])
def test_sam_under_masks_at_alpha_one_is_the_loop_by_hand(method: Callable[..., Any] | None) -> None:
    hand, model = net(), net()
    optimizer = pp.Powerprop(SAM(model.parameters()), model, 1.0, sparsify=method and method(0.5))
    if method is None:
        masks = pp.magnitude_masks(model, 0.5)
        optimizer.set_masks(masks, masks)
    hand.load_state_dict(model.state_dict())
    assert alike(by_hand(hand, 5, optimizer.active), run_sam(model, optimizer, 5))
    assert same(hand, model)


METHODS = ["dense", "static", "snip", "rigl", "snfs", "topkast"]


def method_of(name: str) -> Any:
    return make(name, sparsity=0.5, steps=20, interval=3)


@every_dtype
@every_alpha
@pytest.mark.parametrize("method", METHODS)
def test_sam_sees_perturbed_weights_as_often_as_it_asks(method: str, alpha: float, dtype: torch.dtype) -> None:
    model = net(hidden=20).to(dtype)
    optimizer = pp.Powerprop(SAM(model.parameters(), rho=0.5), model, alpha, sparsify=method_of(method))
    updates = {"snip": [0], "rigl": [2, 5, 8], "snfs": [2, 5, 8]}.get(method, [])
    for step in range(10):
        before, masks = weights(model), optimizer.active
        seen = run_sam(model, optimizer, 1)
        # A mask update takes the place of the step, and looks at one gradient; SNFS keeps an average of every one.
        assert len(seen) == (1 if step in updates else 3 if method == "snfs" else 2), step
        assert alike(seen[:1], [before])
        if step in updates:
            continue
        for name, mask in masks.items():
            assert (seen[-1][name] != before[name])[mask].float().mean() > 0.4, (step, name)
            assert not seen[-1][name][~mask].any()
        apart = torch.stack([(seen[-1][n] - before[n]).float().norm() for n in before]).norm().item()
        assert apart == pytest.approx(0.5, rel=0.4 if method in ("topkast", "snfs") else 0.05)
    assert method == "dense" or optimizer.active.sparsity() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("name", ["first_step", "second_step"])
def test_half_steps_are_refused(name: str) -> None:
    model = net()
    optimizer = pp.Powerprop(SAM(model.parameters()), model)
    with pytest.raises(RuntimeError, match=rf"SAM\.{name} would move weights past Powerprop: hand a closure to step"):
        getattr(optimizer, name)(zero_grad=True)
    with pytest.raises(AttributeError, match=f"Powerprop has no attribute '{name}', nor has its base optimiser"):
        getattr(wrap(model), name)


# --- schedule-free --------------------------------------------------------------------------------------------------

FREE: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: SGDScheduleFree(p, lr=0.1, weight_decay=1e-3),
    "adamw": lambda p: AdamWScheduleFree(p, lr=1e-2, weight_decay=1e-2),
    "adamw each": lambda p: AdamWScheduleFree(p, lr=1e-2, foreach=False),
}
every_free = pytest.mark.parametrize("free", FREE)


@every_free
@every_dtype
def test_schedule_free_at_alpha_one_is_itself(free: str, dtype: torch.dtype) -> None:
    plain, wrapped = net().to(dtype), net().to(dtype)
    base, inner = (FREE[free](m.parameters()) for m in (plain, wrapped))
    optimizer = pp.Powerprop(inner, wrapped, 1.0)
    for step in range(6):
        for model, one in ((plain, base), (wrapped, optimizer)):
            one.train()
            closure_of(model, one, step)()
            one.step()
            one.eval()
        assert same(plain, wrapped)


@every_free
@every_dtype
@pytest.mark.parametrize("method", METHODS)
@every_alpha
def test_averages_keep_the_masks(free: str, method: str, alpha: float, dtype: torch.dtype) -> None:
    model = net(hidden=20).to(dtype)
    base = FREE[free](model.parameters())
    optimizer = pp.Powerprop(base, model, alpha, sparsify=method_of(method), moments=["z", "exp_avg_sq"])
    optimizer.train()
    for step in range(7):
        closure_of(model, optimizer, step)()
        optimizer.step()
    masks, at_work = optimizer.active, {n: m.theta() for n, m in optimizer.masters.items()}
    shown = weights(model)
    optimizer.eval()
    assert not any(g["train_mode"] for g in optimizer.param_groups)
    assert not same(model, load(net(hidden=20).to(dtype), shown))
    for name, mask in masks.items():
        assert not model.get_parameter(name)[~mask].any()
    optimizer.train()
    assert optimizer.active == masks
    for name, mask in masks.items():
        back = optimizer.masters[name].theta().float()
        rounding = 1e-4 if dtype == torch.float32 or optimizer.masters[name].kept is not None else 3e-2
        assert torch.allclose(back[mask], at_work[name].float()[mask], rtol=rounding, atol=rounding / 10)
        assert torch.equal(back[~mask], at_work[name].float()[~mask])
        assert not model.get_parameter(name)[~mask].any()
    closure_of(model, optimizer, 7)()
    optimizer.step()


def load(model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    model.load_state_dict(state)
    return model


@every_free
@every_alpha
def test_schedule_free_trains_and_resumes(free: str, alpha: float) -> None:
    model, again = net(), net(5)
    optimizer, other = (pp.Powerprop(FREE[free](m.parameters()), m, alpha) for m in (model, again))
    optimizer.train()
    losses = train(model, optimizer, 150)
    assert sum(losses[-20:]) < 0.9 * sum(losses[:20])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other.load_state_dict(saved[1])
    again.load_state_dict(saved[0])
    train(model, optimizer, 5, start=150)
    train(again, other, 5, start=150)
    assert same(model, again)
    optimizer.eval()
    other.eval()
    assert same(model, again)


def test_train_and_eval_are_there_where_the_base_has_them() -> None:
    model = net()
    assert not hasattr(wrap(model), "train")
    assert not hasattr(wrap(model), "eval")
    assert hasattr(pp.Powerprop(FREE["sgd"](model.parameters()), model), "eval")


def test_an_exchange_that_fails_leaves_narrow_weights_their_memory() -> None:
    class Fails(torch.optim.SGD):
        def eval(self) -> None:
            raise ZeroDivisionError

    model = net().bfloat16()
    optimizer = pp.Powerprop(Fails(model.parameters(), lr=0.1), model)
    with pytest.raises(ZeroDivisionError):
        optimizer.eval()
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    optimizer.step(closure_of(model, optimizer, 0))


# --- optimisers around optimisers -----------------------------------------------------------------------------------


class Lookahead(torch.optim.Optimizer):
    """k steps forward, 1 step back (Zhang et al. 2019), whose state has a form of its own, as some packages have it."""

    def __init__(self, optimizer: torch.optim.Optimizer, k: int = 2, share: float = 0.5) -> None:
        self.optimizer, self.k, self.share, self.steps = optimizer, k, share, 0
        self.param_groups, self.defaults, self.state = optimizer.param_groups, optimizer.defaults, optimizer.state
        self.slow = [[p.detach().float().clone() for p in g["params"]] for g in self.param_groups]
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}  # type: ignore[assignment]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optimizer.step(closure)  # type: ignore[arg-type]
        self.steps += 1
        if self.steps % self.k == 0:
            for group, slows in zip(self.param_groups, self.slow, strict=True):
                for p, slow in zip(group["params"], slows, strict=True):
                    slow.lerp_(p.float(), self.share)
                    p.copy_(slow)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"fast": self.optimizer.state_dict(), "slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["fast"])
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self.steps = state["steps"]
        self.slow = [[s.clone() for s in slows] for slows in state["slow"]]


@every_dtype
@every_alpha
@pytest.mark.parametrize("method", METHODS)
def test_a_state_without_groups_is_saved_and_resumed(method: str, alpha: float, dtype: torch.dtype) -> None:
    def start(seed: int, power: float) -> tuple[nn.Module, pp.Powerprop]:
        model = net(seed, hidden=20).to(dtype)
        base = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        return model, pp.Powerprop(base, model, power, sparsify=method_of(method))

    (model, optimizer), (again, other) = start(0, alpha), start(3, alpha)
    run = lambda m, o, steps: [o.step(closure_of(m, o, s)) for s in steps]  # noqa: E731
    run(model, optimizer, range(5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert other.active == optimizer.active
    run(model, optimizer, range(5, 9))
    run(again, other, range(5, 9))
    assert same(model, again)


# --- what else a base may look at -----------------------------------------------------------------------------------


class Careful(torch.optim.Optimizer):
    """Moves what asks for gradients, is a leaf, and is a parameter of the model; remembers in its constructor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for p in (p for g in self.param_groups for p in g["params"]):
            self.state[p]["average"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for p in (p for g in self.param_groups for p in g["params"]):
            if p.requires_grad and p.is_leaf and isinstance(p, nn.Parameter):
                p.sub_(self.state[p]["average"].lerp_(p.grad, 0.5), alpha=0.1)


@every_dtype
@every_alpha
def test_a_base_that_asks_what_a_parameter_is(alpha: float, dtype: torch.dtype) -> None:
    model = net().to(dtype)
    optimizer = pp.Powerprop(Careful(model.parameters()), model, alpha)
    before = {n: m.theta() for n, m in optimizer.masters.items()}
    for step in range(3):
        closure_of(model, optimizer, step)()
        optimizer.step()
    for name, weight in optimizer.masters.items():
        assert weight.idle or (weight.theta() != before[name]).float().mean() > 0.7
        assert weight.param is model.get_parameter(name)
        assert weight.param.requires_grad


@every_dtype
@every_alpha
def test_a_closure_that_nobody_asks_for_is_not_evaluated(alpha: float, dtype: torch.dtype) -> None:
    model = net().to(dtype)
    optimizer = pp.Powerprop(Careful(model.parameters()), model, alpha)
    closure_of(model, optimizer, 0)()
    optimizer.step(lambda: pytest.fail("evaluated"))


# --- outside writes -------------------------------------------------------------------------------------------------


def as_data(model: nn.Module, values: dict[str, Tensor]) -> None:
    for n, p in model.named_parameters():
        p.data = values[n].clone()


def as_copy(model: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(values[n])


def as_average(model: nn.Module, values: dict[str, Tensor]) -> None:
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda a, p, n: p)
    average.module.load_state_dict(values)
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), list(average.module.parameters()))


WRITES: dict[str, Callable[[Any, dict[str, Tensor]], Any]] = {
    "load_state_dict": lambda m, v: m.load_state_dict(v),
    "assigned data": as_data,
    "copy_": as_copy,
    "the average of a model": as_average,
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("masked", [False, True])
@every_dtype
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_whoever_writes_a_weight_wins(write: str, masked: bool, dtype: torch.dtype, alpha: float) -> None:
    model, twin = net().to(dtype), net(9).to(dtype)
    optimizer, fresh = wrap(model, "sgd", alpha), wrap(twin, "sgd", alpha)
    masks = pp.magnitude_masks(twin, 0.5)
    if masked:
        optimizer.set_masks(masks, masks)
        fresh.set_masks(masks, masks)
    for step in range(3):
        optimizer.step(closure_of(model, optimizer, step))
    WRITES[write](model, weights(twin))
    assert same(model, twin)
    for step in range(3, 6):
        optimizer.step(closure_of(model, optimizer, step))
        fresh.step(closure_of(twin, fresh, step))
        # What was kept of a weight is dropped where it differs in the weight's own precision.
        for name in (MATRICES if alpha > 1 or masked else ()) if dtype == torch.bfloat16 else model.state_dict():
            torch.testing.assert_close(
                model.state_dict()[name], twin.state_dict()[name], rtol=0.01 if dtype == torch.bfloat16 else 0, atol=0
            )


@pytest.mark.parametrize("shape", [(30, 6), (3, 6), (12, 60), (6,)])
@pytest.mark.parametrize("masked", [False, True])
@every_dtype
@every_alpha
@pytest.mark.parametrize("base", ["sgd", "momentum", "adam"])
def test_data_of_another_shape_crashes_nothing(
    base: str, alpha: float, dtype: torch.dtype, masked: bool, shape: tuple[int, ...]
) -> None:
    """It trains on if the base has no memory of the old shape, and else says what does not fit."""
    model = nn.Sequential(nn.Linear(6, 12)).to(dtype)
    optimizer = wrap(model, base, alpha)
    if masked:
        masks = pp.magnitude_masks(model, 0.5)
        optimizer.set_masks(masks, masks)
    for grad in (torch.ones(12, 6), torch.ones(shape)):
        model[0].weight.grad = None
        model[0].weight.data = torch.ones(grad.shape, dtype=dtype)
        model[0].weight.grad = grad.to(dtype)
        if grad.shape == (12, 6) or (base == "sgd" and not masked):
            optimizer.step()
            assert (model[0].weight != 1).any()
        else:
            with pytest.raises((RuntimeError, ValueError), match="size|shape"):
                optimizer.step()
            assert model[0].weight.dtype == dtype


def test_a_narrower_slice_of_the_same_weight_trains_on() -> None:
    model = nn.Linear(6, 12)
    optimizer = wrap(model, "sgd", 2.0)
    for rows in (12, 5):
        model.weight.data, model.weight.grad = model.weight.data[:rows], None
        before = model.weight.detach().clone()
        model.weight.grad = torch.ones(rows, 6)
        optimizer.step()
        assert (model.weight != before).all()


def test_a_closure_is_evaluated_at_what_the_base_has_moved() -> None:
    model = net().bfloat16()
    optimizer = pp.Powerprop(torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3), model, 1.5)
    seen: list[dict[str, Tensor]] = []
    closure = closing(model.bfloat16(), optimizer, batch(0)[0].bfloat16(), batch(0)[1])
    optimizer.step(lambda: (seen.append(weights(model)), closure())[1])  # type: ignore[func-returns-value]
    assert len(seen) >= 3
    assert all((a[n] != b[n]).any() for a, b in pairwise(seen) for n in MATRICES)
