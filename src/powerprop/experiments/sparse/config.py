"""The settings of a sparse-training table, and its presets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from powerprop import models
from powerprop.allocate import Layers, at_most
from powerprop.experiments.harness.checks import check_settings, require
from powerprop.experiments.harness.rates import equal_rate
from powerprop.experiments.sparse.rows import FULL_STEPS, ROWS, parse
from powerprop.power import check_alpha
from powerprop.train.precision import PRECISIONS


class Problem(NamedTuple):
    """A data set with the network that learns it."""

    data: str
    label: str
    build: Callable[[torch.Generator], nn.Module]
    rules: Layers
    convolutions: bool


LAST = at_most(0.8)
LEAST = {
    "steps": 1,
    "batch": 1,
    "validation": 1,
    "every": 1,
    "refresh": 1,
    "regrow": 1,
    "momentum": 0,
    "weight_decay": 0,
    "label_smoothing": 0,
    "shift": 0,
    "clip": 0,
    "explore": 0,
    "magnitude": 0,
}
TASKS = {
    "mnist": Problem(
        "mnist", "LeNet-300-100 on MNIST", lambda g: models.lenet_300_100(generator=g), {"fc3.weight": LAST}, False
    ),
    "cifar10": Problem(
        "cifar10", "ResNet-20 on CIFAR-10", lambda g: models.resnet20(generator=g),
        {"conv1.weight": 0.0, "fc.weight": LAST}, True,
    ),
    "fast-cifar": Problem(
        "cifar10", "a network made for speed (`models.fast_cifar`) on CIFAR-10",
        lambda g: models.fast_cifar(generator=g), {"stem.weight": 0.0, "fc.weight": LAST}, True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """The settings of a sparse-training table.

    Args:
        task: "mnist" (LeNet-300-100), "cifar10" (ResNet-20) or "fast-cifar" (CIFAR-10 with a network made for speed).
        rows: names of methods, see `rows.ROWS`.
        columns: such as "uniform 0.95" or "erk 0.9".
        alpha: the power of the Powerprop rows.
        lrs: candidates of the learning rate; each row's is chosen by validation accuracy at `tune_at`.
        magnitude: the candidates are those of α = 1, and for α > 1 such that a weight of this size learns equally fast;
            0: they are the same for every row.
        tune_at: the column of the choice.
        seeds: runs of each cell.
        steps: of a cycle of training.
        multipliers: extended training: cycles for the rows `extended`, at `tune_at`.
        extended: the rows of the extended-training table.
        batch: images per step.
        momentum: of SGD.
        nesterov: look ahead along the momentum.
        weight_decay: of SGD.
        clip: largest norm of the gradient; 0 leaves it as it is. A filter with a few weights, on channels that have
            died, gives a constant: its batch norm divides by almost nothing and magnifies the gradient of the others.
        label_smoothing: of the cross-entropy.
        shift: training images in colour are moved by up to so many pixels, and half of them mirrored; 0 leaves them as
            they are.
        precision: of the forward and backward pass: "float32", "bfloat16", "float16".
        train: the first so many training images are trained on; 0 means all.
        test: the first so many test images are measured; 0 means all.
        validation: the last so many training images choose the learning rate.
        every: steps between checkpoints.
        warmup: the fraction of the steps in which the learning rate rises linearly to its full value.
        refresh: steps between refreshes of Top-KAST, 100 in its paper. In short trainings at high rates it must be
            more often, because weights that are trained but not used drift apart.
        explore: λ of Top-KAST, by which weights that are trained but not used decay.
        regrow: steps between mask updates where growth is random (SET, DSR), 100 in the papers. A short training needs
            more tries in fewer steps.
    """

    task: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    alpha: float
    lrs: tuple[float, ...]
    tune_at: str
    seeds: int
    steps: int
    multipliers: tuple[int, ...] = ()
    extended: tuple[str, ...] = ()
    batch: int = 100
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    clip: float = 0.0
    label_smoothing: float = 0.0
    shift: int = 4
    precision: str = "float32"
    train: int = 0
    test: int = 0
    validation: int = 5000
    every: int = 1000
    warmup: float = 0.0
    refresh: int = 5
    explore: float = 1e-4
    regrow: int = 100
    magnitude: float = 0.0

    def __post_init__(self) -> None:
        check_settings(self, LEAST, {"task": tuple(TASKS), "precision": tuple(PRECISIONS)})
        for row in (*self.rows, *self.extended):
            require(row in ROWS, f"row must be one of {', '.join(ROWS)}, got {row!r}")
        for column in (*self.columns, self.tune_at):
            parse(column)
        check_alpha(self.alpha)
        require(len(self.lrs) > 0 and all(lr > 0 for lr in self.lrs), f"lrs must be some, above 0, got {self.lrs}")
        require(len(set(self.lrs)) == len(self.lrs), f"lrs must be different, got {self.lrs}")
        require(all(m >= 1 for m in self.multipliers), f"multipliers must be at least 1, got {self.multipliers}")
        require(self.label_smoothing < 1, f"label_smoothing must be in [0, 1), got {self.label_smoothing!r}")
        require(not self.nesterov or self.momentum > 0, "nesterov needs a momentum above 0, got 0")
        require(0 <= self.warmup < 1, f"warmup must be in [0, 1), a fraction of the steps, got {self.warmup!r}")

    def candidates(self, row: str) -> tuple[float, ...]:
        """The learning rates that a row is tried with, to two digits."""
        if not self.magnitude or not ROWS[row].powerprop:
            return self.lrs
        return tuple(float(f"{equal_rate(lr, self.magnitude, self.alpha):.2g}") for lr in self.lrs)

    @property
    def alphas(self) -> tuple[float, ...]:
        """The powers that occur: the baseline's and Powerprop's."""
        return (1.0, self.alpha)


LEFT_OUT = (
    "pp-dense", "one-shot", "pp-one-shot", *(f"pp-{m}" for m in ("static", "snip", "set", "dsr", "snfs", "rigl"))
)  # fmt: skip
SHORT = tuple(name for name in ROWS if name not in LEFT_OUT)
MAIN = (
    "dense", "static", "snip", "set", "rigl", "snfs", "dsr", "iterative", "pp-iterative", "topkast-0", "pp-topkast-0",
)  # fmt: skip
TABLE = ("uniform 0.8", "uniform 0.9", "uniform 0.95", "uniform 0.98", "uniform 0.99", "erk 0.8", "erk 0.9")
PAIR = ("rigl", "pp-topkast-0")

MNIST_PRESETS = {
    "smoke": Config(
        task="mnist", rows=("dense", "static", "rigl", "pp-topkast-50", "pp-iterative", "pp-one-shot"),
        columns=("uniform 0.9", "erk 0.9"), alpha=2.0, lrs=(0.05,), tune_at="uniform 0.9", seeds=2, steps=20,
        multipliers=(2,), extended=("rigl",), train=600, validation=300, test=300, every=10,
    ),
    "cpu": Config(
        task="mnist", rows=SHORT, columns=("uniform 0.95", "uniform 0.98", "uniform 0.99"), alpha=1.5,
        lrs=(0.05, 0.1, 0.2, 0.4), tune_at="uniform 0.98", seeds=3, steps=10_000, weight_decay=5e-4,
        refresh=1, regrow=25,
    ),
    "paper": Config(
        task="mnist", rows=tuple(ROWS), columns=TABLE, alpha=1.375, lrs=(0.05, 0.1, 0.2, 0.4),
        tune_at="uniform 0.98", seeds=3, steps=FULL_STEPS["mnist"], multipliers=(2, 3, 5), extended=PAIR,
    ),
}  # fmt: skip

CIFAR_PRESETS = {
    "smoke": Config(
        task="fast-cifar", rows=("dense", "pp-topkast-0"), columns=("uniform 0.9",), alpha=1.5, lrs=(0.1,),
        tune_at="uniform 0.9", seeds=1, steps=2, batch=8, train=64, validation=32, test=32, every=1, nesterov=True,
        label_smoothing=0.1, shift=2, precision="bfloat16", clip=3.0, magnitude=0.1,
    ),
    "cpu": Config(
        task="fast-cifar", rows=MAIN, columns=("uniform 0.9", "uniform 0.95", "uniform 0.98"), alpha=1.5,
        lrs=(0.2, 0.4), magnitude=0.1, tune_at="uniform 0.95", seeds=2, steps=1_800, batch=125, nesterov=True,
        weight_decay=5e-4, clip=3.0, label_smoothing=0.1, shift=2, precision="bfloat16", every=180, warmup=0.2,
        refresh=1, explore=1e-3, regrow=25,
    ),
    "paper": Config(
        task="cifar10", rows=tuple(ROWS), columns=TABLE, alpha=1.375, lrs=(0.05, 0.1, 0.2), tune_at="uniform 0.95",
        seeds=3, steps=FULL_STEPS["cifar10"], batch=128, weight_decay=5e-4, warmup=0.05, refresh=100,
        multipliers=(2, 3, 5), extended=PAIR,
    ),
}  # fmt: skip
