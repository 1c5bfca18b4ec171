"""Learning again from a memory of earlier examples: with their labels, or with what the network once answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from powerprop.continual.combine import hooks_of
from powerprop.continual.data import Source, all_tensors, to_device
from powerprop.continual.lwf import running_statistics_kept
from powerprop.continual.memory import Memory
from powerprop.continual.strategy import OptimizerFactory, Progress, Rehearsal, Strategy, check_between, check_least

__all__ = ["DER", "ER", "DERpp", "JointTraining", "PerfectMemory", "Replay"]


class Replay(Strategy):
    """What methods with an episodic memory share: it is filled when a task ends, from its data in order.

    memory: examples that are kept of all tasks together; None keeps all.
    rehearsed: examples that are drawn from it for a step; by default `batch_size`.
    Further arguments are those of `Strategy`.
    """

    BESIDE: ClassVar[int] = 0
    """Tensors that are kept with every example."""
    EQUAL: ClassVar[bool] = False
    """Every task has the same number of examples in the memory; otherwise every example is as likely to be there."""

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, memory: int | None = 1000,
        rehearsed: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        check_least(rehearsed=(1 if rehearsed is None else rehearsed, 1))
        super().__init__(model, optimizer, **options)
        self.memory, self.rehearsed = memory, rehearsed
        self.buffer = Memory(memory, self.EQUAL, self.BESIDE)
        self.parts["memory"] = self.buffer

    def end_task(self, data: Source, validation: Source, progress: Progress | None) -> None:
        """Some of the task's data goes into the memory."""
        self.buffer.add(data.in_order(), self.current, self.generator("memory"))

    def batch_shown(self) -> Any:
        """The batch of the step, for methods that keep some of it."""
        return self.shown_batch("keeps examples of every step")

    def remember(self, *beside: Tensor) -> None:
        """Some of the step's batch goes into the memory, with what is kept beside it."""
        self.buffer.add_now(self.batch_shown(), self.current, self.generator("memory"), beside)

    def drawn(self, times: int = 1) -> Tensor:
        """Rows of the memory at random, as many as a step rehearses."""
        return self.buffer.draw(times * (self.rehearsed or self.batch_size), self.generator("rehearsed"))

    def rehearsals(self, rows: Tensor, weight: float) -> list[Rehearsal]:
        """Examples of the memory as batches, each with its weight: one batch, or one for each task where the network or
        the objective must know it."""
        tasks = self.buffer.tasks[rows]
        kind: Any = type(self)
        one_network = not self.sees_task and hooks_of(kind, "viewing") == (Strategy.viewing,)
        if one_network and self.objective.mixes_tasks:
            return [Rehearsal(self.buffer.batch(rows), tasks, weight)]
        groups = ((task, rows[tasks == task]) for task in sorted(set(tasks.tolist())))
        return [Rehearsal(self.buffer.batch(own), task, weight * len(own) / len(rows)) for task, own in groups]

    def loss_again(self, rows: Tensor) -> Tensor:
        """The mean loss of some examples of the memory."""
        losses = []
        for batch, task, weight, _ in self.rehearsals(rows, 1.0):
            with self.viewing(task if isinstance(task, int) else None) as model:
                loss: Any = self.objective.loss
                losses.append(weight * loss(model, to_device(batch, self.device), task))
        return torch.stack(losses).sum()


class ER(Replay):
    """Experience replay: half of every step is learned again from a reservoir of earlier examples.

        L = ½ L(batch) + ½ L(memory batch)

    Every example of the stream is in the memory with the same probability (Vitter, 1985).

    References: Chaudhry et al., On Tiny Episodic Memories in Continual Learning, 2019; Hsu et al., Re-evaluating
    Continual Learning Scenarios, 2018 ("naive rehearsal").

    loss_weight: of the loss that the memory has.
    fill: when examples go into the memory: at the "end" of a task, so that no example of the task in hand is rehearsed;
        or with every "step", from the batch that it shows, as an online stream asks for: `step(loss, batch)`, and
        `end()` needs no data.

    Examples:
        >>> learner = continual.ER(model, sgd, memory=100, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    traits: ClassVar[tuple[str, ...]] = ("fills memory",)

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, loss_weight: float = 0.5,
        fill: Literal["end", "step"] = "end", **options: Any,
    ) -> None:  # fmt: skip
        check_between(loss_weight=(loss_weight, 0, 1))
        if fill not in ("end", "step"):
            raise ValueError(f"fill must be 'end' or 'step', got {fill!r}")
        super().__init__(model, optimizer, **options)
        self.loss_weight, self.fill = loss_weight, fill
        self.buffer.trained = fill == "step"

    def after_step(self) -> None:
        """The batch goes by."""
        if self.fill == "step":
            self.remember()

    def end_task(self, data: Source, validation: Source, progress: Progress | None) -> None:
        """Some of the task's data goes into the memory, if it has not gone by already."""
        if self.fill == "end":
            super().end_task(data, validation, progress)

    def rehearse(self) -> list[Rehearsal] | None:
        """A batch of the memory, as soon as there is one."""
        if self.fill == "step":
            self.batch_shown()
        return self.rehearsals(self.drawn(), self.loss_weight) if len(self.buffer) else None


