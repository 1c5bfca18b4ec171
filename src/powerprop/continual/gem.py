"""Steps that do not go against a memory of earlier examples."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.continual.replay import Replay
from powerprop.continual.strategy import OptimizerFactory, check_least
from powerprop.optim import Powerprop, Rate

__all__ = ["AGEM", "GEM", "Gradients", "least_above", "least_nonnegative"]

Array = NDArray[np.float64]

EXACT = 1e-10
"""What is smaller than this, where the diagonal is 1, is rounding."""


def least_above(bound: float, p: Array, q: Array) -> Array:
    """The v ≥ bound with the least ½vᵀPv + qᵀv, for P = GGᵀ and q = Gg.

    With v = bound + u it is a program in u ≥ 0.
    """
    return bound + least_nonnegative(p, q + bound * p.sum(1))


def least_nonnegative(p: Array, q: Array) -> Array:
    """The u ≥ 0 with the least ½uᵀPu + qᵀu, by an active set: exact after finitely many steps.

    P is positive semidefinite and q in its range, as for P = GGᵀ and q = Gg: a variable that is set free then has a
    column that does not depend on those which are free already, so that singular P need no further care.

    Reference: Lawson & Hanson, Solving Least Squares Problems, 1974, chapter 23.
    """
    scale = np.sqrt(np.diag(p))
    scale = np.where(scale > 0, scale, np.inf)  # a zero gradient forbids nothing: its variable stays 0
    p, q = p / np.outer(scale, scale), q / scale
    u, free = np.zeros(len(q)), np.zeros(len(q), dtype=bool)
    tolerance = EXACT * max(1.0, float(np.abs(q).max(initial=0.0)))
    for _ in range(10 * len(q) + 10):
        downhill = np.where(free, 0.0, -(p @ u + q))
        if downhill.max(initial=0.0) <= tolerance:
            return u / scale
        free[int(downhill.argmax())] = True
        u = _settled(p, q, u, free)
    raise RuntimeError(f"no solution after {10 * len(q) + 10} steps for P = {p.tolist()}, q = {q.tolist()}")


def _settled(p: Array, q: Array, u: Array, free: NDArray[np.bool_]) -> Array:
    """Go to the least among the free variables; those that would become negative on the way stay at 0."""
    while free.any():
        aim = np.zeros(len(q))
        aim[free] = np.linalg.lstsq(p[np.ix_(free, free)], -q[free], rcond=EXACT)[0]
        below = free & (aim <= 0)
        if not below.any():
            return aim
        way = (u[below] / np.maximum(u[below] - aim[below], np.finfo(float).tiny)).min()
        u = u + way * (aim - u)
        free &= u > EXACT * max(1.0, float(u.max()))
        u = np.where(free, u, 0.0)
    return np.zeros(len(q))


class Gradients:
    """The entries that the step at hand moves, and inner products of gradients over them.

    A step moves φ, not w: Δφ = -η s ∂L/∂w with s = α|φ|^(α-1), so that to first order another loss M changes by

        ΔM = Σ s ∂M/∂w Δφ = -η Σ s² ∂L/∂w ∂M/∂w = -η ⟨∂L/∂w, ∂M/∂w⟩

    Inner products are weighed by s². Weights that are masked, frozen or have no gradient do not move and do not count.
    """

    def __init__(self, optimizer: Powerprop, model: nn.Module) -> None:
        _check_rate(optimizer)
        moved = {n: p for n, p in model.named_parameters() if p.grad is not None and not optimizer.frozen.holds(p)}
        self.parameters = list(moved.values())
        self.metric = _flat([_metric(optimizer, name, p) for name, p in moved.items()])

    def current(self) -> Tensor:
        """The gradient of the step."""
        return _flat([p.grad for p in self.parameters if p.grad is not None])

    def of(self, loss: Tensor) -> Tensor:
        """The gradient of another loss; that of the step stays as it is."""
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        pairs = zip(found, self.parameters, strict=True)
        return _flat([torch.zeros_like(p) if gradient is None else gradient for gradient, p in pairs])

    def products(self, rows: Tensor, others: Tensor) -> Tensor:
        """⟨a, b⟩ of every row a with every row b."""
        return (rows * self.metric) @ others.T

    @torch.no_grad()
    def add(self, change: Tensor) -> None:
        """Add a vector to the gradient of the step."""
        parts = torch.split(change, [p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            assert parameter.grad is not None
            parameter.grad += part.view_as(parameter).to(parameter.grad.dtype)


def _check_rate(optimizer: Powerprop) -> None:
    """Matched, ρ depends on the step itself, and no metric says beforehand which steps go against a memory."""
    if optimizer.rate == "matched" and any(weight.alpha > 1 for weight in optimizer.masters.values()):
        raise ValueError(f'memories of gradients need rate="paper" where alpha > 1, got {optimizer!r}')


def _metric(optimizer: Powerprop, name: str, parameter: nn.Parameter) -> Tensor:
    """s² where the parameter is trained, 0 elsewhere."""
    if name not in optimizer.masters:
        return torch.ones_like(parameter)
    squared, trained = optimizer.slope(name).square(), optimizer.masters[name].trainable
    return squared if trained is None else squared * trained


def _flat(tensors: list[Tensor]) -> Tensor:
    """One vector, in float32 at least."""
    return torch.cat([t.detach().flatten().to(torch.promote_types(t.dtype, torch.float32)) for t in tensors])


class GEM(Replay):
    """Gradient episodic memory: the nearest step that does not raise the loss of any earlier task.

        least ½‖g̃ - g‖²   with   ⟨g̃, gₖ⟩ ≥ 0   for every earlier task k

    Its dual has a variable for each earlier task: the least ½vᵀGGᵀv + (Gg)ᵀv with v ≥ margin, and g̃ = g + Gᵀv. A margin
    above 0 favours steps that lower the earlier losses. Inner products are those of φ (see `Gradients`), so that
    to first order no step of plain gradient descent goes against a memory, whatever α is.

    Reference: Lopez-Paz & Ranzato, Gradient Episodic Memory for Continual Learning, NeurIPS 2017. They keep the last
    examples of a task; here they are drawn at random from all of it, since data may be sorted.

    margin: the least v, where any constraint is broken.
    rehearsed: examples of each task for its gradient; None takes all that are in the memory.

    Examples:
        >>> learner = continual.GEM(model, sgd, memory=100, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    default_rate: ClassVar[Rate] = "paper"

    traits: ClassVar[tuple[str, ...]] = ("once", "acts on weights")
    EQUAL = True

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, margin: float = 0.5, **options: Any
    ) -> None:
        check_least(margin=(margin, 0))
        super().__init__(model, optimizer, **options)
        self.margin = margin

    def after_backward(self) -> None:
        """Project the gradient, if it goes against the memory of a task."""
        if not len(self.buffer):
            return
        space = Gradients(self.optimizer, self.model)
        rows = [self._of_task(task) for task in self.buffer.known()]
        memories = torch.stack([space.of(self.loss_again(own)) for own in rows])
        along = space.products(memories, space.current()[None])[:, 0]
        if (along < 0).any():
            p, q = (np.array(each.tolist()) for each in (space.products(memories, memories), along))
            v = least_above(self.margin, p, q)
            space.add(torch.tensor(v, dtype=memories.dtype, device=memories.device) @ memories)

    def _of_task(self, task: int) -> Tensor:
        rows = self.buffer.rows_of(task)
        return self.buffer.draw(self.rehearsed or len(rows), self.generator("rehearsed"), rows)


class AGEM(Replay):
    """Averaged gradient episodic memory: no step raises the mean loss of the memory.

        g̃ = g - (⟨g, r⟩ / ⟨r, r⟩) r   if   ⟨g, r⟩ < 0,   r the gradient of a random batch of the memory

    Inner products are those of φ (see `Gradients`). One constraint, however many tasks there are: a step costs twice
    that of plain training.

    Reference: Chaudhry et al., Efficient Lifelong Learning with A-GEM, ICLR 2019.

    Examples:
        >>> learner = continual.AGEM(model, sgd, memory=100, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    default_rate: ClassVar[Rate] = "paper"

    traits: ClassVar[tuple[str, ...]] = ("once", "acts on weights")
    EQUAL = True

    def after_backward(self) -> None:
        """Project the gradient, if it goes against that of the memory."""
        if not len(self.buffer):
            return
        space = Gradients(self.optimizer, self.model)
        reference = space.of(self.loss_again(self.drawn()))[None]
        along = space.products(space.current()[None], reference)[0, 0]
        if along < 0:
            space.add(-along / space.products(reference, reference)[0, 0] * reference[0])
