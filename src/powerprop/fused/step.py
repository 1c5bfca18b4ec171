"""Kernel calls for a `Powerprop`: the whole step where the base optimiser's arithmetic is known, else what follows it.

The state that the base optimiser would have made is made, read and written here, in its own layout, so that either way
of taking a step can follow the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from powerprop.absorb import laid_out_like
from powerprop.fused.items import Item, Items, suits
from powerprop.fused.kernel import ADAM, DECOUPLED, GROUP, MAXIMIZE, NESTEROV, SGD, Kernel
from powerprop.master import Master

if TYPE_CHECKING:
    from powerprop.optim import Powerprop

__all__ = ["Absorption", "OnePass", "is_known"]

_FLOAT = torch.float32
_OTHER_ARITHMETIC = ("amsgrad", "capturable", "differentiable", "fused")
_MEMORY = {SGD: ("momentum_buffer",), ADAM: ("exp_avg", "exp_avg_sq", "step")}


def is_known(base: Optimizer) -> bool:
    """True for the optimisers of torch whose step the kernel takes; subclasses may do anything."""
    return type(base) in (optim.SGD, optim.Adam, optim.AdamW)


class Absorption:
    """After any base optimiser's step: its moves become moves of φ, for all weights in one call."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.groups = kernel, np.zeros(1, dtype=GROUP)
        self.items = Items(kernel, [])
        self.masters: list[Master] = []

    def absorb(self, masters: list[Master]) -> None:
        """Take up these moves; those of weights that the kernel does not suit are left to torch."""
        ours = [m for m in masters if m.compiled]
        if ours != self.masters or not self.items.hold():
            ours = [m for m in ours if self._suits(m)]
            self.masters, self.items = ours, Items(self.kernel, [Item(m.weight, m) for m in ours])
        if ours:
            self.items.run(self.groups)
            increment_version(self.items.weights)
        done = set(map(id, ours))
        for master in masters:
            master.publish() if id(master) in done else master.absorb()

    def _suits(self, master: Master) -> bool:
        master.follow()
        return suits(master.weight) and self.kernel.suits(master.alpha)


class Entry(NamedTuple):
    """The base optimiser's memory of one parameter, and the tensors found in it."""

    state: dict[str, Any] | None
    tensors: dict[str, Tensor]


