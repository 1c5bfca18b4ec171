"""Steps that do not go against a memory of earlier examples."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.continual.gradients import Gradients
from powerprop.continual.optimiser import OptimizerFactory
from powerprop.continual.qp import least_above
from powerprop.continual.replay import Replay

__all__ = ["AGEM", "GEM"]


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
    """

    once: ClassVar[bool] = True
    acts_on_weights: ClassVar[bool] = True
    OPTIONS: ClassVar[tuple[str, ...]] = ("margin",)
    EQUAL = True
    PUBLISHED: ClassVar[dict[str, dict[str, Any]]] = {
        "split-mnist": {
            "memory": 4400,
            "margin": 0.5,
            "reference": "Hsu et al., Re-evaluating Continual Learning Scenarios, 2018",
        },
        "permuted-mnist": {
            "memory": 5120,
            "margin": 0.5,
            "reference": "Lopez-Paz & Ranzato, Gradient Episodic Memory, 2017",
        },
    }
    """Split-MNIST: Hsu et al., 2018, plain SGD with 0.01 for 4 epochs. Permuted-MNIST: Lopez-Paz & Ranzato, 2017, 256
    examples of each of 20 tasks, plain SGD with 0.1 and batches of 10, one epoch."""

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, margin: float = 0.5, **options: Any
    ) -> None:
        super().__init__(model, optimizer, **options)
        if not margin >= 0:
            raise ValueError(f"margin must not be negative, got {margin}")
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
    """

    once: ClassVar[bool] = True
    acts_on_weights: ClassVar[bool] = True
    EQUAL = True
    PUBLISHED: ClassVar[dict[str, dict[str, Any]]] = {
        "permuted-mnist": {
            "memory": 5000,
            "rehearsed": 256,
            "reference": "Chaudhry et al., Efficient Lifelong Learning with A-GEM, 2019",
        },
        "split-cifar100": {
            "memory": 1105,
            "rehearsed": 256,
            "reference": "Chaudhry et al., Efficient Lifelong Learning with A-GEM, 2019",
        },
    }
    """Chaudhry et al., 2019: 25 examples of each class and task on permuted-MNIST (20 tasks), 13 on split CIFAR-100 (17
    tasks of 5 classes); plain SGD with 0.1 and 0.03, batches of 10, one epoch."""

    def after_backward(self) -> None:
        """Project the gradient, if it goes against that of the memory."""
        if not len(self.buffer):
            return
        space = Gradients(self.optimizer, self.model)
        reference = space.of(self.loss_again(self.drawn()))[None]
        along = space.products(space.current()[None], reference)[0, 0]
        if along < 0:
            space.add(-along / space.products(reference, reference)[0, 0] * reference[0])
