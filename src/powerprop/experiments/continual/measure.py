"""What the continual-learning experiments measure after each task; all of it is saved with the learner."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from powerprop.continual import EfficientPackNet, PackNet, Strategy, infer
from powerprop.continual.packing.infer import entropies
from powerprop.data import Part, Stream, Task

if TYPE_CHECKING:
    from powerprop.experiments.continual.config import Config

FINGERPRINTED = 64
"""Test images of a task whose logits must stay as they are, to the bit."""
RECHECKED = 5
"""Earlier tasks that are checked after each task; all of them are after the last."""
BY_GRADIENT = ("oneshot", "binary")
LEAST_BY_GRADIENT = 16
"""Smaller groups are not probed by gradient methods, which take one pass back and forth for each."""
GROUPS_BY_GRADIENT = 4


class LogitsChangedError(AssertionError):
    """A task that was learned answers differently: the promise of the method is broken."""


class Measures:
    """Measures a learner after every task and keeps the numbers in its records."""

    def __init__(self, config: Config, learner: Strategy, stream: Stream) -> None:
        assert isinstance(learner, (EfficientPackNet, PackNet))
        self.config, self.learner, self.stream = config, learner, stream

    @property
    def records(self) -> dict[str, Any]:
        """The numbers so far."""
        for name in ("accuracy", "kept", "used", "fingerprints", "matrix", "inference"):
            self.learner.records.setdefault(name, [])
        return self.learner.records

    @property
    def latest(self) -> dict[str, float]:
        """What progress shows: average accuracy and weights used."""
        accuracy = self.records["accuracy"]
        return {"average accuracy": fmean(accuracy), "used": self.records["used"][-1]} if accuracy else {}

    def after_task(self, task: Task) -> None:
        """Accuracy, weights, fingerprints of earlier tasks, and now and then task inference."""
        records, masks = self.records, self.learner.nets.masks
        last = task.index == len(self.stream) - 1
        records["accuracy"].append(self.accuracy(task))
        records["kept"].append(masks.mask(task.index).density())
        records["used"].append(masks.used())
        records["fingerprints"].append(self.fingerprint(task))
        self.check(range(task.index) if last or self.config.matrix else self._some(task.index))
        if self.config.matrix:
            earlier = [self.accuracy(self.stream[t]) for t in range(task.index)]
            records["matrix"].append([*earlier, records["accuracy"][-1]])
        if last or task.index + 1 in self.config.infer_at:
            records["inference"].append(self.probe())
        if last and self.config.matrix:
            records["class_incremental"] = self.class_incremental()

    def part(self, task: Task, count: int = 0) -> Part:
        """The test images that are measured."""
        x, y = task.test()
        count = count or self.config.test or len(x)
        return Part(x[:count], y[:count])

    def accuracy(self, task: Task) -> float:
        """Task-incremental: the task is given."""
        x, y = self.part(task)
        return float((self.learner.predict(x, task.index).label == y).double().mean())

    # --- nothing is forgotten -----------------------------------------------------------------------------------

    def fingerprint(self, task: Task) -> str:
        """A digest of the logits of some test images."""
        logits = self.learner.logits(self.part(task, FINGERPRINTED).x, task.index)
        return hashlib.sha256(logits.cpu().numpy().tobytes()).hexdigest()[:16]

    def check(self, tasks: Iterable[int]) -> None:
        """Compare the logits of earlier tasks, bit for bit, with those right after they were learned."""
        for t in tasks:
            if self.fingerprint(self.stream[t]) != self.records["fingerprints"][t]:
                raise LogitsChangedError(f"the logits of task {t} are no longer those after it was learned")

    def _some(self, count: int) -> list[int]:
        """The first task and a few that differ from time to time."""
        return sorted({0, *((count * k) // RECHECKED for k in range(1, RECHECKED))} - {count}) if count else []

    # --- task inference -----------------------------------------------------------------------------------------

    def probe(self) -> dict[str, Any]:
        """How often the task is inferred rightly, and the class too, by method and size of the group."""
        known = self.learner.current
        tasks = sorted({int(t) for t in np.linspace(0, known - 1, min(known, self.config.probed))})
        found: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for t in tasks:
            x, y = self.part(self.stream[t], self.config.probe)
            right_class = (self.learner.predict(x, t).label == y).cpu()
            for method, group, inferred in self.guesses(x):
                right = inferred == t
                pair = (_mean(right), _mean(right & right_class[: len(right)]))
                found.setdefault(method, {}).setdefault(str(group), []).append(pair)
        rates = {m: {g: [fmean(column) for column in zip(*pairs, strict=True)] for g, pairs in groups.items()}
                 for m, groups in found.items()}  # fmt: skip
        return {"tasks": known, "rates": rates}

    def guesses(self, x: Tensor) -> Iterable[tuple[str, int, Tensor]]:
        """(method, size of the groups, the task inferred for each image)."""
        nets, objective = self.learner.nets, self.learner.objective
        unsure = entropies(nets, x, objective)
        for group in self.config.groups:
            yield "exhaustive", group, _lowest(unsure, group)
            yield "shortlist", group, infer(nets, x, objective, "shortlist", group)
            if group >= LEAST_BY_GRADIENT:
                for method in BY_GRADIENT:
                    yield method, group, infer(nets, x[: GROUPS_BY_GRADIENT * group], objective, method, group)

    def class_incremental(self) -> dict[str, Any]:
        """The whole test set of every task, the task inferred from the largest groups by the default method."""
        group = max(self.config.groups)
        rows, accuracy = [], []
        for task in self.stream:
            x, y = self.part(task)
            found = self.learner.predict(x, group=group)
            counts = torch.bincount(found.task.cpu(), minlength=len(self.stream))
            rows.append((counts / len(x)).tolist())
            accuracy.append(_mean((found.task == task.index) & (found.label == y)))
        return {"group": group, "accuracy": accuracy, "confusion": rows}


def _lowest(unsure: Tensor, group: int) -> Tensor:
    parts = torch.split(unsure, group, 1)
    return torch.cat([part.mean(1).argmin().expand(part.shape[1]) for part in parts])


def _mean(right: Tensor) -> float:
    return float(right.double().mean())
