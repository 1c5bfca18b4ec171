"""The optimisers of torch's own test data base, with all their options, as cases for the contract tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.common_optimizers import (
    OptimizerInfo,
    _get_optim_inputs_including_global_cliquey_kwargs,
    optim_db,
)

import powerprop as pp
from nets import batch

Closure = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """One optimiser with one choice of options."""

    info: OptimizerInfo
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """As one would call it; options that are off are left out."""
        shown = ", ".join(f"{k}={v!r}" for k, v in self.options.items() if v is not False)
        return f"{self.info.optim_cls.__name__}({shown})"

    @property
    def asks_for_closure(self) -> bool:
        return self.info.step_requires_closure

    @property
    def sign(self) -> int:
        """Of the loss: what is maximised is turned round."""
        return -1 if self.options.get("maximize") else 1

    def base(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        return self.info.optim_cls(params, **copy.deepcopy(self.options))

    def of(self, model: nn.Module) -> torch.optim.Optimizer:
        """Over a model's parameters, as far as this optimiser takes them."""
        return self.base(self.taken(model))

    def taken(self, model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.ndim == 2 or self.info.optim_cls is not torch.optim.Muon]

    def wrap(self, model: nn.Module, alpha: float, **options: Any) -> pp.Powerprop:
        return pp.Powerprop(self.of(model), model, alpha, **options)


def _cases(info: OptimizerInfo) -> list[Case]:
    """torch's own list, which leaves `foreach` out on a CPU, and `foreach` too."""
    inputs = _get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info)
    options = [{"foreach": False, **i.kwargs} if "foreach" in info.supported_impls else i.kwargs for i in inputs]
    plain = [o for o in options if "foreach" in o and not (o.get("fused") or o.get("differentiable"))]
    each = [{**o, "foreach": True} for o in plain if not isinstance(o.get("lr"), Tensor)]  # torch refuses tensors there
    return [Case(info, o) for o in options + each]


EVERY = [case for info in optim_db for case in _cases(info)]
SPARSE = [case for case in EVERY if case.info.only_supports_sparse_grads]
DIFFERENTIABLE = [case for case in EVERY if case.options.get("differentiable")]
CASES = [case for case in EVERY if case not in SPARSE + DIFFERENTIABLE]
LOOPS = [case for case in CASES if not case.asks_for_closure]
BASIC = [next(case for case in CASES if case.info is info) for info in optim_db if not info.only_supports_sparse_grads]
"""One case of each optimiser."""


def small(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A network in which every weight gets a gradient at every step."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(0.1, 0.7, generator=generator)
            p.mul_(torch.randint(0, 2, p.shape, generator=generator) * 2 - 1)
    return model.to(dtype)


def loss_of(case: Case, model: nn.Module, step: int = 0) -> Tensor:
    x, y = batch(step)
    dtype = next(model.parameters()).dtype
    return case.sign * F.cross_entropy(model(x.to(dtype)).to(torch.promote_types(dtype, torch.float32)), y)


def closing(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Closure:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(case, model, step)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return closure


def go(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, closures: bool | None = None
) -> None:
    """Train; closures where the optimiser asks for them, unless told."""
    for step in steps:
        closure = closing(case, model, optimizer, step)
        if case.asks_for_closure if closures is None else closures:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
