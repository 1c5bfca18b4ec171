"""The sub-networks inside one network: which weights each task uses, and the network as a task or a mixture sees it."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from powerprop.continual.freezing import SharedFreezer
from powerprop.continual.layers import swapped_parameters
from powerprop.continual.objective import Model
from powerprop.continual.packing.task_masks import BitMasks, TaskMasks
from powerprop.mask_entries import count
from powerprop.masks import Masks
from powerprop.optim import Powerprop
from powerprop.weight import masked

__all__ = ["MEANS", "InputStats", "NoMeansError", "Sample", "Subnetworks"]

Means = Literal["task", "class", "none"]
MEANS: tuple[Means, ...] = get_args(Means)
SAMPLED = 5000
"""Inputs of a task that its means are taken of."""
CHANCE = 4.0
"""Means that differ by so many times what the drawing of their inputs explains are taken for different."""
RATES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Of the distances of held-back inputs those are kept that this fraction exceeds; others are interpolated."""


class NoMeansError(ValueError):
    """Something was asked that needs stored means, of a learner that has none."""


class Sample(NamedTuple):
    """Some inputs of a task: those it was trained on with their labels, if it has any, and others held back."""

    x: Tensor
    labels: Tensor | None = None
    validation: Tensor | None = None


@dataclass
class TaskInputs:
    """What is kept of the inputs of one task: a mean of all, or of every class, how many inputs each stands for, the
    variance within the task, and the distances that the rates of false alarms exceed."""

    means: Tensor
    counts: Tensor
    variance: Tensor
    limits: Tensor

    def distance(self, rows: Tensor) -> Tensor:
        """That of every row to the nearest mean, in units of the task's own deviation."""
        if rows.shape[1] != self.means.shape[1]:
            return torch.full((len(rows),), torch.inf, dtype=torch.float32)
        return _squares(rows, self.means, self.variance).amin(1)


FIELDS = tuple(field.name for field in fields(TaskInputs))


