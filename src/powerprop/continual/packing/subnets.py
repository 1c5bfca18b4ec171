"""The sub-networks inside one network: which weights each task uses, and the network as a task or a mixture sees it."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from powerprop.continual.holding import Holder
from powerprop.continual.objective import Model
from powerprop.continual.packing.signature import Sample, Signatures
from powerprop.continual.packing.taskmasks import TaskMasks
from powerprop.continual.view import wearing
from powerprop.mask_entries import count
from powerprop.masks import Masks
from powerprop.optim import Powerprop
from powerprop.weight import masked

__all__ = ["Subnetworks"]

Weights = dict[str, Tensor]
KEPT_BYTES = 2**28
"""Weights of tasks that were asked for last are kept up to this size: switching between a few tasks is free."""


class Subnetworks:
    """One network, one set of weights, a sub-network for every task packed so far.

    While a task is learned all weights are active and those that no task uses are trained; everything that is no
    weight (biases, norms, embeddings, buffers) is trained with the first task only, and every head with its own. The
    optimiser keeps all of that, whoever calls its `step`. Packed weights never change again.

    model: its weights are those that the optimiser gives an α, without the heads and what does not require gradients.
    optimizer: the Powerprop optimiser of the model.
    head_of: the task whose head a name is inside of, or None.
    bound: the model as a function of the inputs alone, for a task.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Powerprop,
        head_of: Callable[[str], int | None] = lambda name: None,
        bound: Callable[[int | None], Model] | None = None,
    ) -> None:
        self.model, self.optimizer, self.head_of = model, optimizer, head_of
        self.bound = bound or (lambda task: model)
        shared = {n: m for n, m in optimizer.masters.items() if head_of(n) is None}
        self.masters = {n: m for n, m in shared.items() if m.param.requires_grad}
        if not self.masters:
            raise ValueError("the model has no weights to share among tasks: only heads and frozen layers get an α")
        self.masks = TaskMasks({n: m.param for n, m in self.masters.items()})
        self.signatures = Signatures()
        self.spread = {n: float(m.param.detach().std(correction=0)) for n, m in self.masters.items()}
        self._theta: Weights = {}
        self._shown: OrderedDict[int, Weights] = OrderedDict()
        self._seen: tuple[tuple[int, int], ...] = ()
        self._holder = Holder(model, optimizer, head_of)

    def check_same(self) -> None:
        """An error if a parameter is another one than it was."""
        self._holder.check_same()

    def let_go(self) -> None:
        """The model is somebody else's."""
        self._holder.let_go()

    def settle(self) -> None:
        """In a copy: weights are elsewhere, and held anew."""
        self._seen = ()
        self._holder.hold_again()

    # --- learning -----------------------------------------------------------------------------------------------

    def open(self, task: int, generator: torch.Generator, visible: Masks | None = None) -> None:
        """All weights are used, or the visible ones; those that no task has packed are trained.

        task: how many were packed before, according to the learner.
        generator: draws free weights again that a training which diverged has left without a finite value.
        """
        self._check_count(task)
        self._follow()
        free = self.masks.free()
        self._draw({n: free[n] & ~m.theta().isfinite() for n, m in self.masters.items()}, generator)
        self.optimizer.set_masks(visible, free if self.masks.tasks else None)
        self._holder.hold(self.masters, learning=self.masks.tasks)

    def open_frozen(self, task: int) -> None:
        """No weight is trained but those of the task's head; which of them are used is another's choice."""
        self._check_count(task)
        self._follow()
        self._holder.hold((), learning=task)

    def _check_count(self, task: int) -> None:
        if task != self.masks.tasks:
            text = f"{self.masks.tasks} tasks are packed, but the learner has learned {task}: packing was interrupted"
            raise RuntimeError(f"{text}; load the learner that was saved last")

    def restrict(self, masks: Masks) -> None:
        """Only these weights are used, and those of them that no task has packed are trained."""
        self.optimizer.set_masks(masks, masks & self.masks.free())

    def pack(self, masks: Masks, sample: Sample | None, generator: torch.Generator) -> None:
        """Protect the weights of a new task for good, and initialise again those that no task uses.

        sample: some inputs of the task, for its signature, if it can have one.
        """
        self.signatures.add(sample)
        self.masks.add(masks, self._strength())
        self._draw(self.masks.free(), generator)
        self.show(self.masks.tasks - 1)

    def pack_chosen(self, masks: Masks, sample: Sample | None) -> None:
        """Keep the mask of a new task that owns no weight."""
        self.signatures.add(sample)
        self.masks.add_chosen(masks)
        self.show(self.masks.tasks - 1)

    def _draw(self, where: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """New weights from an interval, with the variance of the layer's first ones.

        The tails of a normal distribution would be among the largest weights, and be taken by the next task, without
        having learned anything.
        """
        for name, master in self.masters.items():
            if count(where[name]):
                limit = math.sqrt(3) * self.spread[name]
                fresh = torch.empty(master.param.shape, dtype=torch.float32, device="cpu")
                fresh = fresh.uniform_(-limit, limit, generator=generator).to(master.param.device)
                master.put(where[name], fresh[where[name]])

    def _strength(self) -> Weights:
        return {n: m.theta().abs() for n, m in self.masters.items()}

    # --- the network as a task sees it --------------------------------------------------------------------------

    def theta(self) -> Weights:
        """All effective weights, whether used or not."""
        self._follow()
        if not self._theta:
            self._theta = {n: m.theta().to(m.param.dtype) for n, m in self.masters.items()}
        return self._theta

    def weights(self, task: int) -> Weights:
        """θ ⊙ M^t; those of the last tasks asked for are kept, as many as fit."""
        self._follow()
        if task not in self._shown:
            self._shown[task] = self.masked(self.masks.mask(task))
        self._shown.move_to_end(task)
        size = sum(w.numel() * w.element_size() for w in self._shown[task].values())
        while len(self._shown) > max(1, KEPT_BYTES // size):
            self._shown.popitem(last=False)
        return self._shown[task]

    def masked(self, masks: Mapping[str, Tensor]) -> Weights:
        """θ ⊙ M."""
        return {n: masked(theta, masks[n]) for n, theta in self.theta().items()}

    @contextmanager
    def viewing(self, weights: Weights, task: int | None) -> Iterator[Model]:
        """The network with other weights than it holds, and the head of a task; the model's own are not touched."""
        self.optimizer.frozen.restore()  # forward passes in training mode may have moved statistics
        with wearing(self.model, weights):
            yield self.bound(task)

    def show(self, task: int) -> None:
        """Put the sub-network of a task into the model, as a plain sparse network in evaluation mode."""
        self._follow()
        nothing = Masks({n: torch.zeros_like(m.param, dtype=torch.bool) for n, m in self.masters.items()})
        self.optimizer.set_masks(self.masks.mask(task), nothing)
        self._holder.hold(self.masters, learning=None)
        self.model.eval()

    def _follow(self) -> None:
        """Forget what was computed from weights that have moved on since, or to another device; so do the masks."""
        seen = tuple((m.param._version, m.param.data_ptr()) for m in self.masters.values())
        if seen != self._seen:
            for master in self.masters.values():
                master.sync()
            self._seen, self._theta = seen, {}
            self._shown.clear()
            self.masks.follow({n: m.param.device for n, m in self.masters.items()})

    # --- all tasks at once --------------------------------------------------------------------------------------

    def mixture(self, coefficients: Tensor) -> Weights:
        """θ ⊙ Σ_t π_t M^t, and Σ_t π_t of the heads in the place of the first."""
        mixed = {n: theta * self.masks.mixture(n, coefficients).to(theta) for n, theta in self.theta().items()}
        for name, stack in self._head_stacks().items():
            mixed[name] = torch.einsum("t,t...->...", coefficients.to(stack), stack)
        return mixed

    def coefficient_gradient(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """∂H/∂π_t = Σ_i ∂H/∂w_i θ_i M^t_i for all tasks, from the gradient at a mixture's weights: one pass over it."""
        total = torch.zeros(self.masks.tasks, dtype=torch.float64)
        for name, theta in self.theta().items():
            total += self.masks.sums(name, gradients[name] * theta)
        for name, stack in self._head_stacks().items():
            total += (stack * gradients[name]).flatten(1).sum(1).double().cpu()
        return total

    def _head_stacks(self) -> Weights:
        """The parameters of the heads packed so far, one row per task, by the names of the first head's."""
        heads = self.heads()
        if not heads:
            return {}
        columns = zip(*(head.items() for head in heads), strict=True)
        return {column[0][0]: torch.stack([parameter.detach() for _, parameter in column]) for column in columns}

    def heads(self) -> list[dict[str, nn.Parameter]]:
        """The parameters of every head packed so far by name; none without heads."""
        named = dict(self.model.named_parameters())
        of_task = [{n: p for n, p in named.items() if self.head_of(n) == task} for task in self.task_numbers()]
        return of_task if any(of_task) else []

    def task_numbers(self) -> Iterable[int]:
        """The numbers of the tasks packed so far."""
        return range(self.masks.tasks)

    # --- saving -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Owners, thresholds and signatures; the weights themselves are saved by the learner."""
        planes, data = self.masks.state()
        return {**planes, **self.signatures.state()}, {**data, "spread": self.spread}

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """Take up what `state` gave, after the weights."""
        if data["threshold"].keys() != self.masters.keys():
            found, own = sorted(data["threshold"]), sorted(self.masters)
            raise ValueError(f"the saved learner has masks of {found}, this one shares {own} among tasks")
        self._seen = ()
        self.spread = dict(data["spread"])
        self.signatures.load_state(tensors)
        self.masks.load_state(tensors, data, self._strength())
        if self.masks.tasks:
            self.show(self.masks.tasks - 1)
