"""Learning without forgetting: the network of before, asked about the inputs of now."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.continual.data import Source, to_device
from powerprop.continual.objective import Classification
from powerprop.continual.strategy import OptimizerFactory, Progress, Strategy, check_between, check_least

__all__ = ["Distilling", "LwF", "distillation", "running_statistics_kept"]


def distillation(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """-T² Σ_c p_c log q_c with p, q = softmax(outputs/T), the mean over inputs (Hinton et al., 2015).

    Where the student has more outputs than the teacher, the teacher gives none of its belief to the last ones.
    """
    p = (teacher / temperature).softmax(1)
    log_q = (student / temperature).log_softmax(1)[:, : p.shape[1]]
    return -(temperature**2) * (p * log_q).sum(1).mean()


class Distilling(Strategy):
    """What LwF, iCaRL, DGR and RtF share: the network of before, which says what earlier classes are to answer.

    The copy lives while a task is learned; nothing is kept between tasks. The objective must be a `Classification`.
    """

    task_state: ClassVar[tuple[str, ...]] = ("teacher",)

    def __init__(self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, **options: Any) -> None:
        super().__init__(model, optimizer, **options)
        if not isinstance(self.objective, Classification):
            names = type(self).__name__, type(self.objective).__name__
            raise TypeError("{} asks for classes: objective must be Classification, got {}".format(*names))
        self.classification = self.objective
        self.teacher: nn.Module | None = None

    def begin_task(self) -> None:
        """The network as it is now will be the teacher."""
        self.teacher = copy.deepcopy(self.model).eval().requires_grad_(False) if self.current else None

    def end_task(self, data: Source, validation: Source, progress: Progress | None) -> None:
        """The teacher goes."""
        self.teacher = None


class LwF(Distilling):
    """Learning without forgetting: on the inputs of the current task, answer for every earlier task as before
    (Li & Hoiem, 2016).

        L(θ) + λ Σ_{k<t} T² H(softmax(f_k(x; θ_old)/T), softmax(f_k(x; θ)/T)),    θ_old the weights before task t

    f_k is the head of task k. With one output layer for all tasks, the terms are all the same one: outputs of the
    classes so far, of which θ_old knows those of earlier tasks ("stream"), or all outputs (labels of a "task").
    In a loop of one's own, show the batch: learner.step(loss, batch).

    strength: λ. As the terms are as many as earlier tasks, 1 weighs the task in hand by 1/t of the whole.
    temperature: T.
    Further arguments are those of `Strategy`; the objective must be a `Classification`.

    Examples:
        >>> learner = continual.LwF(model, sgd, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    traits: ClassVar[tuple[str, ...]] = ("once",)

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, strength: float = 1.0,
        temperature: float = 2.0, **options: Any,
    ) -> None:  # fmt: skip
        check_least(strength=(strength, 0))
        check_between(temperature=(temperature, 0, torch.inf))
        super().__init__(model, optimizer, **options)
        self.strength, self.temperature = strength, temperature

    def penalty(self) -> Tensor | None:
        """How far the answers for earlier tasks have moved, on the batch in hand."""
        strength: float = self.option(LwF, "strength")
        if self.teacher is None or not strength:
            return None
        x = self.objective.inputs(to_device(self.shown_batch("looks at the inputs of a step again"), self.device))
        per_head = range(self.current) if self.sees_task else [self.current]
        with running_statistics_kept(self.model):
            terms = [self._term(x, task) for task in per_head]
        return strength * self.current * torch.stack(terms).mean()

    def _term(self, x: Tensor, task: int) -> Tensor:
        with torch.no_grad():
            before = self.bound(task, self.teacher)(x)
        with self.viewing(task) as model:
            now = model(x)
        temperature: float = self.option(LwF, "temperature")
        return distillation(self._columns(now, self.current + 1), self._columns(before, self.current), temperature)

    def _columns(self, outputs: Tensor, tasks: int) -> Tensor:
        """Where one output layer counts the classes of the stream: those of the first tasks, in their order."""
        if self.classification.labels == "task" or self.heads is not None:
            return outputs
        numbers = dict.fromkeys(c for task in range(tasks) for c in self.classification.classes_of(task) or ())
        return outputs[:, list(numbers)]


@contextmanager
def running_statistics_kept(model: nn.Module) -> Iterator[None]:
    """Batch norms see inputs again that they have seen already: what they count meanwhile is thrown away."""
    own = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    for module, buffers in own:
        module._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
    try:
        yield
    finally:
        for module, buffers in own:
            module._buffers.update(buffers)
