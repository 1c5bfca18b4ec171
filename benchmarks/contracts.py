"""Every optimiser of the package `pytorch_optimizer` behind Powerprop: which train, which resume, and why not.

α = 1: bit for bit the optimiser alone. α = 1.5: the loss falls, every layer moves. Resumed: bit-identical in float32.

python benchmarks/contracts.py
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytorch_optimizer
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import powerprop as pp

Make = Callable[[nn.Module], torch.optim.Optimizer]
STEPS = 40
AROUND = {
    "Lookahead": lambda base: pytorch_optimizer.Lookahead(base),
    "ScheduleFreeWrapper": lambda base: pytorch_optimizer.ScheduleFreeWrapper(base),
    "TRAC": lambda base: pytorch_optimizer.TRAC(base),
    "OrthoGrad": lambda base: pytorch_optimizer.OrthoGrad(base),
}


class _Net(nn.Module):
    """Plain layers without biases: some of the optimisers take matrices alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters():
                p.normal_(0, 0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def loss_of(model: nn.Module) -> Tensor:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return F.cross_entropy(model(x), x[:, :4].argmax(1))


def closing(model: nn.Module, optimizer: torch.optim.Optimizer, graph: bool) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = loss_of(model)
            loss.backward(create_graph=graph)  # type: ignore[no-untyped-call]
        return loss

    return closure


def train(model: nn.Module, optimizer: Any, base: Any, steps: int) -> None:
    """As a loop would that knows nothing of the optimiser: without a closure where it can be."""
    asks = type(base).__name__ in ("LBFGS", "AliG", "BSAM", "SAM")
    graph = type(base).__name__ in ("SophiaH", "AdaHessian")
    torch.manual_seed(0)  # some draw random numbers, of torch's own generator
    if hasattr(optimizer, "train"):
        optimizer.train()
    for _ in range(steps):
        closure = closing(model, optimizer, graph)
        if asks:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def makers() -> dict[str, Make]:
    """One of each, with what its constructor asks for beyond parameters."""
    made: dict[str, Make] = {}
    for name in pytorch_optimizer.get_supported_optimizers():
        made[name] = lambda model, name=name: _make(pytorch_optimizer.load_optimizer(name), model)  # type: ignore[misc]
    for name, wrapper in AROUND.items():
        made[name] = lambda model, wrapper=wrapper: wrapper(torch.optim.SGD(model.parameters(), lr=0.05))  # type: ignore[misc]
    made["SAM"] = lambda model: pytorch_optimizer.SAM(model.parameters(), torch.optim.SGD, lr=0.05)
    return made


def _make(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    asked = inspect.signature(kind).parameters
    first = next(iter(asked))
    given = {name: value for name, value in {"num_iterations": 100, "num_data": 64}.items() if name in asked}
    if first == "model":
        return kind(model, **given)  # type: ignore[no-any-return]
    groups: Any = list(model.parameters())
    if "use_muon" in inspect.getsource(kind):
        groups = [{"params": groups, "use_muon": True}]
    return kind(groups, **given)  # type: ignore[no-any-return]


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def alone(make: Make) -> nn.Module:
    model = _Net(0)
    base = make(model)
    train(model, base, base, STEPS)
    return model


def wrapped(make: Make, alpha: float, seed: int = 0) -> tuple[nn.Module, pp.Powerprop]:
    model = _Net(seed)
    return model, pp.Powerprop(make(model), model, alpha)


def is_the_base(make: Make, plain: nn.Module) -> None:
    model, optimizer = wrapped(make, 1.0)
    train(model, optimizer, optimizer.base, STEPS)
    assert equal(plain, model), "other weights than the optimiser alone"


def trains(make: Make, plain: nn.Module) -> None:
    model, optimizer = wrapped(make, 1.5)
    start = loss_of(model).item()
    train(model, optimizer, optimizer.base, STEPS)
    end, itself, before = loss_of(model).item(), loss_of(plain).item(), _Net(0)
    falls = f"the loss goes from {start:.4f} to {end:.4f}; with the optimiser alone to {itself:.4f}"
    assert end < start, falls
    for name, _ in model.named_parameters():
        share, alone = ((m.get_parameter(name) != before.get_parameter(name)).float().mean() for m in (model, plain))
        assert share >= 0.9 * alone, f"{share:.0%} of {name} move; with the optimiser alone {alone:.0%}"


def resumes(make: Make, _: nn.Module) -> None:
    model, optimizer = wrapped(make, 1.5)
    train(model, optimizer, optimizer.base, 4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again, other = wrapped(make, 1.5, seed=1)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(model, optimizer, optimizer.base, 3)
    train(again, other, other.base, 3)
    assert equal(model, again), "other weights than the run that was not stopped"


CHECKS = {"α = 1": is_the_base, "α = 1.5": trains, "resumed": resumes}


def failure(call: Callable[[], Any]) -> str:
    """What goes wrong, or nothing."""
    try:
        call()
    except Exception as error:  # whatever somebody else's package raises is what is reported
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def own_resume(make: Make) -> str:
    """Whether the optimiser alone goes on bit-identically."""

    def run() -> None:
        model, again = _Net(0), _Net(1)
        one, other = make(model), make(again)
        train(model, one, one, 4)
        saved = copy.deepcopy((model.state_dict(), one.state_dict()))
        again.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        train(model, one, one, 3)
        train(again, other, other, 3)
        assert equal(model, again), "other weights than the run that was not stopped"

    return failure(run)


def sweep() -> tuple[dict[str, int], list[tuple[str, str, str]]]:
    """How many pass each check, and the name, the check and the reason of those that do not."""
    every, passed, reasons = makers(), dict.fromkeys(["alone", *CHECKS], 0), []
    for name, make in every.items():
        models: list[nn.Module] = []
        if text := failure(lambda make=make, models=models: models.append(alone(make))):  # type: ignore[misc]
            reasons.append((name, "alone", text))
            continue
        passed["alone"] += 1
        for check, call in CHECKS.items():
            text = failure(lambda call=call, make=make, models=models: call(make, models[0]))  # type: ignore[misc]
            if text and check == "resumed" and (own := own_resume(make)):
                text = f"not alone either ({own})"
            if text:
                reasons.append((name, check, text))
            passed[check] += not text
    return {"all": len(every), **passed}, reasons


def main() -> None:
    warnings.simplefilter("ignore")  # the package's own
    passed, reasons = sweep()
    table = Table("optimiser", "check", "why not", title="Optimisers of pytorch_optimizer that do not pass")
    for row in reasons:
        table.add_row(*row)
    console = Console(width=160)
    console.print(table)
    console.print(", ".join(f"{name}: {count}" for name, count in passed.items()))


if __name__ == "__main__":
    main()
