"""EWC, Laplace, SI and MAS: one quadratic penalty on the weights, four ways to tell which of them matter."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer

from powerprop.continual.data import Source
from powerprop.continual.importance import Labels, check_information, check_labels, diagonal_fisher, sensitivity
from powerprop.continual.layers import check_protect, protected
from powerprop.continual.saving import below
from powerprop.continual.strategy import OptimizerFactory, Progress, Strategy, check_least

__all__ = ["EWC", "MAS", "SI", "Importances", "Laplace", "Quadratic"]


class _Parabola(torch.autograd.Function):
    """Σ Ω (θ - θ*)² and its gradient 2Ω(θ - θ*), in half of the passes over the weights that autograd would make."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, importance: Tensor, anchor: Tensor) -> Tensor:
        away = weight - anchor
        pull = importance * away
        ctx.save_for_backward(pull)
        ctx.dtype = weight.dtype
        return (away.mul_(pull) if away.dtype == pull.dtype else away * pull).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        (pull,) = ctx.saved_tensors
        return (pull * (2 * slope)).to(ctx.dtype), None, None


class Importances:
    """Importances Ω of the weights and the place θ* that they are held at: two numbers per weight, however many tasks.

    Nothing more is needed where every task has its own, because a sum of parabolas is a parabola,

        Σ_t F_t (θ - θ_t)² = Ω (θ - θ*)² + const,    Ω = Σ F_t,    θ* = Σ F_t θ_t / Ω.
    """

    def __init__(self) -> None:
        self.importance: dict[str, Tensor] = {}
        self.anchor: dict[str, Tensor] = {}

    def follow(self, weights: Mapping[str, Tensor]) -> None:
        """Go where the weights are."""
        for tensors in (self.importance, self.anchor):
            tensors.update({name: tensor.to(weights[name].device) for name, tensor in tensors.items()})

    def distance(self, weights: Mapping[str, Tensor]) -> Tensor | None:
        """Σ Ω (θ - θ*)² over some weights."""
        self.follow(weights)
        known = [name for name in self.importance if weights[name].grad is not None]
        each = [_Parabola.apply(weights[n], self.importance[n], self.anchor[n]) for n in known]  # type: ignore[no-untyped-call]
        return torch.stack(each).sum() if each else None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        parts = {"importance": self.importance, "anchor": self.anchor}
        return {f"{kind}/{name}": t for kind, tensors in parts.items() for name, t in tensors.items()}, {}

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        copies = {name: t.clone() for name, t in tensors.items()}
        self.importance, self.anchor = below("importance", copies), below("anchor", copies)


