"""`torch.compile(optimizer.step)` in one graph, and steps that never make an accelerator's host wait."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

import powerprop as pp
from nets import batch, net, weights
from optimisers import LOOPS, Case, small

pytestmark = [  # Dynamo's own
    pytest.mark.filterwarnings("ignore:Profiler record function"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


# The graphs of three steps: a momentum that is not there at the first makes a second one.
BASES: dict[str, tuple[Make, int]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), 1),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 2),
    "adam, foreach": (lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True), 1),
    "adamw, a tensor's rate": (lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False), 1),
}


def compiled(step: Callable[..., Any]) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")  # type: ignore[no-untyped-call]
    return torch.compile(step, backend=counter), counter


def run(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[..., Any], steps: range) -> None:
    for number in steps:
        x, y = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y).backward()
        step()


CHOICES: dict[str, tuple[float, dict[str, Any]]] = {
    "alpha 1": (1.0, {}),
    "alpha 1.5": (1.5, {}),
    "alpha 2, decay": (2.0, {"decay": 0.01}),
    "alpha 1.5, masks": (1.5, {"masked": True}),
}


def optimise(make: Make, model: nn.Module, alpha: float, masked: bool = False, **options: Any) -> pp.Powerprop:
    optimizer = pp.Powerprop(make(list(model.parameters())), model, alpha, **options)
    if masked:
        masks = pp.magnitude_masks(model, 0.5)
        optimizer.set_masks(masks, masks)
    return optimizer


@pytest.mark.parametrize(
    ("base", "choice"), [("sgd", c) for c in CHOICES] + [(b, "alpha 1.5") for b in BASES if b != "sgd"]
)
def test_from_the_first_step_in_the_graphs_of_the_base(base: str, choice: str) -> None:
    make, graphs = BASES[base]
    alpha, options = CHOICES[choice]
    model, eager = net(), net()
    optimizer, other = (optimise(make, m, alpha, **options) for m in (model, eager))
    step, counter = compiled(optimizer.step)
    run(model, optimizer, step, range(3))
    run(eager, other, other.step, range(3))
    assert counter.frame_count == graphs
    for name, weight in weights(eager).items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=1e-5, atol=2e-6)
    assert all((model.get_parameter(n) != net().get_parameter(n)).any() for n in optimizer.masters)


def test_the_base_alone_has_as_many_graphs() -> None:
    for base, (make, graphs) in BASES.items():
        model = net()
        optimizer = make(list(model.parameters()))
        step, counter = compiled(optimizer.step)
        run(model, optimizer, step, range(3))
        assert counter.frame_count == graphs, base


def test_capturable() -> None:
    """On a CPU torch takes it from the compiler alone."""
    model, eager = net(), net()
    optimizer = optimise(lambda p: torch.optim.AdamW(p, foreach=True, capturable=True), model, 1.5)
    other = optimise(lambda p: torch.optim.AdamW(p, foreach=True), eager, 1.5)
    step, counter = compiled(optimizer.step)
    run(model, optimizer, step, range(3))
    run(eager, other, other.step, range(3))
    assert counter.frame_count == 1
    for name, weight in weights(eager).items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_half_precision(masked: bool) -> None:
    make, _ = BASES["adam, foreach"]
    model, eager = net().bfloat16(), net().bfloat16()
    optimizer, other = (optimise(make, m, 2.0, masked) for m in (model, eager))
    step, _ = compiled(optimizer.step)
    run(model, optimizer, step, range(3))
    run(eager, other, other.step, range(3))
    for name, weight in other.masters.items():
        torch.testing.assert_close(optimizer.masters[name].theta(), weight.theta(), rtol=1e-2, atol=1e-3)
        assert model.get_parameter(name).dtype == torch.bfloat16


def test_a_compiled_step_and_plain_ones_take_turns() -> None:
    make, _ = BASES["momentum"]
    model, eager = net(), net()
    optimizer, other = (optimise(make, m, 1.5) for m in (model, eager))
    step, _ = compiled(optimizer.step)
    for number in range(4):
        run(model, optimizer, optimizer.step if number % 2 else step, range(number, number + 1))
        run(eager, other, other.step, range(number, number + 1))
        if number == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    for name, weight in weights(eager).items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=1e-5, atol=1e-6)


def test_hooks_of_the_base_fire_in_a_compiled_step_too() -> None:
    make, _ = BASES["sgd"]
    model, calls = net(), []
    optimizer = optimise(make, model, 1.5)
    optimizer.base.register_step_post_hook(lambda *_: calls.append("base"))
    optimizer.register_step_post_hook(lambda *_: calls.append("own"))
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("every"))
    try:
        step, _ = compiled(optimizer.step)
        run(model, optimizer, step, range(2))
    finally:
        handle.remove()
    assert calls == ["base", "every", "own"] * 2


# --- no waiting -----------------------------------------------------------------------------------------------------

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")


class Waits(TorchDispatchMode):
    """Counts what makes a host wait for its device: numbers read, shapes that depend on values, copies to the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        away = any(not t.is_cpu for t in given)
        copies = name in ("_to_copy", "copy_") and (
            torch.device(kwargs.get("device") or given[0].device).type == "cpu" and not given[-1].is_cpu
        )
        if away and (name in WAITS or copies):
            self.found.append(name)
        return function(*args, **kwargs)