class OnePass:
    """The whole step of a known base optimiser."""

    def __init__(self, optimizer: Powerprop, kernel: Kernel) -> None:
        self.optimizer: Powerprop = weakref.proxy(optimizer)  # a cycle would keep φ until the collector comes
        self.kernel = kernel
        self.kind = SGD if type(optimizer.base) is optim.SGD else ADAM
        self.items: Items | None = None
        self.rows: list[tuple[Any, ...]] = []
        self.groups = np.zeros(0, dtype=GROUP)

    def step(self) -> bool:
        """Take the step, or return False where only the base optimiser itself can."""
        optimizer = self.optimizer
        busy = [m for m in optimizer.masters.values() if not m.idle]
        if not busy or not self._as_usual() or not self._settings():
            return False
        for master in busy:
            if not master.ours:
                master.sync()
        if not self._fits() and not self._lay_out():
            return False
        assert self.items is not None
        optimizer.stepping = True
        try:
            for hook in optimizer.base._optimizer_step_pre_hooks.values():
                hook(optimizer.base, (optimizer.base,), {})
            self._run(self.items)
            for done in optimizer.base._optimizer_step_post_hooks.values():
                done(optimizer.base, (optimizer.base,), {})
        finally:
            optimizer.stepping = False
        return True

    def _run(self, items: Items) -> None:
        grads = [laid_out_like(p.grad, p) for p in items.weights if p.grad is not None]
        items.table["grad"] = [grad.data_ptr() for grad in grads]
        items.run(self.groups)
        items.table["fresh"] = 0
        increment_version(items.weights)
        for master in items.masters:
            master.accept(True)

    # --- may it be taken here? ----------------------------------------------------------------------------------

    def _as_usual(self) -> bool:
        """False if somebody has changed what the base optimiser's step does, or watches every optimiser's."""
        base = self.optimizer.base
        scaled = getattr(base, "grad_scale", None) is not None or getattr(base, "found_inf", None) is not None
        return not (scaled or "step" in vars(base) or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)

    def _settings(self) -> bool:
        """The groups' options of now, in a table; False if one asks for other arithmetic."""
        groups = self.optimizer.base.param_groups
        if any(group.get(option) for group in groups for option in _OTHER_ARITHMETIC):
            return False
        rows = [self._sgd(group) if self.kind == SGD else self._adam(group) for group in groups]
        if rows != self.rows:
            with_momentum = [row[4] != 0 for row in self.rows]
            if with_momentum != [row[4] != 0 for row in rows]:
                self.items = None
            self.rows, self.groups = rows, np.array(rows, dtype=GROUP)
        return True

    def _sgd(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        flags = NESTEROV * bool(group["nesterov"]) + MAXIMIZE * bool(group["maximize"])
        numbers = (group["lr"], group["weight_decay"], group["momentum"], 1 - group["dampening"])
        return (SGD, flags, *map(float, numbers), 0.0, 0.0, 0.0)

    def _adam(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        decoupled = isinstance(self.optimizer.base, optim.AdamW) or bool(group.get("decoupled_weight_decay"))
        flags = MAXIMIZE * bool(group["maximize"]) + DECOUPLED * decoupled
        numbers = (group["lr"], group["weight_decay"], 1.0, 0.0, *group["betas"], group["eps"])
        return (ADAM, flags, *map(float, numbers))

    # --- the tables ---------------------------------------------------------------------------------------------

    def _fits(self) -> bool:
        """True if the tables of the last step hold for this one."""
        items, optimizer = self.items, self.optimizer
        if items is None or optimizer.frozen is not self.frozen:
            return False
        if [(id(g["params"]), len(g["params"])) for g in optimizer.base.param_groups] != self.members:
            return False
        if any(p.grad is not None for p in self.idle) or not all(map(_has_gradient, items.weights)):
            return False
        state = optimizer.base.state
        for p, entry in zip(items.weights, self.entries, strict=True):
            if state.get(p) is not entry.state or any(entry.state[k] is not t for k, t in entry.tensors.items()):  # type: ignore[index]
                return False
        return items.hold()

    def _lay_out(self) -> bool:
        """Make the tables, and what state is missing; False if a tensor does not suit."""
        optimizer = self.optimizer
        self.items, self.frozen = None, optimizer.frozen
        for master in optimizer.masters.values():
            master.sync()
        every = [p for group in optimizer.base.param_groups for p in group["params"]]
        moved = [p for p in every if p.grad is not None and not self.frozen.holds(p)]
        masters = {id(m.param): m for m in optimizer.masters.values() if not m.idle}
        known = all(_has_gradient(p) and suits(p) and self._memory_suits(p) for p in moved)
        if not (known and all(m.compiled and m.proxy is None and self.kernel.suits(m.alpha) for m in masters.values())):
            return False
        self.idle = [p for p in every if p.grad is None]
        self.members = [(id(g["params"]), len(g["params"])) for g in optimizer.base.param_groups]
        wanted = set(map(id, moved))
        self.items = Items(self.kernel, [item for item in self._items(masters) if id(item.weight) in wanted])
        state = optimizer.base.state
        self.entries = [_entry(state.get(item.weight), item) for item in self.items.items]
        return True

    def _items(self, masters: Mapping[int, Master]) -> Iterator[Item]:
        for number, group in enumerate(self.optimizer.base.param_groups):
            for p in group["params"]:
                if p.grad is not None and not self.frozen.holds(p):
                    yield self._item(p, masters.get(id(p)), number)

    def _item(self, p: nn.Parameter, master: Master | None, group: int) -> Item:
        """With the base optimiser's memory of it, made as it makes that itself."""
        if self.kind == SGD:
            if self.rows[group][4] == 0:
                return Item(p, master, group)
            state = self.optimizer.base.state[p]
            fresh = state.get("momentum_buffer") is None
            if fresh:
                state["momentum_buffer"] = torch.empty_like(p)
            return Item(p, master, group, state["momentum_buffer"], fresh=fresh)
        state = self.optimizer.base.state[p]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=_FLOAT, device="cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        return Item(p, master, group, state["exp_avg"], state["exp_avg_sq"], state["step"])

    def _memory_suits(self, p: nn.Parameter) -> bool:
        """True if what the base optimiser remembers of a parameter lies in memory as the parameter does."""
        state = self.optimizer.base.state.get(p) or {}
        for name in _MEMORY[self.kind]:
            tensor = state.get(name)
            if tensor is None and not (state and self.kind == ADAM):
                continue
            if not isinstance(tensor, Tensor) or tensor.dtype != _FLOAT or tensor.device.type != "cpu":
                return False
            if name != "step" and tensor.stride() != p.stride():
                return False
        return True


def _has_gradient(p: Tensor) -> bool:
    """True if there is a plain gradient of the parameter's own precision."""
    grad = p.grad
    return type(grad) is Tensor and grad.dtype is _FLOAT and grad.layout is torch.strided


def _entry(state: dict[str, Any] | None, item: Item) -> Entry:
    names = ("momentum_buffer",) if item.step is None else ("exp_avg", "exp_avg_sq", "step")
    tensors = (item.first, item.second, item.step)
    return Entry(state, {n: t for n, t in zip(names, tensors, strict=False) if t is not None})
