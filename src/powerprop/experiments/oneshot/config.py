"""The settings of a one-shot pruning experiment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from powerprop.experiments.harness.checks import check_alphas, check_positive, check_settings, require
from powerprop.experiments.harness.rates import equal_rate
from powerprop.experiments.oneshot import pruning
from powerprop.models.init import INITIALISERS
from powerprop.train.precision import PRECISIONS

FORMS = {
    "targets": "through virtual targets",
    "direct": "on φ directly",
}
LASSO = "lasso"
"""The form of ordinary weights under a penalty λ|w|."""
CHOICES = {
    "model": ("lenet-300-100", "conv6", "fast-cifar", "resnet20"),
    "optimiser": ("sgd", "adam"),
    "pixels": ("unit", "standard"),
    "forms": tuple(FORMS),
    "ways": pruning.WAYS,
    "precision": tuple(PRECISIONS),
    "init": tuple(INITIALISERS),
}
LEAST = {
    "steps": 1,
    "tuning_seeds": 1,
    "batch": 1,
    "validation": 1,
    "every": 1,
    "points": 2,
    "magnitude": 0,
    "momentum": 0,
    "tolerance": 0,
    "weight_decay": 0,
    "label_smoothing": 0,
    "shift": 0,
}


class Candidate(NamedTuple):
    """What a network may be trained with; under a penalty λ|w|, `decay` is λ."""

    lr: float
    decay: float


@dataclass(frozen=True)
class Config:
    """The settings of a one-shot pruning experiment.

    Args:
        data: name of the data set.
        model: "lenet-300-100", "conv6", "fast-cifar" or "resnet20".
        alphas: powers; 1 is the baseline.
        lrs: candidates of the learning rate; with one there is no tuning.
        decays: the weight decay of each of these candidates; without any it is `weight_decay` for all.
        lassos: further candidates, of one more row: ordinary weights (α = 1) at the first learning rate with a penalty
            λ|w| of this strength, beside the weight decay of all.
        magnitude: the candidates are those of α = 1, and for other powers such that a weight of this size learns, and
            on φ directly decays, equally fast; 0 takes them as they are for all.
        seeds: runs of each arm at its chosen learning rate.
        steps: training steps.
        tuning_seeds: runs of each candidate.
        tolerance: what the dense accuracy of the chosen learning rate may lack to the best candidate's.
        optimiser: "sgd" or "adam".
        forms: how α > 1 is trained: "targets" (the Powerprop wrapper), "direct" (the optimiser sees φ, and decays it:
            λφ²/2 is a penalty of λ|w|^(2/α)/2, for α = 2 that of the lasso).
        momentum: of SGD.
        nesterov: look ahead along the momentum.
        weight_decay: of the optimiser.
        peak: the learning rate rises linearly up to this fraction of the training and falls linearly to zero; 0 leaves
            it constant.
        label_smoothing: of the cross-entropy.
        shift: training images are moved by up to so many pixels, and half of them mirrored; 0 leaves them as they are.
        precision: of the forward and backward pass, and of the passes by which a pruned network is measured: "float32",
            "bfloat16", "float16".
        batch: images per step.
        init: initialisation of the weights.
        pixels: "unit" scales them to [0, 1], "standard" each channel to mean 0 and variance 1.
        width: multiplies the channels of Conv-6 and of the fast network.
        batch_norm: after each convolution of Conv-6; its variables are not pruned.
        validation: the last so many training images choose the learning rate.
        train: the first so many of the others are trained on; 0 means all.
        test: the first so many test images are measured; 0 means all.
        points: size of the grid of fractions kept, evenly spaced on a log scale up to 1.
        least: the smallest fraction kept.
        band: the range of fractions kept that the headline averages over.
        every: steps between checkpoints.
        ways: to prune, see `pruning.WAYS`; the learning rate is chosen by the first, which the main figure shows.
    """

    data: str
    model: str
    alphas: tuple[float, ...]
    lrs: tuple[float, ...]
    seeds: int
    steps: int
    decays: tuple[float, ...] = ()
    lassos: tuple[float, ...] = ()
    magnitude: float = 0.0
    tuning_seeds: int = 1
    tolerance: float = 0.005
    optimiser: str = "sgd"
    forms: tuple[str, ...] = ("targets",)
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    peak: float = 0.0
    label_smoothing: float = 0.0
    shift: int = 0
    precision: str = "float32"
    batch: int = 60
    init: str = "truncated_fan_in"
    pixels: str = "unit"
    width: float = 1.0
    batch_norm: bool = False
    validation: int = 5000
    train: int = 0
    test: int = 0
    points: int = 20
    least: float = 0.01
    band: tuple[float, float] = (0.015, 0.055)
    every: int = 1000
    ways: tuple[str, ...] = (pruning.LAYERWISE,)

    def __post_init__(self) -> None:
        check_settings(self, LEAST, CHOICES)
        check_alphas(self.alphas)
        check_positive(self, "width")
        require(all(lr > 0 for lr in self.lrs), f"learning rates must be above 0, got {self.lrs}")
        require(all(decay >= 0 for decay in self.decays), f"decays must not be negative, got {self.decays}")
        fits = all(each > 0 for each in self.lassos) and len(set(self.lassos)) == len(self.lassos)
        require(fits, f"lassos must be above 0, each once, got {self.lassos}")
        fits = len(self.decays) in (0, len(self.lrs))
        require(fits, f"decays must be as many as the {len(self.lrs)} learning rates, or none, got {self.decays}")
        for alpha in self.alphas:
            tried = self.candidates(alpha)
            text = self.lrs if not self.decays else tuple(zip(self.lrs, self.decays, strict=True))
            require(len(set(tried)) == len(tried) > 0, f"learning rates must be different, got {text}")
        require(len(set(self.forms)) == len(self.forms) > 0, f"forms must be some, each once, got {self.forms}")
        require(len(set(self.ways)) == len(self.ways) > 0, f"ways must be some, each once, got {self.ways}")
        require(0 <= self.peak < 1, f"peak must be in [0, 1), a fraction of the steps, got {self.peak!r}")
        require(self.label_smoothing < 1, f"label_smoothing must be in [0, 1), got {self.label_smoothing!r}")
        flat = self.shift and self.model == "lenet-300-100"
        require(not flat, f"shift moves images of networks of convolutions, got {self.shift} with {self.model}")
        require(not self.nesterov or self.momentum > 0, "nesterov needs a momentum above 0, got 0")
        require(0 < self.least < 1, f"least must be between 0 and 1, got {self.least}")
        low, high = self.band
        require(any(low <= kept <= high for kept in self.grid), f"no point of the grid lies in {self.band}")

    def candidates(self, alpha: float, form: str = "targets") -> tuple[Candidate, ...]:
        """What is tried for a power in a form; what is scaled for it is rounded to two digits.

        A decay λ takes lr·λ of w in a step, one of φ takes α·lr(α)·λ(α) of it: the two are made equal.
        """
        if form == LASSO:
            return tuple(Candidate(self.lrs[0], each) for each in self.lassos)
        decays = self.decays or (self.weight_decay,) * len(self.lrs)
        pairs = [Candidate(lr, decay) for lr, decay in zip(self.lrs, decays, strict=True)]
        if not self.magnitude or alpha == 1:
            return tuple(pairs)
        scale = equal_rate(1.0, self.magnitude, alpha)
        of_phi = 1 / (alpha * scale) if self.forms == ("direct",) else 1.0
        return tuple(Candidate(two_digits(scale * lr), two_digits(of_phi * decay)) for lr, decay in pairs)

    @property
    def grid(self) -> list[float]:
        """The fractions of weights kept."""
        return pruning.kept_grid(self.points, self.least)


def two_digits(value: float) -> float:
    """The number as it stands in the name of a job."""
    return float(f"{value:.2g}")
