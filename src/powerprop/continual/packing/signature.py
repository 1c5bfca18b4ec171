"""What the inputs of each task look like on average: which tasks an input may be of, and whether it is of any.

The paper's method keeps nothing of the data. These means are an addition: `infer.shortlist` and the flag of unknown
inputs rest on them, and a learner that is told `means="none"` keeps none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["MEANS", "NoMeansError", "Sample", "Signatures"]

Means = Literal["task", "class", "none"]
MEANS: tuple[Means, ...] = ("task", "class", "none")
SAMPLED = 5000
"""Inputs of a task that its signature is made of."""
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
    held: Tensor | None = None


class Signatures:
    """Mean inputs of every task and variances within tasks: two numbers per task and value of an input, or per class.

    The distance of an input x to a task is that to its nearest mean, coordinate by coordinate in units of the standard
    deviation within tasks,

        d_t(x) = min_k mean_i (x_i - μ_tki)² / σ_i²,

    and of several inputs that of their mean, or with means per class the mean of theirs. It costs no pass through the
    network, whatever the number of tasks. Inputs of another size, such as larger images, are infinitely far away.

    means: "task" keeps one mean per task, "class" one per class of a task, "none" nothing at all.
    """

    def __init__(self, means: Means = "task") -> None:
        if means not in MEANS:
            raise ValueError(f"means must be one of {', '.join(MEANS)}, got {means!r}")
        self.kind = means
        self.sizes: list[int] = []
        self.means: dict[int, Tensor] = {}
        self.rows: dict[int, list[int]] = {}
        self.counts: dict[int, list[int]] = {}
        self.variance: dict[int, Tensor] = {}
        self.own: dict[int, Tensor] = {}
        self.quantiles: dict[int, Tensor] = {}
        self._ties: dict[int, Tensor] = {}

    # --- adding a task ------------------------------------------------------------------------------------------

    def add(self, sample: Sample | None) -> None:
        """Take some of the next task's inputs; None if they have no fixed number of values each."""
        self._ties = {}
        if sample is None or self.kind == "none":
            self.sizes.append(0)
            return
        x, task = _rows(sample.x), len(self.sizes)
        labels = sample.labels if self.kind == "class" and sample.labels is not None else torch.zeros(len(x))
        _, place = torch.unique(labels.to(x.device), return_inverse=True)
        counts = place.bincount()
        means = (
            torch.zeros(len(counts), x.shape[1], dtype=torch.float32, device=x.device).index_add_(0, place, x)
            / counts[:, None]
        )
        variance, size = (x - means[place]).square().mean(0).cpu(), x.shape[1]
        known = self.sizes.count(size)
        pooled = self.variance[size].lerp(variance, 1 / (known + 1)) if known else variance
        self.means[size] = torch.cat([self.means[size], means.cpu()]) if known else means.cpu()
        self.rows[size] = [*self.rows.get(size, ()), *[task] * len(counts)]
        self.counts[size] = [*self.counts.get(size, ()), *counts.tolist()]
        self.sizes.append(size)
        self.variance[size], self.own[task] = pooled, variance
        self.quantiles[task] = self._quantiles(sample.x if sample.held is None else sample.held, task)

    def _quantiles(self, held: Tensor, task: int) -> Tensor:
        return self.within(held, task).double().quantile(1 - torch.tensor(RATES, dtype=torch.float64)).float()

    def limit(self, task: int, rate: float) -> float:
        """The distance to a task's own means that this fraction of its held-back inputs exceeds."""
        return float(np.interp(rate, RATES, self.quantiles[task].numpy()))

    # --- distances ----------------------------------------------------------------------------------------------

    def distances(self, x: Tensor, groups: list[int]) -> Tensor:
        """(groups, tasks): the distance of each group of consecutive inputs; all alike if no task has such inputs."""
        if self.kind == "none":
            text = "'shortlist' compares inputs with stored mean inputs, and this learner was made with means='none'"
            raise NoMeansError(f"{text}; use 'exhaustive', 'oneshot' or 'binary'")
        values = _rows(x).cpu()
        size = values.shape[1]
        if size not in self.means:
            return torch.zeros(len(groups), len(self.sizes), dtype=torch.float32)
        if self.kind == "task":
            values = torch.stack([part.mean(0) for part in torch.split(values, groups)])
        found = self._nearest(values, size)
        if self.kind == "class":
            found = torch.stack([part.mean(0) for part in torch.split(found, groups)])
        return found

    def within(self, x: Tensor, task: int) -> Tensor:
        """The distance of every input to a task's own means in units of its own deviation, whatever others are like."""
        size, values = self.sizes[task], _rows(x).cpu()
        if task not in self.own:
            why = "was made with means='none'" if self.kind == "none" else "could not take that of its inputs"
            raise NoMeansError(f"task {task} has no stored mean input and deviation: the learner {why}")
        if values.shape[1] != size:
            return torch.full((len(values),), torch.inf, dtype=torch.float32)
        own = self.means[size][torch.tensor(self.rows[size]) == task]
        return _squares(values, own, self.own[task]).amin(1)

    def unknown(self, x: Tensor, rate: float, groups: list[int]) -> Tensor:
        """Which inputs are, from every task, farther than all but a fraction of those that were held back of it.

        Which task they are taken for does not matter, since that may be wrong. Groups are judged together, by the mean
        of their distances: of known inputs it exceeds a limit less often.
        """
        if not self.quantiles:
            self.within(x[:1], 0)  # an error that says why
        least = torch.full((len(groups),), torch.inf, dtype=torch.float32)
        for task in self.quantiles:
            parts = torch.split(self.within(x, task), groups)
            excess = torch.stack([part.mean() for part in parts]).sub(self.limit(task, rate))
            least = torch.minimum(least, excess)
        return (least > 0).repeat_interleave(torch.tensor(groups))

    def _nearest(self, values: Tensor, size: int) -> Tensor:
        """(rows, tasks): the distance to the nearest mean of every task."""
        each = _squares(values, self.means[size], self.variance[size])
        task = torch.tensor(self.rows[size]).expand(len(values), -1)
        found = torch.full((len(values), len(self.sizes)), torch.inf, dtype=torch.float32)
        return found.scatter_reduce(1, task, each, "amin")

    def tied(self, task: int) -> Tensor:
        """The tasks whose means differ from those of this one by no more than the drawing of their inputs explains.

        Of n inputs a mean is off by σ/√n in every coordinate, and the squares of two add up.
        """
        if task not in self._ties:
            size = self.sizes[task]
            rows, counts = torch.tensor(self.rows[size]), torch.tensor(self.counts[size], dtype=torch.float32)
            mine = rows == task
            apart = _squares(self.means[size], self.means[size][mine], self.variance[size])
            chance = CHANCE * (1 / counts[:, None] + 1 / counts[mine][None, :])
            alike = (apart <= chance).any(1)
            found = torch.ones(len(self.sizes), dtype=torch.float32)
            found = found.scatter_reduce(0, rows, alike.float(), "amin")
            self._ties[task] = (found > 0) & (torch.tensor(self.sizes) == size)
        return self._ties[task]

    # --- saving -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        tensors = {"signature.sizes": torch.tensor(self.sizes, dtype=torch.long)}
        for size, means in self.means.items():
            tensors |= {f"signature.means.{size}": means, f"signature.variance.{size}": self.variance[size]}
            tensors |= {f"signature.{n}.{size}": torch.tensor(of[size]) for n, of in self._lists().items()}
            tasks = [task for task, of in enumerate(self.sizes) if of == size]
            if all(task in self.own for task in tasks):  # not those that came from an older file
                tensors[f"signature.own.{size}"] = torch.stack([self.own[task] for task in tasks])
                tensors[f"signature.quantiles.{size}"] = torch.stack([self.quantiles[task] for task in tasks])
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self._ties, self.sizes = {}, tensors["signature.sizes"].tolist()
        self.means, self.variance, self.rows, self.counts, self.own, self.quantiles = {}, {}, {}, {}, {}, {}
        for size in sorted(set(self.sizes) - {0}):
            self.means[size], self.variance[size] = (tensors[f"signature.{n}.{size}"] for n in ("means", "variance"))
            tasks = [task for task, of_task in enumerate(self.sizes) if of_task == size]
            if f"signature.own.{size}" not in tensors:  # an older file, with means alone: good for short lists
                self.rows[size], self.counts[size] = tasks, [SAMPLED] * len(tasks)
                continue
            for name, of in self._lists().items():
                of[size] = tensors[f"signature.{name}.{size}"].tolist()
            self.own |= dict(zip(tasks, tensors[f"signature.own.{size}"], strict=True))
            self.quantiles |= dict(zip(tasks, tensors[f"signature.quantiles.{size}"], strict=True))

    def _lists(self) -> dict[str, dict[int, list[int]]]:
        return {"rows": self.rows, "counts": self.counts}


def _squares(values: Tensor, means: Tensor, variance: Tensor) -> Tensor:
    """(values, means): the mean over coordinates of squared differences in units of the variance."""
    spread = variance + variance.mean() / 100 + torch.finfo(torch.float32).tiny
    scale = spread.rsqrt()
    exact = "donot_use_mm_for_euclid_dist"  # near means must not be lost in rounding
    return torch.cdist(values * scale, means * scale, compute_mode=exact).square() / len(variance)


def _rows(x: Tensor) -> Tensor:
    """One row of numbers per input, whatever its shape."""
    return (x.flatten(1) if x.ndim > 1 else x[:, None]).float()
