"""The masks of any number of tasks, in one owner for each weight.

A task takes the weights of largest magnitude among *all* weights. Those that an earlier task uses are frozen, so which
of them task t takes is settled by one number, the magnitude τ_t of the smallest one it takes; any other weight it takes
becomes its own. Hence

    M^t_i = 1   if   owner_i = t   or   (owner_i < t and |φ_i| ≥ τ_t),

and the masks of T tasks cost log2(T + 1) bits per weight and one number per task and layer, not T bits per weight.
A task that came when no weight was free owns none and has any mask over those of others, one bit for each weight.

The same structure answers for all tasks at once: how much a weight counts in the mixture Σ_t π_t M^t, or how a quantity
of the weights sums over each M^t, depends on its cell (owner, number of τ not above |φ|) alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from powerprop.masks import Masks, pack, unpack

__all__ = ["BitMasks", "TaskMasks"]


class BitMasks:
    """Masks of any number of tasks, eight weights to the byte.

    weights: name -> the weight, for shapes and devices.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.tasks, self.shapes = 0, {n: w.shape for n, w in weights.items()}
        self.devices = {n: w.device for n, w in weights.items()}
        self.chosen: list[int] = []
        self.bits: dict[str, list[Tensor]] = {n: [] for n in weights}

    def follow(self, devices: Mapping[str, torch.device]) -> None:
        """Go where the weights are."""
        self.devices = dict(devices)

    def check(self, task: int) -> None:
        """An error that names the tasks there are, for any other number."""
        if not 0 <= task < self.tasks:
            known = f"in 0..{self.tasks - 1} (the tasks learned so far)" if self.tasks else "learned first: none is yet"
            raise ValueError(f"task must be {known}, got {task}")

    def add_chosen(self, masks: Mapping[str, Tensor]) -> None:
        """Any mask, for the next task."""
        for name, mask in masks.items():
            self.bits[name].append(pack(mask))
        self.chosen.append(self.tasks)
        self.tasks += 1

    def mask(self, task: int) -> Masks:
        """M^t: the weights that a task uses."""
        self.check(task)
        return Masks({name: self._mask(name, task) for name in self.shapes})

    def _mask(self, name: str, task: int) -> Tensor:
        return unpack(self.bits[name][self.chosen.index(task)], self.shapes[name]).to(self.devices[name])

    def mixture(self, name: str, coefficients: Tensor) -> Tensor:
        """Σ_t π_t M^t of one weight."""
        total, pi = torch.zeros(self.shapes[name], device=self.devices[name]), coefficients.tolist()
        for task in (t for t in self.chosen if pi[t]):
            total += pi[task] * BitMasks._mask(self, name, task)
        return total

    def sums(self, name: str, values: Tensor) -> Tensor:
        """Σ_i values_i M^t_i for every task t."""
        found = torch.zeros(self.tasks, dtype=torch.float64)
        for task in self.chosen:
            found[task] = values.detach()[BitMasks._mask(self, name, task)].double().sum()
        return found

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A row of bits for every task, by weight."""
        rows = {f"chosen.{name}": torch.stack(rows) for name, rows in self.bits.items() if rows}
        return rows, {"tasks": self.tasks, "chosen": list(self.chosen)}

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        self.tasks, self.chosen = data["tasks"], list(data["chosen"])
        self.bits = {name: list(tensors[f"chosen.{name}"]) if self.chosen else [] for name in self.shapes}


FREE = -1
MAX_TASKS = 2**15 - 1


class TaskMasks(BitMasks):
    """Who owns which weight, and from which magnitude on each task uses the weights of earlier ones.

    weights: name -> the weight; none of them is owned at first.
    strength: name -> |φ| of every weight, by default of `weights` as they are then. That of an owned weight stays.
    """

    def __init__(self, weights: Mapping[str, Tensor], strength: Callable[[str], Tensor] | None = None) -> None:
        super().__init__(weights)
        self.owner = {n: torch.full(w.shape, FREE, dtype=torch.int16, device=w.device) for n, w in weights.items()}
        self.strength = strength or partial(_magnitude, weights)
        self.threshold: dict[str, list[float]] = {n: [] for n in weights}
        self._cells: dict[str, Tensor] = {}

    def follow(self, devices: Mapping[str, torch.device]) -> None:
        super().follow(devices)
        for name in (n for n, device in devices.items() if self.owner[n].device != device):
            self.owner[name], self._cells = self.owner[name].to(devices[name]), {}

    # --- which weights ------------------------------------------------------------------------------------------

    def free(self) -> Masks:
        """The weights that no task uses."""
        return Masks({n: owner == FREE for n, owner in self.owner.items()})

    def used(self) -> float:
        """The fraction of weights that some task uses."""
        return 1 - self.free().density()

    def _mask(self, name: str, task: int) -> Tensor:
        if task in self.chosen:
            return super()._mask(name, task)
        owner, strength, threshold = self.owner[name], self.strength(name), self.threshold[name][task]
        if owner.device.type != "cpu":
            return ((strength >= threshold) & (owner < task) & (owner != FREE)) | (owner == task)
        numbers = owner.numpy()  # several times faster than torch here
        mask = strength.numpy() >= np.float32(threshold)
        mask &= numbers.view(np.uint16) < task  # as an unsigned number FREE is above all tasks
        mask |= numbers == task
        return torch.from_numpy(mask)

    # --- adding a task ------------------------------------------------------------------------------------------

    def complete(self, masks: Mapping[str, Tensor]) -> Masks:
        """The masks with every used weight that equals the smallest one taken: a threshold cannot part equals."""
        return Masks({n: self._completed(n, masks[n])[0] for n in self.owner})

    def _completed(self, name: str, mask: Tensor) -> tuple[Tensor, float]:
        """The mask of one weight, and the smallest magnitude that it takes of used ones."""
        used, strength = self.owner[name] != FREE, self.strength(name)
        taken = strength[mask & used]
        threshold = float(taken.min()) if taken.numel() else math.inf
        return mask | ((strength >= threshold) & used), threshold

    def add(self, masks: Mapping[str, Tensor]) -> None:
        """Give the next task these weights, as `complete` gave them: the free ones among them are its own from now on,
        and must be frozen."""
        self._check_room()
        each = {n: (mask, *self._completed(n, mask)) for n, mask in masks.items()}
        if not all(torch.equal(mask, completed) for mask, completed, _ in each.values()):
            raise ValueError("the masks part used weights of equal magnitude; call complete() first")
        for name, (mask, _, threshold) in each.items():
            self.threshold[name].append(threshold)
            self.owner[name][mask & (self.owner[name] == FREE)] = self.tasks
        self.tasks, self._cells = self.tasks + 1, {}

    def add_chosen(self, masks: Mapping[str, Tensor]) -> None:
        """The mask of the next task, over weights of the tasks before it alone."""
        self._check_room()
        if loose := [name for name, mask in masks.items() if (mask & (self.owner[name] == FREE)).any()]:
            raise ValueError(f"the mask of {loose[0]!r} has weights that no task owns")
        super().add_chosen(masks)
        for thresholds in self.threshold.values():
            thresholds.append(math.inf)
        self._cells = {}

    def _check_room(self) -> None:
        if self.tasks == MAX_TASKS:
            raise ValueError(f"there can be no more than {MAX_TASKS} tasks")

    # --- all tasks at once --------------------------------------------------------------------------------------

    def mixture(self, name: str, coefficients: Tensor) -> Tensor:
        """Σ_t π_t M^t of one weight: one look-up per weight, whatever the number of tasks."""
        own, reuse = self._incidence(name)
        table = torch.zeros(self.tasks + 1, self.tasks + 1, dtype=torch.float64)
        pi = coefficients.double().cpu()
        table[:-1] = pi[:, None] + own.T @ (pi[:, None] * reuse)
        cells = self._cell(name)
        found = table.flatten().float().to(cells.device).index_select(0, cells).view(self.owner[name].shape)
        return found + super().mixture(name, coefficients) if self.chosen else found

    def sums(self, name: str, values: Tensor) -> Tensor:
        """Σ_i values_i M^t_i for every task t: one pass over the weight, then sums over cells."""
        own, reuse = self._incidence(name)
        size = self.tasks + 1
        flat, cells = values.detach().double().flatten(), self._cell(name)
        if flat.device.type == "cpu":
            sums = torch.from_numpy(np.bincount(cells.numpy(), weights=flat.numpy(), minlength=size * size))
        else:
            sums = torch.zeros(size * size, dtype=torch.float64, device=flat.device).index_add_(0, cells, flat)
        table = sums.cpu().view(size, size)[:-1]
        return table.sum(1) + ((own @ table) * reuse).sum(1) + super().sums(name, values)

    def _incidence(self, name: str) -> tuple[Tensor, Tensor]:
        """own[t, f] = 1 if f < t; reuse[t, r] = 1 if a weight above r of the sorted thresholds is above τ_t."""
        threshold = torch.tensor(self.threshold[name], dtype=torch.float32)
        place = torch.searchsorted(threshold.sort().values, threshold, right=True)
        own = torch.ones(self.tasks, self.tasks, dtype=torch.float64).tril(-1)
        return own, (place[:, None] <= torch.arange(self.tasks + 1)[None, :]).double()

    def _cell(self, name: str) -> Tensor:
        """(owner, number of thresholds not above |φ|) of every weight as one number; free weights share a row."""
        if name not in self._cells:
            ordered = torch.tensor(self.threshold[name], dtype=torch.float32).sort().values
            owner, strength = self.owner[name].flatten(), self.strength(name).flatten()
            rank = torch.bucketize(strength, ordered.to(strength.device), right=True)
            row = torch.where(owner == FREE, self.tasks, owner).long()
            self._cells[name] = row.mul_(self.tasks + 1).add_(rank)
        return self._cells[name]

    # --- saving -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The owners as bit planes, log2(T + 1) bits per weight, the thresholds, and the masks that were chosen."""
        bits, data = super().state()
        planes = {n: _planes(owner, self.tasks) for n, owner in self.owner.items()}
        threshold = {n: [None if t == math.inf else t for t in ts] for n, ts in self.threshold.items()}
        return {**planes, **bits}, {**data, "threshold": threshold}

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """Take up what `state` gave, after the weights."""
        if data["threshold"].keys() != self.owner.keys():
            found, own = sorted(data["threshold"]), sorted(self.owner)
            raise ValueError(f"the saved learner has masks of {found}, this one shares {own} among tasks")
        super().load_state(tensors, data)
        self._cells = {}
        for name, owner in self.owner.items():
            self.threshold[name] = [math.inf if t is None else float(t) for t in data["threshold"][name]]
            self.owner[name] = _owner(tensors[name], self.tasks, owner.shape).to(owner.device)


def _magnitude(weights: Mapping[str, Tensor], name: str) -> Tensor:
    return weights[name].detach().abs().float()


def _planes(owner: Tensor, tasks: int) -> Tensor:
    """One row of packed bits per binary digit of the owner's number, counted from 1; free is 0."""
    number = owner + 1
    rows = [pack((number >> bit) & 1 > 0) for bit in range(tasks.bit_length())]
    return torch.stack(rows) if rows else torch.zeros(0, (owner.numel() + 7) // 8, dtype=torch.uint8)


def _owner(planes: Tensor, tasks: int, shape: torch.Size) -> Tensor:
    if len(planes) != (bits := tasks.bit_length()):
        raise ValueError(f"owners among {tasks} tasks take {bits} bit planes, got {len(planes)}")
    number = torch.zeros(shape, dtype=torch.int16)
    for bit, row in enumerate(planes):
        number += unpack(row, shape).to(torch.int16) << bit
    return number - 1