class PerfectMemory(Replay):
    """Keep all data of all tasks and go on learning from all of it: what a memory without limits is worth.

        L = 1/t L(batch) + (1 - 1/t) L(memory batch)   in the t-th task

    All tasks count alike; the network goes on from task to task.

    Reference: Wołczyk et al., Continual World, NeurIPS 2021.

    Examples:
        >>> learner = continual.PerfectMemory(model, sgd, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    traits: ClassVar[tuple[str, ...]] = ("once", "fills the loss")

    def __init__(self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, **options: Any) -> None:
        super().__init__(model, optimizer, **{"memory": None, **options})
        if self.memory is not None:
            raise ValueError(f"{type(self).__name__} keeps everything, got memory={self.memory}; see ER")

    def rehearse(self) -> list[Rehearsal] | None:
        """A batch of everything before the task in hand."""
        return self.rehearsals(self.drawn(), self.current / (self.current + 1)) if self.current else None


class JointTraining(PerfectMemory):
    """The upper bound: a network that learns the tasks so far all at once.

    Every task starts from the first weights again, and a step takes as many examples of every earlier task as there are
    in the current batch. Nothing of the order of tasks is left after it. A step in the t-th task costs t times as much.

    rehearsed: examples of each earlier task for a step.

    Examples:
        >>> learner = continual.JointTraining(model, sgd, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    traits: ClassVar[tuple[str, ...]] = ("rewrites weights", "starts anew")

    def __init__(self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, **options: Any) -> None:
        super().__init__(model, optimizer, **options)
        self.first = FirstWeights()
        self.parts["first weights"] = self.first

    def begin_task(self) -> None:
        """Forget everything but the data; of heads that were added since, the first weights are those of now."""
        now = self.model.state_dict()
        self.first |= {name: tensor.detach().clone() for name, tensor in now.items() if name not in self.first}
        self.model.load_state_dict(self.first)

    def rehearse(self) -> list[Rehearsal] | None:
        """As many examples of the memory as if each of its tasks had a batch."""
        return self.rehearsals(self.drawn(self.current), self.current / (self.current + 1)) if self.current else None


class FirstWeights(dict[str, Tensor]):
    """The weights that a network began with, as a part that is saved."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return dict(self), {}

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        self.clear()
        self.update(tensors)


class DER(Replay):
    """Dark experience replay (Buzzega et al., NeurIPS 2020): the answers z of an example stay what they were.

        L(batch) + a E_(x, z)~memory ‖z - f(x)‖² / K,    K the number of outputs

    The memory is a reservoir that is filled with every step, from the batch that it shows: step(loss, batch); z is what
    the network answers to it before the step. No boundary of tasks plays a part. The mean over the outputs is that of
    the authors' code; in the paper it is a sum.

    strength: a.
    Further arguments are those of `Replay`.

    Examples:
        >>> learner = continual.DER(model, sgd, memory=100, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    traits: ClassVar[tuple[str, ...]] = ("fills memory",)
    BESIDE: ClassVar[int] = 1

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, strength: float = 0.5, **options: Any
    ) -> None:
        check_least(strength=(strength, 0))
        super().__init__(model, optimizer, **options)
        self.strength, self.buffer.trained = strength, True
        self._answered: Tensor | None = None

    def rehearse(self) -> None:
        """Nothing takes a weight in the loss; but the batch must be there."""
        self.batch_shown()

    def penalty(self) -> Tensor | None:
        """The memory's answers; those to the batch in hand are noted."""
        batch = to_device(self.batch_shown(), self.device)
        with torch.no_grad(), running_statistics_kept(self.model):
            self._answered = self._answers(batch, self.current)
        return self.of_memory() if len(self.buffer) else None

    def of_memory(self) -> Tensor:
        """a E ‖z - f(x)‖² / K."""
        strength: float = self.option(DER, "strength")
        return strength * self.distance(self.drawn())

    def after_step(self) -> None:
        """The batch goes by, with the answers to it."""
        assert self._answered is not None
        self.remember(self._answered)
        self._answered = None

    def end_task(self, data: Source, validation: Source, progress: Progress | None) -> None:
        """All has gone by already."""

    def distance(self, rows: Tensor) -> Tensor:
        """The mean squared distance from the answers kept with some examples, each seen as its own task sees it."""
        terms = []
        for task in sorted(set(self.buffer.tasks[rows].tolist())):
            own = rows[self.buffer.tasks[rows] == task]
            (kept,) = self.buffer.beside(own)
            found = self._answers(to_device(self.buffer.batch(own), self.device), task)
            terms.append(len(own) / len(rows) * F.mse_loss(found[:, : kept.shape[1]], kept.to(found)))
        return torch.stack(terms).sum()

    def _answers(self, batch: Any, task: int) -> Tensor:
        """The outputs of the network, one row for every input."""
        with self.viewing(task) as model:
            found = [each.flatten(1) for each in all_tensors(self.objective.outputs(model, batch, task)) if each.ndim]
        if not found:
            kind = type(self.objective).__name__
            raise TypeError(f"{kind} does not call the model itself: say in its `outputs` what the network answers")
        return torch.cat(found, 1)


class DERpp(DER):
    """Dark experience replay with labels (Buzzega et al., NeurIPS 2020), called DER++ there.

        L(batch) + a E_(x, z)~memory ‖z - f(x)‖² / K + b E_(x, y)~memory L(x, y)

    Both means are over examples of their own.

    labels_strength: b.
    Further arguments are those of `DER`.

    Examples:
        >>> learner = continual.DERpp(model, sgd, memory=100, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, labels_strength: float = 0.5, **options: Any
    ) -> None:
        check_least(labels_strength=(labels_strength, 0))
        super().__init__(model, optimizer, **options)
        self.labels_strength = labels_strength

    def of_memory(self) -> Tensor:
        """Answers of some examples, labels of others."""
        return super().of_memory() + self.labels_strength * self.loss_again(self.drawn())
