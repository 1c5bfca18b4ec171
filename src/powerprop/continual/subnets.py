"""The sub-networks inside one network: which weights each task uses, and the network as a task or a mixture sees it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from powerprop.absorb import masked
from powerprop.continual.signature import Signatures
from powerprop.continual.taskmasks import TaskMasks
from powerprop.entries import count
from powerprop.masks import Masks
from powerprop.optim import Powerprop

__all__ = ["Subnetworks"]

Weights = dict[str, Tensor]


class Subnetworks:
    """One network, one set of weights, a sub-network for every task packed so far.

    While a task is learned all weights are active and those that no task uses are trained; everything that is no
    weight (biases, norms, embeddings, buffers) is trained with the first task only. Packed weights never change again.

    model: its weights are those that the optimiser gives an α, without the heads and what does not require gradients.
    optimizer: the Powerprop optimiser of the model.
    heads: name of the submodule that has one output layer per task, if there is one; a task's head is its own.
    """

    def __init__(self, model: nn.Module, optimizer: Powerprop, heads: str | None) -> None:
        self.model, self.optimizer, self.heads = model, optimizer, heads
        shared = {n: m for n, m in optimizer.masters.items() if heads is None or not n.startswith(f"{heads}.")}
        self.masters = {n: m for n, m in shared.items() if m.param.requires_grad}
        if not self.masters:
            raise ValueError("the model has no weights to share among tasks: only heads and frozen layers get an α")
        self.masks = TaskMasks({n: m.param for n, m in self.masters.items()})
        self.signatures = Signatures()
        self.spread = {n: float(m.param.detach().std(correction=0)) for n, m in self.masters.items()}
        self._theta: Weights = {}
        self._shown: tuple[int, Weights] | None = None
        self._seen: tuple[tuple[int, int], ...] = ()
        self._buffers: Weights = {}

    def _own(self, name: str) -> bool:
        """True for what is inside the head of the task that is being learned."""
        return self.heads is not None and f"{name}.".startswith(f"{self.heads}.{self.masks.tasks}.")

    # --- learning -----------------------------------------------------------------------------------------------

    def open(self, task: int, generator: torch.Generator) -> None:
        """All weights are used; those that no task has packed are trained.

        task: how many were packed before, according to the learner.
        generator: draws free weights again that a training which diverged has left without a finite value.
        """
        if task != self.masks.tasks:
            text = f"{self.masks.tasks} tasks are packed, but the learner has learned {task}: packing was interrupted"
            raise RuntimeError(f"{text}; load the learner that was saved last")
        self._follow()
        free = self.masks.free()
        self._draw({n: free[n] & ~m.theta().isfinite() for n, m in self.masters.items()}, generator)
        self.optimizer.set_masks(None, free if self.masks.tasks else None)
        self._buffers = {}
        if self.masks.tasks:
            self._freeze_buffers()

    def _freeze_buffers(self) -> None:
        """Running statistics are used, not taken; what a forward pass changes all the same, `keep_buffers` undoes."""
        for name, module in self.model.named_modules():
            if getattr(module, "running_mean", None) is not None and not self._own(name):
                module.eval()
        self._buffers = {n: buffer.clone() for n, buffer in self.model.named_buffers() if not self._own(n)}

    def keep_buffers(self) -> None:
        """After a step: all buffers but those of the task's own head are again as the tasks before left them."""
        for name, kept in self._buffers.items():
            self.model.get_buffer(name).copy_(kept)

    def restrict(self, masks: Masks) -> None:
        """Only these weights are used, and those of them that no task has packed are trained."""
        self.optimizer.set_masks(masks, masks & self.masks.free())

    def drop_gradients(self) -> None:
        """Everything that is no weight stays as the first task left it, and every head as its own task did."""
        if self.masks.tasks:
            for name, param in self.model.named_parameters():
                if name not in self.masters and not self._own(name):
                    param.grad = None

    def pack(self, masks: Masks, inputs: Tensor, generator: torch.Generator) -> None:
        """Protect the weights of a new task for good, and initialise again those that no task uses.

        inputs: those that the task was trained on, for its signature.
        """
        self.signatures.add(inputs)
        self.masks.add(masks, self._strength())
        self._draw(self.masks.free(), generator)
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
        return {n: (m.theta() if m.phi is None else m.phi).abs() for n, m in self.masters.items()}

    # --- the network as a task sees it --------------------------------------------------------------------------

    def theta(self) -> Weights:
        """All effective weights, whether used or not."""
        self._follow()
        if not self._theta:
            self._theta = {n: m.theta().to(m.param.dtype) for n, m in self.masters.items()}
        return self._theta

    def weights(self, task: int) -> Weights:
        """θ ⊙ M^t; those of the last task asked for are kept."""
        self._follow()
        if self._shown is None or self._shown[0] != task:
            self._shown = (task, self.masked(self.masks.mask(task)))
        return self._shown[1]

    def masked(self, masks: Mapping[str, Tensor]) -> Weights:
        """θ ⊙ M."""
        return {n: masked(theta, masks[n]) for n, theta in self.theta().items()}

    def outputs(self, x: Tensor, weights: Weights, task: int) -> Tensor:
        """The network with other weights than it holds, and the head of a task; the model is not touched."""
        inputs = (x,) if self.heads is None else (x, task)
        return functional_call(self.model, weights, inputs)  # type: ignore[no-any-return]

    def show(self, task: int) -> None:
        """Put the sub-network of a task into the model, as a plain sparse network in evaluation mode."""
        self._follow()
        nothing = Masks({n: torch.zeros_like(m.param, dtype=torch.bool) for n, m in self.masters.items()})
        self.optimizer.set_masks(self.masks.mask(task), nothing)
        self.model.eval()

    def _follow(self) -> None:
        """Forget what was computed from weights that have moved on since, or to another device; so do the masks."""
        seen = tuple((m.param._version, m.param.data_ptr()) for m in self.masters.values())
        if seen != self._seen:
            for master in self.masters.values():
                master.sync()
            self._seen, self._theta, self._shown = seen, {}, None
            self.masks.follow({n: m.param.device for n, m in self.masters.items()})

    # --- all tasks at once --------------------------------------------------------------------------------------

    def mixture(self, coefficients: Tensor) -> Weights:
        """θ ⊙ Σ_t π_t M^t, and Σ_t π_t of the heads in the place of the first."""
        mixed = {n: theta * self.masks.mixture(n, coefficients).to(theta) for n, theta in self.theta().items()}
        for rest, stack in self._head_stacks().items():
            mixed[f"{self.heads}.0.{rest}"] = torch.einsum("t,t...->...", coefficients.to(stack), stack)
        return mixed

    def coefficient_gradient(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """∂H/∂π_t = Σ_i ∂H/∂w_i θ_i M^t_i for all tasks, from the gradient at a mixture's weights: one pass over it."""
        total = torch.zeros(self.masks.tasks, dtype=torch.float64)
        for name, theta in self.theta().items():
            total += self.masks.sums(name, gradients[name] * theta)
        for rest, stack in self._head_stacks().items():
            gradient = gradients[f"{self.heads}.0.{rest}"]
            total += (stack * gradient).flatten(1).sum(1).double().cpu()
        return total

    def _head_stacks(self) -> Weights:
        """The parameters of all heads packed so far, one row per task."""
        if self.heads is None:
            return {}
        heads = [dict(self.model.get_submodule(f"{self.heads}.{t}").named_parameters()) for t in self.task_numbers()]
        return {n: torch.stack([head[n].detach() for head in heads]) for n in heads[0]}

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
