"""Learners that have a sub-network for every task: they answer in it, and find out which one an input is of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.continual.data import Source, to_device
from powerprop.continual.objective import Model, Objective
from powerprop.continual.packing.subnetworks import SAMPLED, Means, Sample, Subnetworks
from powerprop.continual.strategy import OptimizerFactory, Strategy, TaskId
from powerprop.continual.task import Prediction, are_labels
from powerprop.eval_mode import evaluating

__all__ = ["INFERENCES", "SubnetworkStrategy", "entropy_gradient", "infer"]

MARGIN = 0.1
"""How much farther than the nearest task one may be to stay on the short list."""
PART = 1000
"""Inputs that are evaluated at a time."""


def entropy_gradient(
    nets: Subnetworks, x: Tensor, coefficients: Tensor, objective: Objective, superfluous: bool = False
) -> Tensor:
    """∂H/∂π for all tasks at a mixture: one forward and one backward pass, then one pass over the weights.

    The model is in evaluation mode; a layer that it does not use says nothing about the task.

    superfluous: take the log-sum-exp of the superfluous outputs in the place of H.
    """
    judge = objective.unused_logits_score if superfluous else objective.uncertainty
    _check_heads(nets)
    mixed = {n: w.requires_grad_() for n, w in nets.mixture(coefficients).items()}
    device = next(nets.model.parameters()).device
    with torch.enable_grad(), evaluating(nets.model), nets.viewing(mixed, 0) as model:
        value = judge(model, x.to(device), None).mean()
        gradients = torch.autograd.grad(value, list(mixed.values()), materialize_grads=True)
    return nets.coefficient_gradient(dict(zip(mixed, gradients, strict=True)))


def _check_heads(nets: Subnetworks) -> None:
    """Only heads of the same shapes can be added up."""
    shapes = [[tuple(p.shape) for p in head.values()] for head in nets.heads()]
    for task, found in enumerate(shapes):
        if found != shapes[0]:
            text = f"'oneshot' and 'binary' mix the heads of all tasks, expected the same shapes, got {shapes[0]}"
            raise ValueError(f"{text} for task 0 and {found} for task {task}; use 'shortlist' or 'exhaustive'")


@torch.no_grad()
def entropies(nets: Subnetworks, x: Tensor, objective: Objective, wanted: Tensor | None = None) -> Tensor:
    """(tasks, inputs): how unsure each sub-network is of each input; one masked pass per task over all its inputs.

    wanted: (tasks, inputs) booleans; the others are infinite and cost nothing.
    """
    found = torch.full((nets.masks.tasks, len(x)), torch.inf, dtype=torch.float32)
    wanted = torch.ones(found.shape, dtype=torch.bool) if wanted is None else wanted
    device = next(nets.model.parameters()).device
    for task in wanted.any(1).nonzero()[:, 0].tolist():
        rows = wanted[task].nonzero()[:, 0]
        with evaluating(nets.model), nets.viewing(nets.weights(task), task) as model:
            asked = torch.split(x[rows.to(x.device)], PART)
            parts = [objective.uncertainty(model, part.to(device), task) for part in asked]
        found[task, rows] = torch.cat(parts).float().cpu()
    return found


def narrowed(groups: Groups, superfluous: bool = False, once: bool = False) -> Tensor:
    """Half of the tasks at a time: those with the higher ∂H/∂π are out, the rest is mixed anew, until one is left.

    once: the lowest of all at the first even mixture.
    """
    found = []
    for x in torch.split(groups.x, groups.sizes):
        left = torch.ones(groups.nets.masks.tasks, dtype=torch.bool)
        while (count := int(left.sum())) > 1:
            gradient = entropy_gradient(groups.nets, x, left.double() / count, groups.objective, superfluous)
            chosen = gradient.masked_fill(~left, torch.inf).argsort()[: 1 if once else (count + 1) // 2]
            left = torch.zeros_like(left).index_fill_(0, chosen, True)
        found.append(left)
    return torch.stack(found)


def shortlist(groups: Groups) -> Tensor:
    """The few tasks whose stored means are like these inputs, to be tried one by one: a few passes for any T.

    A task that is farther than the nearest by more than a tenth is out; for n inputs together the margin grows as the
    cube root of n, because the entropy of one input is a poor judge and that of many a good one. Tasks that tie are
    never parted: those at the same distance, and those whose means differ from the ones on the list by no more than
    chance, as those of standardised inputs do. Where all tie, all are tried, as `exhaustive` does.
    """
    stats = groups.nets.stats
    distance = stats.distances(groups.x, groups.sizes)
    if not distance.any():  # nothing is known that tells the tasks apart
        return exhaustive(groups)
    sizes = torch.tensor(groups.sizes, dtype=torch.float64)[:, None]
    last = distance.sort(1).values[:, min(groups.candidates, distance.shape[1]) - 1, None]
    chosen = (distance <= last) & (distance <= distance.amin(1, keepdim=True) * (1 + MARGIN * sizes ** (1 / 3)))
    for task in chosen.any(0).nonzero()[:, 0].tolist():
        chosen = chosen | (chosen[:, task, None] & stats.tied(task))
    return chosen


def exhaustive(groups: Groups) -> Tensor:
    """All tasks, to be tried one by one."""
    return torch.ones(len(groups.sizes), groups.nets.masks.tasks, dtype=torch.bool)


class Groups(NamedTuple):
    """Inputs whose tasks are asked for, the sizes of the groups in which they are judged, and who judges."""

    nets: Subnetworks
    x: Tensor
    sizes: list[int]
    objective: Objective
    candidates: int = 4


INFERENCES: dict[str, Callable[[Groups], Tensor]] = {
    "shortlist": shortlist,
    "oneshot": partial(narrowed, once=True),
    "binary": narrowed,
    "exhaustive": exhaustive,
    "oneshot-superfluous": partial(narrowed, superfluous=True, once=True),
    "binary-superfluous": partial(narrowed, superfluous=True),
}
"""Each gives (groups, tasks): those worth a pass of their own, among which the lowest entropy decides."""


def infer(
    nets: Subnetworks, x: Tensor, objective: Objective, method: str = "shortlist", group: int | None = 1,
    candidates: int = 4,
) -> Tensor:  # fmt: skip
    """The task of every input.

    objective: says how unsure a sub-network is of an input.
    method: one of INFERENCES.
    group: so many consecutive inputs are known to be of one task; by default each is judged by itself. None says that
        all of them are of one task.
    candidates: the most tasks that `shortlist` tries, unless more of them tie.
    """
    check_inference(method, group, candidates)
    nets.masks.check(0)
    if not len(x):
        return torch.zeros(0, dtype=torch.long)
    sizes = group_sizes(len(x), group)
    chosen, count = INFERENCES[method](Groups(nets, x, sizes, objective, candidates)), torch.tensor(sizes)
    only, found = chosen.sum(1) == 1, chosen.int().argmax(1)
    if not only.all():  # the lowest entropy decides among several
        unsure = entropies(nets, x, objective, (chosen & ~only[:, None]).repeat_interleave(count, 0).T)
        mean = torch.stack([part.mean(1) for part in torch.split(unsure, sizes, 1)])
        found = torch.where(only, found, mean.argmin(1))
    return found.repeat_interleave(count)


def group_sizes(count: int, group: int | None) -> list[int]:
    """The sizes of the groups of consecutive inputs; the last may be smaller."""
    size = min(group or count, count)
    return [size] * (count // size) + ([count % size] if count % size else []) if count else []


def check_inference(method: str, group: int | None, candidates: int) -> None:
    """The arguments of `infer`, or an error that repeats the wrong one."""
    if method not in INFERENCES:
        raise ValueError(f"method must be one of {', '.join(INFERENCES)}, got {method!r}")
    if group is not None and group < 1:
        raise ValueError(f"group must be at least 1, got {group}")
    if candidates < 1:
        raise ValueError(f"candidates must be at least 1, got {candidates}")


class SubnetworkStrategy(Strategy):
    """A strategy that keeps a sub-network for every task in `nets`.

    means: what is kept of the inputs of every task, to compare others with: "task" their mean, "class" that of every
        class, "none" nothing. The default way to infer tasks and the flag of unknown inputs rest on it; the paper's
        method, and "exhaustive", "oneshot" and "binary", do without.
    Further arguments are those of `Strategy`.
    """

    owned: ClassVar[bool] = True
    """Tasks own weights, see `Subnetworks`."""

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, means: Means = "task", **options: Any
    ) -> None:
        super().__init__(model, optimizer, **options)
        self.means = means
        self.nets = Subnetworks(model, self.optimizer, self.head_of, self.bound, means, self.owned)
        self.parts["masks"], self.freezer = self.nets, self.nets.freezer
        self._supermask: Any = None

    def give_up(self) -> None:
        """Leave the task in hand; the scores of a mask are forgotten."""
        self._end_supermask()
        super().give_up()

    def _end_supermask(self) -> None:
        if self._supermask is not None:
            self._supermask.let_go()
            self._supermask = None

    def settle(self) -> None:
        """A copy holds the same in its own model."""
        super().settle()
        self.nets.forget()

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
            foreign |= self.nets.stats.unknown(x, unknown, groups)
        found = self._in_tasks(x, tasks)
        if unsure is not None:
            mean = torch.cat([part.mean().expand(len(part)) for part in torch.split(found.entropy, groups)])
            foreign |= (mean > unsure).cpu()
        if foreign.any():
            where = foreign.to(found.task.device)
            found = found._replace(task=found.task.masked_fill(where, -1), number=found.number.masked_fill(where, -1))
        return found

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
        return self.place_of(task)

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
            back = None if validation is data else validation.some(self.objective.inputs, SAMPLED)
        except (TypeError, RuntimeError, ValueError):  # inputs that are no tensors, or not of one shape
            return None
        return Sample(pair[0], pair[1] if len(pair) > 1 else None, back)

    def _inputs_and_labels(self, batch: Any) -> tuple[Tensor, ...]:
        x = self.objective.inputs(batch)
        y = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
        return (x, y) if isinstance(y, Tensor) and are_labels(y) else (x,)
