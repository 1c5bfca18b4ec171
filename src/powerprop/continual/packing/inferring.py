"""Learners that have a sub-network for every task: they answer in it, and find out which one an input is of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.continual.asking import place_of
from powerprop.continual.now import TaskId
from powerprop.continual.objective import Model
from powerprop.continual.optimiser import OptimizerFactory
from powerprop.continual.packing.infer import check_inference, group_sizes, infer
from powerprop.continual.packing.signature import MEANS, SAMPLED, Means, Sample
from powerprop.continual.packing.subnets import Subnetworks
from powerprop.continual.source import Source, to_device
from powerprop.continual.strategy import Strategy
from powerprop.continual.task import Prediction, are_labels
from powerprop.eval_mode import evaluating

__all__ = ["Inferring"]


class Inferring(Strategy):
    """A strategy that keeps a sub-network for every task in `nets`.

    means: what is kept of the inputs of every task, to compare others with: "task" their mean, "class" that of every
        class, "none" nothing. The default way to infer tasks and the flag of unknown inputs rest on it; the paper's
        method, and "exhaustive", "oneshot" and "binary", do without.
    Further arguments are those of `Strategy`.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("means",)
    FIXED: ClassVar[tuple[str, ...]] = ("means",)
    nets: Subnetworks

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, means: Means = "task", **options: Any
    ) -> None:
        super().__init__(model, optimizer, **options)
        if means not in MEANS:
            raise ValueError(f"means must be one of {', '.join(MEANS)}, got {means!r}")
        self.means = means

    def check_model(self) -> None:
        """What is held must be what was learned."""
        super().check_model()
        self.nets.check_same()

    def let_go(self) -> None:
        """Another learner has the model."""
        self.nets.let_go()
        super().let_go()

    def settle(self) -> None:
        """A copy holds the same in its own model."""
        super().settle()
        self.nets.settle()

    @contextmanager
    def viewing(self, task: int | None) -> Iterator[Model]:
        """The sub-network of a task that was learned; the one being learned sees the model as it is."""
        if self.now is not None and task == self.now.task:
            yield self.bound(task)
            return
        if task is None:
            raise ValueError("the network of a task needs the task; predict(x) finds it out")
        self.nets.masks.check(task)
        with self.nets.viewing(self.nets.weights(task), task) as model:
            yield model

    def predict(
        self, x: Any, task: TaskId | None = None, *, method: str = "shortlist", group: int | None = 1,
        candidates: int = 4, unknown: float | None = None, unsure: float | None = None,
    ) -> Any:  # fmt: skip
        """The answer for every input, in the task given or in the one inferred.

        method, group, candidates: how the task is inferred, see `infer`. Every input is judged by itself unless a
            group says that so many consecutive ones are of one task; None says it of all of them.
        unknown: a rate of false alarms. Inputs (groups of them) that are, from every task, farther than all but this
            fraction of its validation inputs are of task -1. Of known single inputs about this fraction at most is
            flagged too, fewer in groups.
        unsure: inputs (groups of them) whose entropy exceeds this fraction of its maximum are of task -1. Far from
            all data a network is often surer than near it: `unknown` finds what this does not.
        """
        self.check_predict_options(method=method, group=group, candidates=candidates, unknown=unknown, unsure=unsure)
        place = self._place(task)
        if place is not None or not len(x):
            return self._in_task(x, place or 0)
        tasks = infer(self.nets, x, self.objective, method, group, candidates)
        groups = group_sizes(len(x), group)
        foreign = torch.zeros(len(x), dtype=torch.bool)
        if unknown is not None:
            foreign |= self.nets.signatures.unknown(x, unknown, groups)
        found = self._in_tasks(x, tasks)
        if unsure is not None:
            mean = torch.cat([part.mean().expand(len(part)) for part in torch.split(found.entropy, groups)])
            foreign |= (mean > unsure).cpu()
        return flagged(found, foreign) if foreign.any() else found

    def check_predict_options(  # type: ignore[override]
        self, method: str = "shortlist", group: int | None = 1, candidates: int = 4, unknown: float | None = None,
        unsure: float | None = None,
    ) -> None:  # fmt: skip
        """Arguments of `predict` that make no sense are an error."""
        check_inference(method, group, candidates)
        if unknown is not None and not 0 < unknown < 1:
            raise ValueError(f"unknown must be in (0, 1), a rate of false alarms, got {unknown}")
        if unsure is not None and not 0 < unsure <= 1:
            raise ValueError(f"unsure must be in (0, 1], a fraction of the largest entropy, got {unsure}")

    def _place(self, task: TaskId | None) -> int | None:
        """The place of a task that is packed."""
        counted = self.ids == list(range(len(self.ids)))
        if isinstance(task, int) and not isinstance(task, bool) and counted:
            self.nets.masks.check(task)
            return task
        if task is None:
            self.nets.masks.check(0)
        return place_of(self, task)

    def _in_task(self, x: Tensor, task: int) -> Any:
        with self.viewing(task) as model, evaluating(self.model), torch.no_grad():
            return self.objective.predict(model, to_device(x, self.device), task)

    def _in_tasks(self, x: Tensor, tasks: Tensor) -> Any:
        """The answer for every input within its task, in the order of the inputs; one pass for each task."""
        rows = {t: (tasks == t).nonzero()[:, 0] for t in sorted(set(tasks.tolist()))}
        found = [self._in_task(x[of_task.to(x.device)], t) for t, of_task in rows.items()]
        order = torch.cat(list(rows.values())).argsort()
        if isinstance(found[0], Tensor):
            return torch.cat(found)[order.to(found[0].device)]
        return Prediction(*(torch.cat(column)[order.to(column[0].device)] for column in zip(*found, strict=True)))

    def _sample(self, data: Source, validation: Source) -> Sample | None:
        """Some inputs of the task with their labels, and some held back, if they are tensors of one shape."""
        if self.means == "none":
            return None
        try:
            pair = data.some_of(self._inputs_and_labels, SAMPLED)
            held = None if validation is data else validation.some(self.objective.inputs, SAMPLED)
        except (TypeError, RuntimeError, ValueError):  # inputs that are no tensors, or not of one shape
            return None
        return Sample(pair[0], pair[1] if len(pair) > 1 else None, held)

    def _inputs_and_labels(self, batch: Any) -> tuple[Tensor, ...]:
        x = self.objective.inputs(batch)
        y = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
        return (x, y) if isinstance(y, Tensor) and are_labels(y) else (x,)


def flagged(prediction: Prediction, foreign: Tensor) -> Prediction:
    """Task and class -1 where an input is foreign."""
    where = foreign.to(prediction.task.device)
    return prediction._replace(
        task=prediction.task.masked_fill(where, -1), number=prediction.number.masked_fill(where, -1)
    )