class InputStats:
    """Mean inputs of every task and variances within tasks: two numbers per task and value of an input, or per class.

    The distance of an input x to a task is that to its nearest mean, coordinate by coordinate in units of the standard
    deviation within tasks,

        d_t(x) = min_k mean_i (x_i - μ_tki)² / σ_i²,

    and of several inputs that of their mean, or with means per class the mean of theirs. It costs no pass through the
    network, whatever the number of tasks. Inputs of another size, such as larger images, are infinitely far away. The
    paper's method keeps nothing of the data: with `means="none"` a learner keeps none.

    means: "task" keeps one mean per task, "class" one per class of a task, "none" nothing at all.
    """

    def __init__(self, means: Means = "task") -> None:
        if means not in MEANS:
            raise ValueError(f"means must be one of {', '.join(MEANS)}, got {means!r}")
        self.kind = means
        self.tasks: list[TaskInputs | None] = []
        self._ties: dict[int, Tensor] = {}

    def add(self, sample: Sample | None) -> None:
        """Take some of the next task's inputs; None if they have no fixed number of values each."""
        self._ties = {}
        if sample is None or self.kind == "none":
            self.tasks.append(None)
            return
        x = _rows(sample.x)
        labels = sample.labels if self.kind == "class" and sample.labels is not None else torch.zeros(len(x))
        _, place = torch.unique(labels.to(x.device), return_inverse=True)
        counts = place.bincount()
        sums = torch.zeros(len(counts), x.shape[1], dtype=torch.float32, device=x.device).index_add_(0, place, x)
        means = sums / counts[:, None]
        own = TaskInputs(means.cpu(), counts.cpu(), (x - means[place]).square().mean(0).cpu(), torch.zeros(0))
        away = own.distance(_rows(sample.x if sample.validation is None else sample.validation).cpu()).double()
        own.limits = away.quantile(1 - torch.tensor(RATES, dtype=torch.float64)).float()
        self.tasks.append(own)

    def limit(self, task: int, rate: float) -> float:
        """The distance to a task's own means that this fraction of its held-back inputs exceeds."""
        return float(np.interp(rate, RATES, self._of(task).limits.numpy()))

    # --- distances ----------------------------------------------------------------------------------------------

    def distances(self, x: Tensor, groups: list[int]) -> Tensor:
        """(groups, tasks): the distance of each group of consecutive inputs; all alike if no task has such inputs."""
        if self.kind == "none":
            text = "'shortlist' compares inputs with stored mean inputs, and this learner was made with means='none'"
            raise NoMeansError(f"{text}; use 'exhaustive', 'oneshot' or 'binary'")
        values = _rows(x).cpu()
        if not (known := self._of_size(values.shape[1])):
            return torch.zeros(len(groups), len(self.tasks), dtype=torch.float32)
        if self.kind == "task":
            values = torch.stack([part.mean(0) for part in torch.split(values, groups)])
        each = _squares(values, torch.cat([own.means for own in known.values()]), _pooled(known))
        task = _owners(known).expand(len(values), -1)
        found = torch.full((len(values), len(self.tasks)), torch.inf, dtype=torch.float32)
        found = found.scatter_reduce(1, task, each, "amin")
        if self.kind == "class":
            found = torch.stack([part.mean(0) for part in torch.split(found, groups)])
        return found

    def unknown(self, x: Tensor, rate: float, groups: list[int]) -> Tensor:
        """Which inputs are, from every task, farther than all but a fraction of those that were held back of it.

        Which task they are taken for does not matter, since that may be wrong. Groups are judged together, by the mean
        of their distances: of known inputs it exceeds a limit less often.
        """
        rows, known = _rows(x).cpu(), [task for task, own in enumerate(self.tasks) if own is not None]
        least = torch.full((len(groups),), torch.inf, dtype=torch.float32)
        for task in known or [0]:  # of none an error that says why
            parts = torch.split(self._of(task).distance(rows), groups)
            excess = torch.stack([part.mean() for part in parts]).sub(self.limit(task, rate))
            least = torch.minimum(least, excess)
        return (least > 0).repeat_interleave(torch.tensor(groups))

    def tied(self, task: int) -> Tensor:
        """The tasks whose means differ from those of this one by no more than the drawing of their inputs explains.

        Of n inputs a mean is off by σ/√n in every coordinate, and the squares of two add up.
        """
        if task not in self._ties:
            mine = self._of(task)
            known = self._of_size(mine.means.shape[1])
            apart = _squares(torch.cat([own.means for own in known.values()]), mine.means, _pooled(known))
            counts = torch.cat([own.counts for own in known.values()]).float()
            chance = CHANCE * (1 / counts[:, None] + 1 / mine.counts.float()[None, :])
            alike = (apart <= chance).any(1).float()
            found = torch.zeros(len(self.tasks), dtype=torch.float32).index_fill_(0, torch.tensor(list(known)), 1.0)
            self._ties[task] = found.scatter_reduce(0, _owners(known), alike, "amin") > 0
        return self._ties[task]

    def _of(self, task: int) -> TaskInputs:
        found = self.tasks[task]
        if found is None:
            why = "was made with means='none'" if self.kind == "none" else "could not take that of its inputs"
            raise NoMeansError(f"task {task} has no stored mean input and deviation: the learner {why}")
        return found

    def _of_size(self, size: int) -> dict[int, TaskInputs]:
        """The tasks whose inputs have so many values."""
        return {t: own for t, own in enumerate(self.tasks) if own is not None and own.means.shape[1] == size}

    # --- saving -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Tensors as "stats.size.field": those of all tasks whose inputs have so many values, one after the other."""
        tensors: dict[str, Tensor] = {}
        for size in {own.means.shape[1] for own in self.tasks if own is not None}:
            known = self._of_size(size)
            every = [torch.cat([getattr(own, name) for own in known.values()]) for name in FIELDS]
            tensors |= {f"stats.{size}.{name}": values for name, values in zip(FIELDS, every, strict=True)}
            tensors[f"stats.{size}.tasks"] = _owners(known)
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor], tasks: int) -> None:
        """What `state` gave, of so many tasks."""
        self._ties, self.tasks = {}, [None] * tasks
        for size in (name.split(".")[1] for name in tensors if name.startswith("stats.") and name.endswith(".means")):
            own = {name: tensors[f"stats.{size}.{name}"] for name in (*FIELDS, "tasks")}
            variances, limits = (own[name].view(-1, n) for name, n in (("variance", int(size)), ("limits", len(RATES))))
            for place, task in enumerate(sorted(set(own["tasks"].tolist()))):
                mine = own["tasks"] == task
                self.tasks[task] = TaskInputs(own["means"][mine], own["counts"][mine], variances[place], limits[place])


def _owners(known: Mapping[int, TaskInputs]) -> Tensor:
    """The task of every mean."""
    return torch.tensor([task for task, own in known.items() for _ in own.means])


def _pooled(known: Mapping[int, TaskInputs]) -> Tensor:
    """The mean variance within tasks."""
    first, *rest = (own.variance for own in known.values())
    for number, variance in enumerate(rest, 2):
        first = first.lerp(variance, 1 / number)
    return first


