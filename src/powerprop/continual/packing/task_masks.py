"""The masks of any number of tasks, in one owner and one magnitude per weight.

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
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from powerprop.masks import Masks, pack, unpack

__all__ = ["BitMasks", "TaskMasks"]


class BitMasks:
    """Masks of any number of tasks, eight weights to the byte.

    shapes: name -> that of the weight.
    """

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.tasks, self.shapes = 0, dict(shapes)
        self.bits: dict[str, list[Tensor]] = {n: [] for n in shapes}

    def follow(self, devices: Mapping[str, torch.device]) -> None:
        """The device that masks are unpacked to."""
        self.devices = dict(devices)

    def check(self, task: int) -> None:
        """An error that names the tasks there are, for any other number."""
        if not 0 <= task < self.tasks:
            known = f"0..{self.tasks - 1} (the tasks learned so far)" if self.tasks else "learned first: none is yet"
            raise ValueError(f"task must be {'in ' if self.tasks else ''}{known}, got {task}")

    def add(self, masks: Mapping[str, Tensor]) -> None:
        """The mask of the next task."""
        for name, mask in masks.items():
            self.bits[name].append(pack(mask))
        self.tasks += 1

    def mask(self, task: int) -> Masks:
        """The weights that a task uses."""
        self.check(task)
        return Masks({name: self.unpacked(name, task) for name in self.bits})

    def unpacked(self, name: str, task: int) -> Tensor:
        """The mask of one weight, where the weight is."""
        return unpack(self.bits[name][task], self.shapes[name]).to(self.devices[name])

    def mixture(self, name: str, coefficients: Tensor) -> Tensor:
        """Σ_t π_t M^t of one weight."""
        total = torch.zeros(self.shapes[name], device=self.devices[name])
        for task, share in enumerate(coefficients.tolist()):
            if share:
                total += share * self.unpacked(name, task)
        return total

    def sums(self, name: str, values: Tensor) -> Tensor:
        """Σ_i values_i M^t_i for every task t."""
        found = [values.detach()[self.unpacked(name, task)].double().sum().cpu() for task in range(self.tasks)]
        return torch.stack(found)

    def state(self) -> dict[str, Tensor]:
        """A row of bits for every task, by weight."""
        return {name: torch.stack(rows) for name, rows in self.bits.items() if rows}

    def load_state(self, tensors: Mapping[str, Tensor], tasks: int) -> None:
        """Take up what `state` gave."""
        self.tasks = tasks
        self.bits = {name: list(tensors[name]) if tasks else [] for name in self.shapes}


FREE = -1
MAX_TASKS = 2**15 - 1


class TaskMasks:
    """Who owns which weight, and from which magnitude on each task uses the weights of earlier ones.

    weights: name -> the weight, for shapes and devices; none of them is owned at first.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.tasks = 0
        self.owner = {n: torch.full(w.shape, FREE, dtype=torch.int16, device=w.device) for n, w in weights.items()}
        self.strength = {n: torch.zeros(w.shape, dtype=torch.float32, device=w.device) for n, w in weights.items()}
        self.threshold: dict[str, list[float]] = {n: [] for n in weights}
        self.chosen: list[int] = []
        self.bits = BitMasks({n: w.shape for n, w in weights.items()})
        self.bits.follow({n: w.device for n, w in weights.items()})
        self._cells: dict[str, Tensor] = {}

    def follow(self, devices: Mapping[str, torch.device]) -> None:
        """Go where the weights are."""
        self.bits.follow(devices)
        for name, device in devices.items():
            if self.owner[name].device != device:
                self.owner[name], self.strength[name] = self.owner[name].to(device), self.strength[name].to(device)
                self._cells = {}

    # --- which weights ------------------------------------------------------------------------------------------

    def free(self) -> Masks:
        """The weights that no task uses."""
        return Masks({n: owner == FREE for n, owner in self.owner.items()})

    def used(self) -> float:
        """The fraction of weights that some task uses."""
        return 1 - self.free().density()

    def mask(self, task: int) -> Masks:
        """M^t: the weights that a task uses."""
        self.check(task)
        return Masks({n: self._mask(n, task) for n in self.owner})

    def _mask(self, name: str, task: int) -> Tensor:
        if task in self.chosen:
            return self.bits.unpacked(name, self.chosen.index(task))
        owner, strength, threshold = self.owner[name], self.strength[name], self.threshold[name][task]
        if owner.device.type != "cpu":
            return ((strength >= threshold) & (owner < task) & (owner != FREE)) | (owner == task)
        numbers = owner.numpy()  # several times faster than torch here
        mask = strength.numpy() >= np.float32(threshold)
        mask &= numbers.view(np.uint16) < task  # as an unsigned number FREE is above all tasks
        mask |= numbers == task
        return torch.from_numpy(mask)

    def check(self, task: int) -> None:
        """An error that names the tasks there are, for any other number."""
        if not 0 <= task < self.tasks:
            known = f"0..{self.tasks - 1} (the tasks learned so far)" if self.tasks else "learned first: none is yet"
            raise ValueError(f"task must be {'in ' if self.tasks else ''}{known}, got {task}")

    # --- adding a task ------------------------------------------------------------------------------------------

    def complete(self, masks: Mapping[str, Tensor]) -> Masks:
        """The masks with every used weight that equals the smallest one taken: a threshold cannot part equals."""
        return Masks({n: masks[n] | self._reused(n, self._threshold(n, masks[n])) for n in self.owner})

    def _threshold(self, name: str, mask: Tensor) -> float:
        taken = self.strength[name][mask & (self.owner[name] != FREE)]
        return float(taken.min()) if taken.numel() else math.inf

    def _reused(self, name: str, threshold: float) -> Tensor:
        return (self.strength[name] >= threshold) & (self.owner[name] != FREE)

    def add(self, masks: Mapping[str, Tensor], strength: Mapping[str, Tensor]) -> None:
        """Give the next task these weights: the free ones among them are its own from now on.

        masks: as `complete` gave them.
        strength: |φ| of every weight; kept for the new ones, whose φ is frozen from now on.
        """
        if self.tasks == MAX_TASKS:
            raise ValueError(f"there can be no more than {MAX_TASKS} tasks")
        if self.complete(masks) != Masks(dict(masks)):
            raise ValueError("the masks part used weights of equal magnitude; call complete() first")
        for name, mask in masks.items():
            self.threshold[name].append(self._threshold(name, mask))
            new = mask & (self.owner[name] == FREE)
            self.owner[name][new] = self.tasks
            self.strength[name] = torch.where(new, strength[name].to(self.strength[name]), self.strength[name])
        self.tasks += 1
        self._cells = {}

    def add_chosen(self, masks: Mapping[str, Tensor]) -> None:
        """The mask of the next task, over weights of the tasks before it alone."""
        if self.tasks == MAX_TASKS:
            raise ValueError(f"there can be no more than {MAX_TASKS} tasks")
        for name, mask in masks.items():
            if (mask & (self.owner[name] == FREE)).any():
                raise ValueError(f"the mask of {name!r} has weights that no task owns")
            self.threshold[name].append(math.inf)
        self.bits.add(masks)
        self.chosen.append(self.tasks)
        self.tasks += 1
        self._cells = {}

    # --- all tasks at once --------------------------------------------------------------------------------------

    def mixture(self, name: str, coefficients: Tensor) -> Tensor:
        """Σ_t π_t M^t of one weight: one look-up per weight, whatever the number of tasks."""
        own, reuse = self._incidence(name)
        table = torch.zeros(self.tasks + 1, self.tasks + 1, dtype=torch.float64)
        pi = coefficients.double().cpu()
        table[:-1] = pi[:, None] + own.T @ (pi[:, None] * reuse)
        cells = self._cell(name)
        found = table.flatten().float().to(cells.device).index_select(0, cells).view(self.owner[name].shape)
        return found + self.bits.mixture(name, pi[self.chosen]) if self.chosen else found

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
        found = table.sum(1) + ((own @ table) * reuse).sum(1)
        if self.chosen:
            found[self.chosen] = self.bits.sums(name, values)
        return found

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
            owner, strength = self.owner[name].flatten(), self.strength[name].flatten()
            rank = torch.bucketize(strength, ordered.to(strength.device), right=True)
            row = torch.where(owner == FREE, self.tasks, owner).long()
            self._cells[name] = row.mul_(self.tasks + 1).add_(rank)
        return self._cells[name]

    # --- saving -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The owners as bit planes, log2(T + 1) bits per weight, the thresholds, and the masks that were chosen; the
        strengths are |φ|."""
        planes = {n: _planes(owner, self.tasks) for n, owner in self.owner.items()}
        threshold = {n: [None if t == math.inf else t for t in ts] for n, ts in self.threshold.items()}
        bits = {f"chosen.{n}": rows for n, rows in self.bits.state().items()}
        return {**planes, **bits}, {"tasks": self.tasks, "threshold": threshold, "chosen": list(self.chosen)}

    def load_state(self, planes: Mapping[str, Tensor], data: Mapping[str, Any], strength: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave, with |φ| of every weight."""
        self._cells, self.tasks, self.chosen = {}, data["tasks"], list(data.get("chosen", ()))
        self.bits.load_state({n: planes[f"chosen.{n}"] for n in self.owner if self.chosen}, len(self.chosen))
        for name, owner in self.owner.items():
            self.threshold[name] = [math.inf if t is None else float(t) for t in data["threshold"][name]]
            self.owner[name] = _owner(planes[name], self.tasks, owner.shape).to(owner.device)
            self.strength[name] = strength[name].to(self.strength[name]).masked_fill(self.owner[name] == FREE, 0)


def _bits(tasks: int) -> int:
    """Bits that tell the tasks and "free" apart."""
    return tasks.bit_length()


def _planes(owner: Tensor, tasks: int) -> Tensor:
    """One row of packed bits per binary digit of the owner's number, counted from 1; free is 0."""
    number = owner + 1
    rows = [pack((number >> bit) & 1 > 0) for bit in range(_bits(tasks))]
    return torch.stack(rows) if rows else torch.zeros(0, (owner.numel() + 7) // 8, dtype=torch.uint8)


def _owner(planes: Tensor, tasks: int, shape: torch.Size) -> Tensor:
    if len(planes) != _bits(tasks):
        raise ValueError(f"owners among {tasks} tasks take {_bits(tasks)} bit planes, got {len(planes)}")
    number = torch.zeros(shape, dtype=torch.int16)
    for bit, row in enumerate(planes):
        number += unpack(row, shape).to(torch.int16) << bit
    return number - 1
