"""The weights of one kernel call: their pointers, kept from step to step and checked before each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from powerprop.absorb import is_dense
from powerprop.fused.kernel import ITEM, Kernel, Kinds, places_of, row_of
from powerprop.master import Master

__all__ = ["Item", "Items", "suits"]


class Item(NamedTuple):
    """One weight: the tensor that is moved, what stands behind it, and the base optimiser's memory of it."""

    weight: Tensor
    master: Master | None
    group: int = 0
    first: Tensor | None = None
    second: Tensor | None = None
    step: Tensor | None = None
    fresh: bool = False


def suits(weight: Tensor) -> bool:
    """True for float32 numbers without gaps in a CPU's memory."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.layout == torch.strided
        and is_dense(weight)
    )


class Items:
    """Tables for the kernel. They hold for as long as `hold` says so: whoever replaces a tensor makes new ones."""

    def __init__(self, kernel: Kernel, items: Sequence[Item]) -> None:
        self.kernel, self.items = kernel, list(items)
        self.table = np.zeros(len(self.items), dtype=ITEM)
        alphas = sorted({i.master.alpha for i in self.items if i.master is not None} or {1.0})
        self.powers = np.concatenate([row_of(alpha) for alpha in alphas])
        self.places = places_of([i.weight.numel() for i in self.items])
        self.at = (
            self.table.ctypes.data,
            self.powers.ctypes.data,
            self.places.ctypes.data,
        )  # numpy takes its time to say
        for row, item in zip(self.table, self.items, strict=True):
            _fill(row, item, alphas)
        self.masters = [i.master for i in self.items if i.master is not None]
        self.behind = [_places(m) for m in self.masters]
        memory = [(t, t.data_ptr()) for i in self.items for t in (i.first, i.second, i.step) if t is not None]
        self.memory = [t for t, _ in memory]
        self.addresses = [place for _, place in memory]
        self.weights = [i.weight for i in self.items]
        self.weight_addresses = [w.data_ptr() for w in self.weights]
        self.shrunk = [n for n, i in enumerate(self.items) if i.master is not None]
        self.shrinks = [1.0] * len(self.shrunk)
        self.table["shrink"] = 1.0
        self.decaying = [(n, i.master) for n, i in enumerate(self.items) if i.master and i.master.active is not None]

    def hold(self) -> bool:
        """True if every tensor is still where it was."""
        if [w.data_ptr() for w in self.weights] != self.weight_addresses:
            return False
        if [t.data_ptr() for t in self.memory] != self.addresses:
            return False
        return [_places(m) for m in self.masters] == self.behind

    def run(self, groups: np.ndarray) -> None:
        """One step of all of them."""
        for number, master in self.decaying:
            self.table["decay_active"][number], self.table["decay_rest"][number] = master.decay
        shrinks = [m.shrink for m in self.masters]
        if shrinks != self.shrinks:
            self.shrinks = self.table["shrink"][self.shrunk] = shrinks
        table, powers, places = self.at
        self.kernel.step(table, len(self.items), groups.ctypes.data, powers, places, len(self.places))


def _places(master: Master) -> tuple[int, int, int, int]:
    """Where φ, its power and the masks are: to hold on to the tensors would keep masks that were replaced.

    Written out, because it is asked of every weight in every step.
    """
    phi, factor, active, trainable = master.phi, master.factor, master.active, master.trainable
    return (
        0 if phi is None else phi.data_ptr(),
        0 if factor is None else factor.data_ptr(),
        0 if active is None else active.data_ptr(),
        0 if trainable is None else trainable.data_ptr(),
    )


def _fill(row: np.void, item: Item, alphas: list[float]) -> None:
    master = item.master
    tensors = {"weight": item.weight, "first": item.first, "second": item.second, "step": item.step}
    for name, tensor in tensors.items():
        row[name] = 0 if tensor is None else tensor.data_ptr()
    row["size"], row["group"], row["fresh"], row["kind"] = item.weight.numel(), item.group, item.fresh, Kinds.PLAIN
    if master is not None and not master.idle:
        row["phi"], row["factor"], row["active"], row["trainable"] = _places(master)
        row["power"] = alphas.index(master.alpha)
        linear = Kinds.MASKED if master.phi is None else Kinds.LINEAR
        row["kind"] = Kinds.POWER if master.alpha > 1 else linear
