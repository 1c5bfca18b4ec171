"""Learners that pack task after task into one network, as experiments make them and measure them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD

from powerprop.continual import Classification, EfficientPackNet, Packing, PackNet, infer
from powerprop.continual.data import derived_seed, number_of
from powerprop.continual.packing.efficient import FINE
from powerprop.continual.packing.task_inference import entropies
from powerprop.optim import Rate
from powerprop.select import select
from powerprop_paper import data, models
from powerprop_paper.models import fans
from powerprop_paper.report import Curve
from powerprop_paper.settings import Count, Natural, Positive, Seeds, Settings, Share
from powerprop_paper.train import Precision

if TYPE_CHECKING:
    from powerprop_paper.experiments.split import Config

FINGERPRINTED = 64
"""Test images of a task whose logits must stay as they are, to the bit."""
RECHECKED = 5
"""Earlier tasks that are checked after each task; all of them are after the last."""
BY_GRADIENT = ("oneshot", "binary")
MIN_GROUP_BY_GRADIENT, GROUPS_BY_GRADIENT = 16, 4
"""Smaller groups are not probed by gradient methods, which take one pass back and forth for each."""


@dataclass(frozen=True, kw_only=True)
class PackingSettings(Settings):
    """How tasks are packed into one network."""

    tasks: Count
    """how many; a split stream has the classes of the data in equal parts"""
    lr: Positive
    """learning rate"""
    seeds: Seeds
    """runs of each method: first weights, order of pixels, batches"""
    retrain_steps: Natural
    """after pruning"""
    gamma: Share
    """fraction of the dense validation accuracy that a sub-network must keep"""
    rate: Rate = "matched"
    """matched: the learning rate serves every power; paper: the update as printed"""
    prunings: Natural = 3
    """how often a frugal learner prunes further inside the retraining steps; 0 prunes at once"""
    pruning_steps: Count = 100
    """between two of these prunings"""
    width: Count = 1000
    """units of a hidden layer of the mlp"""
    images: Natural = 0
    """only the last so many training images of the data are used; 0 means all"""


def make_stream(kind: str, images: data.Images, tasks: int, seed: int, validation: int) -> data.Stream:
    """The tasks of a seed: `permuted`, `rotated`, or the classes of the images `split`."""
    if kind != "split":
        make = data.permuted if kind == "permuted" else data.rotated
        return make(images, tasks, seed, validation=validation)
    transform = data.to_float
    if images.shape[0] > 1:
        mean, std = data.mean_std(images.train_x)
        transform = partial(data.normalise, mean=mean, std=std)
    return data.split(images, images.classes // tasks, validation=validation, transform=transform)


def make_learner(cfg: Config, method: str, alpha: float, seed: int, device: torch.device) -> Packing:
    """The learner of a method, with the first weights of its seed."""
    options: dict[str, Any] = {
        "alpha": alpha, "rate": cfg.rate, "seed": seed, "steps": cfg.steps, "batch_size": cfg.batch,
        "retrain_steps": cfg.retrain_steps,
        "clip": cfg.clip or None, "schedule": partial(falling, cfg.decay),
        "objective": make_objective(cfg, device, seed), "heads": "heads" if cfg.model == "alexnet" else None,
    }  # fmt: skip
    model = build(cfg, seed).to(device)
    optimizer = partial(SGD, lr=cfg.lr, momentum=cfg.momentum)
    if method == "packnet":
        return PackNet(model, optimizer, cfg.tasks, **options)
    options |= {"gamma": cfg.gamma, "grid": cfg.grid, "search": cfg.search, "when_full": "train"}
    if method == "frugal-packnet":
        options |= {
            "gamma": cfg.frugal_gamma, "grid": (*cfg.grid, *(kept for kept in FINE if kept < cfg.grid[-1])),
            "prunings": cfg.prunings, "pruning_steps": cfg.pruning_steps, "reuse": "output", "when_full": "masks",
        }  # fmt: skip
    return EfficientPackNet(model, optimizer, **options)


def falling(phases: tuple[str, ...], phase: str, done: float) -> float:
    """The factor of the learning rate: from 1 to 0 along the phases named, 1 in the others."""
    return 1.0 - done if phase in phases else 1.0


def build(cfg: Config, seed: int) -> nn.Module:
    """The network, its shared layers drawn evenly from an interval with Glorot's variance times init_scale²."""
    generator = torch.Generator().manual_seed(seed)
    if cfg.model == "alexnet":
        model: nn.Module = models.alexnet(100 // cfg.tasks, heads=cfg.tasks, generator=generator)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    else:
        model = models.mlp([784, cfg.width, cfg.width, 10], generator=generator)
    for name, weight in select(model).items():
        if not name.startswith("heads."):
            limit = cfg.init_scale * (6 / sum(fans(weight))) ** 0.5
            nn.init.uniform_(weight, -limit, limit, generator=generator)
    return model


def make_objective(cfg: Config, device: torch.device, seed: int) -> Classification:
    """The library's own, which a saved learner can be made with again, unless images go through something first."""
    if cfg.model == "mlp":
        return Classification("stream" if cfg.stream == "split" else "task")
    if cfg.precision == "float32" and not cfg.shift:
        return Classification()
    return OfImages(cfg.precision, device, cfg.shift, seed)


class OfImages(Classification):
    """Classification of images that are moved and mirrored while a network learns them.

    Passes of training compute in some precision; scores and answers are of images as they are, in float32. What is
    drawn depends on the seed and the task alone, so that a learner that was saved after a task goes on bit for bit.
    """

    mixes_tasks = True

    def __init__(self, precision: str, device: torch.device, shift: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.device, self.precision = device, Precision(precision, device.type)
        self.augment, self.seed = data.random_shift_flip(shift), seed

    def begin(self, task: int, classes: Sequence[int] | None) -> None:
        super().begin(task, classes)
        self.generator = torch.Generator().manual_seed(derived_seed(self.seed, task, number_of("moved images")))

    def loss(self, model: Any, batch: Any, task: int | Tensor) -> Tensor:
        x, y = batch
        with self.precision.autocast(self.device):
            return super().loss(model, (self.augment(x, self.generator), y), task)


class LogitsChangedError(AssertionError):
    """A task that was learned answers differently: the promise of the method is broken."""


class Measures:
    """Measures a learner after every task and keeps the numbers in its records."""

    def __init__(self, cfg: Config, learner: Packing, stream: data.Stream) -> None:
        self.cfg, self.learner, self.stream = cfg, learner, stream

    @property
    def records(self) -> dict[str, Any]:
        """The numbers so far."""
        for name in ("accuracy", "kept", "used", "fingerprints", "matrix", "inference"):
            self.learner.records.setdefault(name, [])
        return self.learner.records

    def after_task(self, task: data.Task) -> dict[str, float]:
        """Accuracy, weights, fingerprints of earlier tasks, and now and then task inference; what the log shows."""
        records, masks = self.records, self.learner.nets.masks
        last = task.index == len(self.stream) - 1
        records["accuracy"].append(self.accuracy(task))
        records["kept"].append(masks.mask(task.index).density())
        records["used"].append(masks.used())
        records["fingerprints"].append(self.fingerprint(task))
        some = {0, *((task.index * k) // RECHECKED for k in range(1, RECHECKED))} - {task.index}
        self.check(range(task.index) if last or self.cfg.matrix else sorted(some))
        if self.cfg.matrix:
            earlier = [self.accuracy(self.stream[t]) for t in range(task.index)]
            records["matrix"].append([*earlier, records["accuracy"][-1]])
        if last or task.index + 1 in self.cfg.infer_at:
            records["inference"].append(self.probe())
        if last and self.cfg.matrix:
            records["class_incremental"] = self.class_incremental()
        return {"average accuracy": fmean(records["accuracy"]), "used": records["used"][-1]}

    def part(self, task: data.Task, count: int = 0) -> data.Part:
        """The test images that are measured."""
        return data.first(task.test(), count or self.cfg.test)

    def accuracy(self, task: data.Task) -> float:
        """Task-incremental: the task is given."""
        x, y = self.part(task)
        return fraction(self.learner.predict(x, task.index).label == y)

    def fingerprint(self, task: data.Task) -> str:
        """A digest of the logits of some test images."""
        logits = self.learner.logits(self.part(task, FINGERPRINTED).x, task.index)
        return hashlib.sha256(logits.cpu().numpy().tobytes()).hexdigest()[:16]

    def check(self, tasks: Iterable[int]) -> None:
        """Compare the logits of earlier tasks, bit for bit, with those right after they were learned."""
        for t in tasks:
            if self.fingerprint(self.stream[t]) != self.records["fingerprints"][t]:
                raise LogitsChangedError(f"the logits of task {t} are no longer those after it was learned")

    def probe(self) -> dict[str, Any]:
        """rates[method][group]: how often the task is inferred rightly, and the class too."""
        known = self.learner.current
        tasks = sorted({int(t) for t in np.linspace(0, known - 1, min(known, self.cfg.probe_tasks))})
        found: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for t in tasks:
            x, y = self.part(self.stream[t], self.cfg.probe_images)
            right_class = (self.learner.predict(x, t).label == y).cpu()
            for method, group, inferred in self.guesses(x):
                right = inferred == t
                pair = (fraction(right), fraction(right & right_class[: len(right)]))
                found.setdefault(method, {}).setdefault(str(group), []).append(pair)
        rates = {
            method: {group: [fmean(column) for column in zip(*pairs, strict=True)] for group, pairs in groups.items()}
            for method, groups in found.items()
        }
        return {"tasks": known, "rates": rates}

    def guesses(self, x: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        """(method, size of the groups, the task inferred for each image)."""
        nets, objective = self.learner.nets, self.learner.objective
        unsure = entropies(nets, x, objective)
        for group in self.cfg.groups:
            parts = torch.split(unsure, group, 1)
            yield "exhaustive", group, torch.cat([part.mean(1).argmin().expand(part.shape[1]) for part in parts])
            yield "shortlist", group, infer(nets, x, objective, "shortlist", group)
            for method in BY_GRADIENT if group >= MIN_GROUP_BY_GRADIENT else ():
                yield method, group, infer(nets, x[: GROUPS_BY_GRADIENT * group], objective, method, group)

    def class_incremental(self) -> dict[str, Any]:
        """The whole test set of every task, the task inferred from the largest groups by the default method."""
        group = max(self.cfg.groups)
        confusion, accuracy = [], []
        for task in self.stream:
            x, y = self.part(task)
            found = self.learner.predict(x, group=group)
            counts = torch.bincount(found.task.cpu(), minlength=len(self.stream))
            confusion.append((counts / len(x)).tolist())
            accuracy.append(fraction((found.task == task.index) & (found.label == y)))
        return {"group": group, "accuracy": accuracy, "confusion": confusion}


def fraction(right: Tensor) -> float:
    """How many are right."""
    return float(right.double().mean())


def inference_curves(
    rates: Sequence[Mapping[str, Mapping[str, Any]]], of: Callable[[Any], float] = float
) -> list[Curve]:
    """How often each method infers the right task against the size of the groups, from the rates of every run."""
    return [
        Curve(
            method, None, [float(group) for group in groups],
            [[of(each[method][group]) for group in groups] for each in rates], method=method,
        )
        for method, groups in rates[0].items()
    ]  # fmt: skip
