"""Learners that have a sub-network for every task: they answer in it, and find out which one an input is of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from powerprop.continual.objective import Model
from powerprop.continual.packing.infer import check_inference, infer
from powerprop.continual.packing.signature import SAMPLED
from powerprop.continual.packing.subnets import Subnetworks
from powerprop.continual.source import Source
from powerprop.continual.strategy import Strategy
from powerprop.continual.task import Prediction
from powerprop.eval_mode import evaluating

__all__ = ["Inferring"]


class Inferring(Strategy):
    """A strategy that keeps a sub-network for every task in `nets`."""

    nets: Subnetworks

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
        self, x: Tensor, task: int | None = None, *, method: str = "shortlist", group: int | None = None,
        candidates: int = 4, unknown: float | None = None,
    ) -> Any:  # fmt: skip
        """The answer for every input, in the task given or in the one inferred.

        method, group, candidates: how the task is inferred, see `infer`.
        unknown: inputs (groups of them) whose entropy exceeds this fraction of its maximum are of task -1.
        """
        self.check_predict_options(method=method, group=group, candidates=candidates, unknown=unknown)
        self.nets.masks.check(0 if task is None else task)
        if task is not None or not len(x):
            return self._in_task(x, task or 0)
        found = self._in_tasks(x, infer(self.nets, x, self.objective, method, group, candidates))
        return found if unknown is None else flag_unknown(found, unknown, group)

    def check_predict_options(  # type: ignore[override]
        self, method: str = "shortlist", group: int | None = None, candidates: int = 4, unknown: float | None = None
    ) -> None:
        """Arguments of `predict` that make no sense are an error."""
        check_inference(method, group, candidates)
        if unknown is not None and not 0 < unknown <= 1:
            raise ValueError(f"unknown must be in (0, 1], a fraction of the largest entropy, got {unknown}")

    def _in_task(self, x: Tensor, task: int) -> Any:
        with self.viewing(task) as model, evaluating(self.model), torch.no_grad():
            return self.objective.predict(model, x.to(self.device), task)

    def _in_tasks(self, x: Tensor, tasks: Tensor) -> Any:
        """The answer for every input within its task, in the order of the inputs; one pass for each task."""
        rows = {t: (tasks == t).nonzero()[:, 0] for t in sorted(set(tasks.tolist()))}
        found = [self._in_task(x[of_task.to(x.device)], t) for t, of_task in rows.items()]
        order = torch.cat(list(rows.values())).argsort()
        if isinstance(found[0], Tensor):
            return torch.cat(found)[order.to(found[0].device)]
        return Prediction(*(torch.cat(column)[order.to(column[0].device)] for column in zip(*found, strict=True)))

    def _some_inputs(self, data: Source) -> Tensor | None:
        try:
            return data.some(self.objective.inputs, SAMPLED)
        except (TypeError, RuntimeError, ValueError):  # inputs that are no tensors, or not of one shape
            return None


def flag_unknown(prediction: Prediction, threshold: float, group: int | None) -> Prediction:
    """Task -1 where the mean entropy of a group of inputs is above the threshold."""
    size = group or max(1, len(prediction.entropy))
    mean = torch.cat([part.mean().expand(len(part)) for part in torch.split(prediction.entropy, size)])
    foreign = mean > threshold
    return prediction._replace(
        task=prediction.task.masked_fill(foreign, -1), number=prediction.number.masked_fill(foreign, -1)
    )
