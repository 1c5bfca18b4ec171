"""The sub-networks inside one network: which weights each task uses, and the network as a task or a mixture sees it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from powerprop.continual.signature import Signatures
from powerprop.continual.taskmasks import TaskMasks
from powerprop.masks import Masks
from powerprop.optim import Powerprop

__all__ = ["Subnetworks"]

Weights = dict[str, Tensor]


class Subnetworks:
    """One network, one set of weights, a sub-network for every task packed so far.

    While a task is learned all weights are active and those that no task uses are trained; everything that is no
    weight (biases, norms, embeddings) is trained with the first task only. Packed weights never change again.

    model: its weights are those that the optimiser gives an α, without the heads.
    optimizer: the Powerprop optimiser of the model.
    heads: name of the submodule that has one output layer per task, if there is one; a task's head is its own.
    """

    def __init__(self, model: nn.Module, optimizer: Powerprop, heads: str | None) -> None:
        self.model, self.optimizer, self.heads = model, optimizer, heads
        self.masters = {n: m for n, m in optimizer.masters.items() if not self._in_head(n)}
        if not self.masters:
            raise ValueError("the model has no weights to share among tasks: only heads get an α")
        self.masks = TaskMasks({n: m.param for n, m in self.masters.items()})
        self.signatures = Signatures()
        self.spread = {n: float(m.param.detach().std(correction=0)) for n, m in self.masters.items()}
        self._theta: Weights = {}
        self._shown: tuple[int, Weights] | None = None

    def _in_head(self, name: str) -> bool:
        return self.heads is not None and name.startswith(f"{self.heads}.")

    # --- learning -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """All weights are used; those that no task has packed are trained."""
        self._forget()
        self.optimizer.set_masks(None, self.masks.free() if self.masks.tasks else None)
        if self.masks.tasks:
            for module in self.model.modules():
                if getattr(module, "running_mean", None) is not None:
                    module.eval()

    def restrict(self, masks: Masks) -> None:
        """Only these weights are used, and those of them that no task has packed are trained."""
        self._forget()
        self.optimizer.set_masks(masks, masks & self.masks.free())

    def drop_gradients(self) -> None:
        """Everything that is no weight stays as the first task left it, and every head as its own task did."""
        if self.masks.tasks:
            for name, param in self.model.named_parameters():
                if name not in self.masters and not self._in_head(name):
                    param.grad = None

    def pack(self, masks: Masks, inputs: Tensor, generator: torch.Generator) -> None:
        """Protect the weights of a new task for good, and initialise again those that no task uses.

        They are drawn evenly from an interval, with the variance of the layer's first weights: the tails of a normal
        distribution would be among the largest weights, and be taken by the next task, without having learned anything.

        inputs: those that the task was trained on, for its signature.
        """
        self.masks.add(masks, self._strength())
        self.signatures.add(inputs)
        free = self.masks.free()
        for name, master in self.masters.items():
            limit = math.sqrt(3) * self.spread[name]
            fresh = torch.empty(master.param.shape).uniform_(-limit, limit, generator=generator)
            master.put(free[name], fresh.to(master.param.device))
        self.show(self.masks.tasks - 1)

    def _strength(self) -> Weights:
        return {n: (m.theta() if m.phi is None else m.phi).abs() for n, m in self.masters.items()}

    # --- the network as a task sees it --------------------------------------------------------------------------

    def theta(self) -> Weights:
        """All effective weights, whether used or not."""
        if not self._theta:
            self._theta = {n: m.theta().to(m.param.dtype) for n, m in self.masters.items()}
        return self._theta

    def weights(self, task: int) -> Weights:
        """θ ⊙ M^t; those of the last task asked for are kept."""
        if self._shown is None or self._shown[0] != task:
            self._shown = (task, self.masked(self.masks.mask(task)))
        return self._shown[1]

    def masked(self, masks: Mapping[str, Tensor]) -> Weights:
        """θ ⊙ M."""
        return {n: theta * masks[n] for n, theta in self.theta().items()}

    def outputs(self, x: Tensor, weights: Weights, task: int) -> Tensor:
        """The network with other weights than it holds, and the head of a task; the model is not touched."""
        inputs = (x,) if self.heads is None else (x, task)
        return functional_call(self.model, weights, inputs)  # type: ignore[no-any-return]

    def show(self, task: int) -> None:
        """Put the sub-network of a task into the model, as a plain sparse network."""
        self._forget()
        self.optimizer.set_masks(self.masks.mask(task), None)

    def _forget(self) -> None:
        self._theta, self._shown = {}, None

    # --- all tasks at once --------------------------------------------------------------------------------------

    def mixture(self, coefficients: Tensor) -> Weights:
        """θ ⊙ Σ_t π_t M^t, and Σ_t π_t of the heads in the place of the first."""
        mixed = {n: theta * self.masks.mixture(n, coefficients) for n, theta in self.theta().items()}
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
        self._forget()
        self.spread = dict(data["spread"])
        self.signatures.load_state(tensors)
        self.masks.load_state(tensors, data, self._strength())
        if self.masks.tasks:
            self.show(self.masks.tasks - 1)