def test_what_waits_is_counted() -> None:
    there = torch.ones(3, device="meta")
    for waits in (
        lambda: there.sum().item(),
        lambda: there.nonzero(),
        lambda: there.cpu(),
        lambda: there.masked_select(there > 0),
        lambda: bool(there.any()),
        lambda: torch.ones(3).copy_(there),
    ):
        with Waits() as mode, suppress(RuntimeError):  # which the meta device itself raises for most
            waits()
        assert mode.found, waits


# Of the meta device nothing can be read, so that whoever waits for a value fails there. Two of torch's wait themselves.
AWAY = [c for c in LOOPS if not c.options.get("fused")]
WAITING = [c for c in AWAY if c.info.optim_cls in (torch.optim.Adafactor, torch.optim.ASGD)]


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights on the meta device are refused, as they have no values; here that is the point."""
    monkeypatch.setattr("powerprop.optim.check_weight", lambda *_: None)


def away(case: Case, alpha: float, dtype: torch.dtype, **options: Any) -> tuple[nn.Module, pp.Powerprop]:
    model = small(dtype=dtype).to("meta")
    return model, case.wrap(model, alpha, **options)


def counted(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[str]:
    with Waits() as mode:
        for _ in range(steps):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
    return mode.found


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("case", [c for c in AWAY if c not in WAITING], ids=lambda c: c.name)
def test_no_step_waits(case: Case) -> None:
    assert not counted(*away(case, 1.5, torch.float32), steps=2)


@pytest.mark.parametrize("case", WAITING, ids=lambda c: c.name)
def test_optimisers_that_wait_themselves(case: Case) -> None:
    model = small().to("meta")
    with pytest.raises(RuntimeError, match=r"Tensor\.item\(\) cannot be called on meta tensors"):
        counted(model, case.of(model))


CALM = next(c for c in LOOPS if c.info.optim_cls is torch.optim.Adam and c.options.get("foreach"))


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masks", ["active", "trainable", "both", "one", "none"])
def test_no_step_waits_under_masks(masks: str, dtype: torch.dtype, alpha: float) -> None:
    model, optimizer = away(CALM, alpha, dtype, decay=0.01 if alpha > 1 else 0.0)
    for weight in optimizer.masters.values():
        one, other = (torch.empty_like(weight.param, dtype=torch.bool) for _ in range(2))
        active = {"active": one, "both": one, "one": one}.get(masks)
        trainable = {"trainable": other, "both": other, "one": one}.get(masks)
        kept = weight.param.detach().float() if masks in ("active", "both") else None
        weight.restore(active, trainable, kept)
    assert not counted(model, optimizer)


class OnDevice(torch.optim.Optimizer):
    """Gradient descent whose rate never leaves its device."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(0.1, device="meta")})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = 1
                p.sub_(p.grad * group["lr"])


@pytest.mark.usefixtures("unread")
def test_no_step_waits_with_a_rate_that_is_a_tensor_there() -> None:
    model = small().to("meta")
    optimizer = pp.Powerprop(OnDevice(model.parameters()), model, 1.5, decay=0.01)
    assert not counted(model, optimizer)


@pytest.mark.usefixtures("unread")
def test_frozen_parameters_and_buffers_do_not_wait() -> None:
    model = small().to("meta")
    optimizer = pp.Powerprop(torch.optim.SGD(model.parameters(), lr=0.1), model, 1.5)
    optimizer.freeze([model[0].bias, model[2].weight], [torch.ones(3, device="meta")])  # type: ignore[list-item]
    assert not counted(model, optimizer)