class Quadratic(Strategy):
    """Holds weights where they were, each as firmly as it matters to the tasks so far:

        L(θ) + λ/2 Σ_i Ω_i (θ_i - θ*_i)²

    Methods differ in `importances`. θ are the weights that the network multiplies by, also under α > 1: the gradient
    of the penalty reaches φ through the same slope as that of the loss, so that small weights are hardly held. Weights
    that the loss of the current task does not use, such as the heads of other tasks, stay where they are anyway.

    strength: λ, the weight of the penalty.
    protect: name patterns of the parameters that are held, such as `"shared.*"`; by default all. Parts that only one
        task uses need no importances, which are two numbers per weight.
    Further arguments are those of `Strategy`.
    """

    traits: ClassVar[tuple[str, ...]] = ("acts on weights",)

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, strength: float,
        protect: str | Sequence[str] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, optimizer, **options)
        check_least(strength=(strength, 0))
        self.strength, self.protect = strength, check_protect(model, protect)
        self.consolidated = Importances()
        self.parts["importances"] = self.consolidated

    @abstractmethod
    def importances(self, data: Source) -> dict[str, Tensor]:
        """How much each weight matters to the task in hand; weights that it does not use may be left out."""

    def penalty(self) -> Tensor | None:
        """λ/2 Σ Ω (θ - θ*)²."""
        distance = self.consolidated.distance(self.weights())
        return None if distance is None else 0.5 * self.option(Quadratic, "strength") * distance

    def end_task(self, data: Source, validation: Source, progress: Progress | None) -> None:
        """Add the importances of the task."""
        found, weights = self.importances(data), self.weights()
        self.consolidated.follow(weights)
        with torch.no_grad():
            own = {name: each for name, each in found.items() if name in weights}
            self.hold(own, {name: weight.detach().clone() for name, weight in weights.items()})

    def hold(self, found: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
        """Ω += found, and all that matters is held where it is now."""
        known = self.consolidated.importance
        known |= {name: known[name] + new if name in known else new for name, new in found.items()}
        self.consolidated.anchor = {name: weights[name] for name in known}

    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters that are held, by name."""
        return protected(self.model, self.option(Quadratic, "protect"))


class EWC(Quadratic):
    """Elastic weight consolidation: the Fisher information of every task (Kirkpatrick et al., 2017).

        L(θ) + λ/2 Σ_t Σ_i F_ti (θ_i - θ*_ti)²,    F_t the diagonal Fisher information of task t at θ*_t

    Every task pulls towards its own weights θ*_t. Their sum is kept in closed form, see `Importances`.

    labels: which labels the Fisher information of a classifier is taken with, see `diagonal_fisher`.
    damping: δ, a part of the mean information of a parameter that each of its weights has on top, F + δ·mean(F). Where
        outputs are saturated, such as pixels that are always black, the information is next to nothing and the
        parabola lets the weights go far beyond where it holds; 0 is the published method.
    Further arguments are those of `Quadratic`.

    Examples:
        >>> learner = continual.EWC(model, sgd, strength=100.0, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, strength: float = 100.0,
        labels: Labels = "sampled", damping: float = 0.0, **options: Any,
    ) -> None:  # fmt: skip
        check_labels(labels)
        if not 0 <= damping < math.inf:
            raise ValueError(f"damping must be a number of at least 0, got {damping}")
        super().__init__(model, optimizer, strength=strength, **options)
        check_information(self.objective, labels)
        self.labels, self.damping = labels, damping

    def importances(self, data: Source) -> dict[str, Tensor]:
        """The diagonal of the Fisher information, exactly, and what damping adds to it."""
        with self.viewing(self.current) as model:
            found = diagonal_fisher(
                self.model, data.in_order(), self.objective, self.current,
                labels=self.labels, model=model, generator=self.generator("fisher"),
            )  # fmt: skip
        return {n: each + self.damping * each.mean() for n, each in found.items()} if self.damping else found

    def hold(self, found: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
        """Ω += F and θ* += F/Ω (θ - θ*), where Ω is not zero: the mean of all tasks' weights."""
        held = self.consolidated
        for name, fisher in found.items():
            importance = held.importance[name] = held.importance.get(name, torch.zeros_like(fisher)) + fisher
            share = torch.where(importance > 0, fisher / importance, 1.0).to(weights[name].dtype)
            held.anchor[name] = torch.lerp(held.anchor.get(name, weights[name]), weights[name], share)


class Laplace(EWC):
    """Online EWC, a Laplace approximation that is carried from task to task (Schwarz et al., 2018).

        L(θ) + λ/2 Σ_i Ω_i (θ_i - θ*_i)²,    Ω ← γΩ + F_t,    θ* the weights after the latest task

    decay: γ ≤ 1, by which earlier tasks fade.
    Further arguments are those of `EWC`.

    Examples:
        >>> learner = continual.Laplace(model, sgd, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, decay: float = 1.0, **options: Any
    ) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be in [0, 1], got {decay}")
        super().__init__(model, optimizer, **options)
        self.decay = decay

    def hold(self, found: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
        """Ω ← γΩ + F, held where the weights are now."""
        for importance in self.consolidated.importance.values():
            importance.mul_(self.option(Laplace, "decay"))
        Quadratic.hold(self, found, weights)


class MAS(Quadratic):
    """Memory aware synapses: how much the outputs depend on a weight, without labels (Aljundi et al., 2018).

        Ω_i += 1/N Σ_n |∂‖f(x_n)‖² / ∂θ_i|

    mean: take the mean of the squared outputs instead of their sum ‖f‖², so that the penalty does not grow with them.
    Further arguments are those of `Quadratic`.

    Examples:
        >>> learner = continual.MAS(model, sgd, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, strength: float = 1.0, mean: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, optimizer, strength=strength, **options)
        self.mean = mean

    def importances(self, data: Source) -> dict[str, Tensor]:
        """The mean absolute gradient of the squared length of the outputs."""
        with self.viewing(self.current) as model:
            return sensitivity(self.model, data.in_order(), self.objective, model, self.mean, self.current)


class SI(Quadratic):
    """Synaptic intelligence: how much of the loss a weight took away on its path (Zenke et al., 2017).

        ω_i += -g_i Δθ_i    at every step, g the gradient of the task's own loss
        Ω_i += max(0, ω_i) / ((θ_i - θ_i at the beginning)² + ξ)    after the task

    A sum below zero, of a weight that did harm on the whole, counts as none, so that the penalty has a minimum. Needs
    no data at the end.

    xi: ξ, which keeps weights that hardly moved from having an importance without bound.
    Further arguments are those of `Quadratic`.

    Examples:
        >>> learner = continual.SI(model, sgd, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    task_state: ClassVar[tuple[str, ...]] = ("_path", "_start")

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, strength: float = 1.0, xi: float = 0.1,
        **options: Any,
    ) -> None:  # fmt: skip
        if not xi > 0:
            raise ValueError(f"xi must be positive, got {xi}")
        super().__init__(model, optimizer, strength=strength, **options)
        self.xi = xi
        self._path: dict[str, Tensor] = {}
        self._start: dict[str, Tensor] = {}
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self._copies: dict[str, tuple[Tensor, Tensor]] = {}

    def begin_task(self) -> None:
        """A new path, from here."""
        self._path, self._start = {}, {n: p.detach().clone() for n, p in self.weights().items()}

    def penalty(self) -> Tensor | None:
        """λ/2 Σ Ω (θ - θ*)²; on the way, the gradient of the task alone is noted."""
        self._before = {}
        for name, weight, grad in ((n, w.detach(), w.grad) for n, w in self.weights().items() if w.grad is not None):
            if name not in self._copies:  # memory that is kept for the whole task, as fresh costs page faults
                self._copies[name] = torch.empty_like(weight), torch.empty_like(grad)
            before, gradient = self._before[name] = self._copies[name]
            before.copy_(weight)
            gradient.copy_(grad)
        return super().penalty()

    def after_step(self) -> None:
        """ω -= g Δθ."""
        weights = self.weights()
        for name, (before, gradient) in self._before.items():
            wide = torch.promote_types(before.dtype, torch.float32)
            path = self._path.setdefault(name, torch.zeros_like(before, dtype=wide))
            path.addcmul_(gradient, before.sub_(weights[name].detach()))
        self._before = {}

    def importances(self, data: Source) -> dict[str, Tensor]:
        """The part that each weight had in the fall of the loss, per squared distance."""
        moved = {name: weight.detach() - self._start[name] for name, weight in self.weights().items()}
        found = {n: path.clamp(min=0) / (moved[n].square() + self.xi) for n, path in self._path.items()}
        self._path, self._start, self._copies = {}, {}, {}
        return found