def _squares(values: Tensor, means: Tensor, variance: Tensor) -> Tensor:
    """(values, means): the mean over coordinates of squared differences in units of the variance."""
    spread = variance + variance.mean() / 100 + torch.finfo(torch.float32).tiny
    scale = spread.rsqrt()
    exact = "donot_use_mm_for_euclid_dist"  # near means must not be lost in rounding
    return torch.cdist(values * scale, means * scale, compute_mode=exact).square() / len(variance)


def _rows(x: Tensor) -> Tensor:
    """One row of numbers per input, whatever its shape."""
    return (x.flatten(1) if x.ndim > 1 else x[:, None]).float()


Weights = dict[str, Tensor]
KEPT_BYTES = 2**28
"""Weights of tasks that were asked for last are kept up to this size: switching between a few tasks is free."""


class Subnetworks:
    """One network, one set of weights, a sub-network for every task packed so far.

    While a task is learned all weights are active and those that no task uses are trained; everything that is no
    weight (biases, norms, embeddings, buffers) is trained with the first task only, and every head with its own. The
    optimiser keeps all of that, whoever calls its `step`. Packed weights never change again.

    model: its weights are those that the optimiser gives an α, without the heads and what does not require gradients.
    optimizer: the Powerprop optimiser of the model.
    head_of: the task whose head a name is inside of, or None.
    bound: the model as a function of the inputs alone, for a task.
    means: what is kept of the inputs of tasks, see `InputStats`.
    owned: tasks own weights; otherwise none is ever trained, and a task is any mask over them.
    """

    def __init__(
        self, model: nn.Module, optimizer: Powerprop, head_of: Callable[[str], int | None] = lambda name: None,
        bound: Callable[[int | None], Model] | None = None, means: Means = "task", owned: bool = True,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.head_of = model, optimizer, head_of
        self.bound = bound or (lambda task: model)
        shared = {n: m for n, m in optimizer.masters.items() if head_of(n) is None}
        self.masters = {n: m for n, m in shared.items() if m.param.requires_grad}
        if not self.masters:
            raise ValueError("the model has no weights to share among tasks: only heads and frozen layers get an α")
        weights = {n: m.param for n, m in self.masters.items()}
        self.masks: TaskMasks = TaskMasks(weights, self.strength) if owned else BitMasks(weights)  # type: ignore[assignment]
        self.stats = InputStats(means)
        self.spread = {n: float(p.detach().std(correction=0)) for n, p in weights.items()}
        self._theta: Weights = {}
        self._shown: OrderedDict[int, Weights] = OrderedDict()
        self._seen: tuple[tuple[int, int], ...] = ()
        self.freezer = SharedFreezer(model, optimizer, head_of)

    def forget(self) -> None:
        """What was computed from weights, which are others in a copy."""
        self._seen = ()

    # --- learning -----------------------------------------------------------------------------------------------

    def open(self, task: int, generator: torch.Generator, visible: Masks | None = None) -> None:
        """All weights are used, or the visible ones; those that no task has packed are trained.

        task: how many were packed before, according to the learner.
        generator: draws free weights again that a training which diverged has left without a finite value.
        """
        self._check_count(task)
        self._follow()
        free = self.masks.free()
        self._draw({n: free[n] & ~m.theta().isfinite() for n, m in self.masters.items()}, generator)
        self.optimizer.set_masks(visible, free if self.masks.tasks else None)
        self.freezer.hold(self.masters, learning=self.masks.tasks)

    def open_frozen(self, task: int) -> None:
        """No weight is trained but those of the task's head; which of them are used is another's choice."""
        self._check_count(task)
        self._follow()
        self.freezer.hold((), learning=task)

    def _check_count(self, task: int) -> None:
        if task != self.masks.tasks:
            text = f"{self.masks.tasks} tasks are packed, but the learner has learned {task}: packing was interrupted"
            raise RuntimeError(f"{text}; load the learner that was saved last")

    def restrict(self, masks: Masks) -> None:
        """Only these weights are used, and those of them that no task has packed are trained."""
        self.optimizer.set_masks(masks, masks & self.masks.free())

    def pack(self, masks: Masks, sample: Sample | None, generator: torch.Generator) -> None:
        """Protect the weights of a new task for good, and initialise again those that no task uses.

        sample: some inputs of the task, for `stats`, if they have a fixed number of values.
        """
        self.masks.add(masks)
        self._draw(self.masks.free(), generator)
        self._packed(sample)

    def pack_chosen(self, masks: Masks, sample: Sample | None) -> None:
        """Keep the mask of a new task that owns no weight."""
        self.masks.add_chosen(masks)
        self._packed(sample)

    def _packed(self, sample: Sample | None) -> None:
        self.stats.add(sample)
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

    # --- the network as a task sees it --------------------------------------------------------------------------

    def theta(self) -> Weights:
        """All effective weights, whether used or not."""
        return {n: theta.to(self.masters[n].param.dtype) for n, theta in self._wide().items()}

    def strength(self, name: str) -> Tensor:
        """|θ| of every weight, in single precision."""
        return self._wide()[name].abs().float()

    def _wide(self) -> Weights:
        """All effective weights in the highest precision there is."""
        self._follow()
        if not self._theta:
            self._theta = {n: m.theta() for n, m in self.masters.items()}
        return self._theta

    def weights(self, task: int) -> Weights:
        """θ ⊙ M^t; those of the last tasks asked for are kept, as many as fit."""
        self._follow()
        if task not in self._shown:
            self._shown[task] = self.masked(self.masks.mask(task))
        self._shown.move_to_end(task)
        size = sum(w.numel() * w.element_size() for w in self._shown[task].values())
        while len(self._shown) > max(1, KEPT_BYTES // size):
            self._shown.popitem(last=False)
        return self._shown[task]

    def masked(self, masks: Mapping[str, Tensor]) -> Weights:
        """θ ⊙ M."""
        return {n: masked(theta, masks[n]) for n, theta in self.theta().items()}

    @contextmanager
    def viewing(self, weights: Weights, task: int | None) -> Iterator[Model]:
        """The network with other weights than it holds, and the head of a task; the model's own are not touched."""
        self.optimizer.frozen.restore()  # forward passes in training mode may have moved statistics
        with swapped_parameters(self.model, weights):
            yield self.bound(task)

    def show(self, task: int) -> None:
        """Put the sub-network of a task into the model, as a plain sparse network in evaluation mode."""
        self._follow()
        nothing = Masks({n: torch.zeros_like(m.param, dtype=torch.bool) for n, m in self.masters.items()})
        self.optimizer.set_masks(self.masks.mask(task), nothing)
        self.freezer.hold(self.masters, learning=None)
        self.model.eval()

    def _follow(self) -> None:
        """Forget what was computed from weights that have moved on since, or to another device; so do the masks."""
        seen = tuple((m.param._version, m.param.data_ptr()) for m in self.masters.values())
        if seen != self._seen:
            for master in self.masters.values():
                master.sync()
            self._seen, self._theta = seen, {}
            self._shown.clear()
            self.masks.follow({n: m.param.device for n, m in self.masters.items()})

    # --- all tasks at once --------------------------------------------------------------------------------------

    def mixture(self, coefficients: Tensor) -> Weights:
        """θ ⊙ Σ_t π_t M^t, and Σ_t π_t of the heads in the place of the first."""
        mixed = {n: theta * self.masks.mixture(n, coefficients).to(theta) for n, theta in self.theta().items()}
        for name, stack in self._head_stacks().items():
            mixed[name] = torch.einsum("t,t...->...", coefficients.to(stack), stack)
        return mixed

    def coefficient_gradient(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """∂H/∂π_t = Σ_i ∂H/∂w_i θ_i M^t_i for all tasks, from the gradient at a mixture's weights: one pass over it."""
        total = torch.zeros(self.masks.tasks, dtype=torch.float64)
        for name, theta in self.theta().items():
            total += self.masks.sums(name, gradients[name] * theta)
        for name, stack in self._head_stacks().items():
            total += (stack * gradients[name]).flatten(1).sum(1).double().cpu()
        return total

    def _head_stacks(self) -> Weights:
        """The parameters of the heads packed so far, one row per task, by the names of the first head's."""
        columns = zip(*(head.items() for head in self.heads()), strict=True)
        return {column[0][0]: torch.stack([parameter.detach() for _, parameter in column]) for column in columns}

    def heads(self) -> list[dict[str, nn.Parameter]]:
        """The parameters of every head packed so far by name; none without heads."""
        named = dict(self.model.named_parameters())
        of_task = [{n: p for n, p in named.items() if self.head_of(n) == task} for task in range(self.masks.tasks)]
        return of_task if any(of_task) else []

    # --- saving -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Masks and what is known of inputs; the weights themselves are saved by the learner."""
        tensors, data = self.masks.state()
        return {**tensors, **self.stats.state()}, {**data, "spread": self.spread}

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """Take up what `state` gave, after the weights."""
        self.forget()
        self.masks.load_state(tensors, data)
        self.stats.load_state(tensors, data["tasks"])
        self.spread = dict(data["spread"])
        if self.masks.tasks:
            self.show(self.masks.tasks - 1)
