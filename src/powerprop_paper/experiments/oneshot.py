"""Train, prune once, never retrain: section 3 with figure 2, figure 3 a and appendix A of the paper.

`mnist-oneshot` is the protocol of the notebook published with the paper: LeNet-300-100, plain SGD, batches of 60,
truncated-normal fan-in initialisation, the last 5,000 training images for validation, layer-wise pruning to int(p·n)
weights for 20 values of p from 1% to 100%, twice the fraction in the output layer. The preset `paper` has the values of
the paper's table instead.

`mnist-optimisers` trains with Adam: alone; on φ directly, so that Adam's own scaling sees the gradient of φ and undoes
part of the effect; through virtual targets, Adam(∂L/∂w)·α|φ|^(α-1), which the paper recommends.

`cifar-oneshot` is figure 3 a. The paper trains Conv-6 for 100,000 steps, more than a day for each run on one core; the
preset `cpu` trains a network made for speed to about 90% with what such networks are trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.torch import save as to_safetensors
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import powerprop as pp
from powerprop.files import replacing
from powerprop.select import select
from powerprop_paper import data, models, pruning
from powerprop_paper.experiments import Columns, ImageSettings, Story, best, table, train_images
from powerprop_paper.pages import Figure, Headline, Page, Percent, Section, Stat
from powerprop_paper.pruning import LAYERWISE, SEEN, PruneMode, inside, layerwise_masks, weights_of
from powerprop_paper.report import Curve, Mean, Point, pruning_curves, scatter, weight_change
from powerprop_paper.run import Experiment, Progress, Row, Rows, Run
from powerprop_paper.settings import Below1, EachOnce, NonNegative, Positive, Powers, Range, Seeds, require
from powerprop_paper.train import Precision, local_device, triangle

TARGETS: Final = "targets"
DIRECT, LASSO = "direct", "lasso"
"""Trained through virtual targets, on φ itself, and with ordinary weights under a penalty λ|w|."""
RIVAL = "α = 1 with an L1 penalty"
SURVIVORS, SAMPLED = 0.1, 10_000
"""The fraction kept in figures 2c and 2d, 90% sparsity, and the number of weights drawn there."""
RANGES = ((0.05, 0.2), (0.03, 0.1))
"""Weights kept over which ways of pruning are compared: where they fall apart, and where little is left."""
COLUMNS_AT = (0.05, 0.02)
"""The table shows the points of the grid nearest to these fractions kept; more would not fit 80 columns."""
TRAINED = 0.05
"""A network further than this below the best dense accuracy has learned too little to have a place in the picture."""


class Candidate(NamedTuple):
    """What a network may be trained with; under a penalty λ|w|, `decay` is λ."""

    lr: float
    decay: float

    def __str__(self) -> str:
        return f"lr {self.lr:g} with decay {self.decay:g}"


class Method(NamedTuple):
    """One curve of the figure."""

    alpha: float
    parametrization: str


@dataclass(frozen=True, kw_only=True)
class Config(ImageSettings):
    """The settings of a one-shot pruning experiment."""

    data: Literal["mnist", "fashion-mnist", "cifar10"] = "mnist"
    """data set"""
    model: Literal["lenet-300-100", "conv6", "fast-cifar", "resnet20"] = "lenet-300-100"
    """network"""
    alphas: Powers = (1.0, 2.0, 3.0, 4.0, 5.0)
    """powers; 1 is the baseline"""
    lrs: tuple[Positive, ...] = (0.1, 0.2, 0.5, 1.0, 2.0)
    """candidates of the learning rate; with one there is no tuning"""
    decays: tuple[NonNegative, ...] = ()
    """the weight decay of each of these candidates; without any it is `weight_decay` for all. With `magnitude`, φ that
    is trained directly decays such that a weight of that size does so equally fast"""
    lassos: tuple[Positive, ...] = ()
    """further candidates, of one more row: ordinary weights (α = 1) at the first learning rate with a penalty λ|w| of
    this strength, beside the weight decay of all"""
    magnitude: NonNegative = 0.0
    """on φ directly, the candidates are such that a weight of this size learns and decays as fast as under α = 1; 0
    takes them as they are"""
    tuning_seeds: Seeds = 1
    """runs of each candidate"""
    tolerance: NonNegative = 0.005
    """what the dense accuracy of the chosen learning rate may lack to the best candidate's"""
    parametrization: Annotated[tuple[Literal["targets", "direct"], ...], EachOnce()] = (TARGETS,)
    """how α > 1 is trained: through virtual targets, or directly on φ, which the optimiser then sees and decays (λφ²/2
    is a penalty of λ|w|^(2/α)/2, for α = 2 that of the lasso)"""
    optimiser: Literal["sgd", "adam"] = "sgd"
    """optimiser"""
    momentum: NonNegative = 0.0
    """of SGD"""
    peak: Below1 = 0.0
    """the learning rate rises linearly up to this fraction of the training and falls linearly to zero; 0 leaves it
    constant"""
    init: Literal["truncated_fan_in", "glorot_normal", "he_normal"] = "truncated_fan_in"
    """initialisation of the weights"""
    pixels: Literal["unit", "standard"] = "unit"
    """scaled to [0, 1], or each channel to mean 0 and variance 1"""
    width: Positive = 1.0
    """multiplies the channels of Conv-6 and of the fast network"""
    batch_norm: bool = False
    """after each convolution of Conv-6; its variables are not pruned"""
    points: Annotated[int, Range(2)] = 20
    """size of the grid of fractions kept, evenly spaced on a log scale up to 1"""
    min_kept: Annotated[float, Range(0, 1, above=True, below=True)] = 0.01
    """the smallest fraction kept"""
    band: tuple[float, float] = (0.015, 0.055)
    """the range of fractions kept that the headline averages over"""
    prune_modes: Annotated[tuple[PruneMode, ...], EachOnce()] = (LAYERWISE,)
    """ways to prune; the learning rate is chosen by the first, which the main figure shows"""

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = len(self.decays) in (0, len(self.lrs))
        require(fits, f"decays must be as many as the {len(self.lrs)} learning rates, or none, got {self.decays}")
        for alpha in self.alphas:
            tried = self.candidates(Method(alpha, self.parametrization[-1]))
            text = tuple(zip(self.lrs, self.decays, strict=True)) if self.decays else self.lrs
            require(len(set(tried)) == len(tried) > 0, f"learning rates must be different, got {text}")
        message = f"shift moves images of networks of convolutions, got {self.shift} with {self.model}"
        require(not (self.shift and self.flat), message)
        require(not self.nesterov or self.momentum > 0, "nesterov needs a momentum above 0, got 0")
        require(self.band_points, f"no point of the grid lies in {self.band}")

    @property
    def flat(self) -> bool:
        """True if the network has no convolutions."""
        return self.model == "lenet-300-100"

    @property
    def grid(self) -> list[float]:
        """The fractions of weights kept (the published notebook's grid)."""
        return pruning.kept_grid(self.points, self.min_kept)

    @property
    def band_points(self) -> list[int]:
        """The points of the grid inside the band."""
        return inside(self.grid, self.band)

    @property
    def methods(self) -> list[Method]:
        """Every α > 1 in every parametrization; α = 1 is the same in all, and once more if a penalty is asked for."""
        pairs = product(self.parametrization, self.alphas)
        every = [Method(alpha, form if alpha > 1 else TARGETS) for form, alpha in pairs]
        return list(dict.fromkeys([*every, *([Method(1.0, LASSO)] if self.lassos else [])]))

    @property
    def tried(self) -> list[tuple[Method, Candidate]]:
        """Every method with every candidate."""
        return [(method, each) for method in self.methods for each in self.candidates(method)]

    def chooses(self, method: Method) -> bool:
        """True unless it has what is chosen for α = 1."""
        return self.rate == "paper" or method.alpha == 1 or method.parametrization == DIRECT or 1.0 not in self.alphas

    def candidates(self, method: Method) -> tuple[Candidate, ...]:
        """What is tried for a method; what is scaled for its power is rounded to two digits.

        A decay λ takes lr·λ of w in a step, one of φ takes α·lr(α)·λ(α) of it: the two are made equal.
        """
        if method.parametrization == LASSO:
            return tuple(Candidate(self.lrs[0], each) for each in self.lassos)
        decays = self.decays or (self.weight_decay,) * len(self.lrs)
        if not self.magnitude or method.parametrization != DIRECT:
            return tuple(map(Candidate, self.lrs, decays))
        scale = self.magnitude ** (2 / method.alpha - 2) / method.alpha**2
        pairs = zip(self.lrs, decays, strict=True)
        return tuple(
            Candidate(float(f"{scale * lr:.2g}"), float(f"{decay / (method.alpha * scale):.2g}")) for lr, decay in pairs
        )


SMALL: dict[str, Any] = {
    "alphas": (1.0, 2.0), "steps": 40, "points": 5, "train": 2_000, "validation": 500, "test": 500
}  # fmt: skip
MNIST = {
    "smoke": Config(**SMALL, lrs=(0.2, 0.5), seeds=2, checkpoint_every=10),
    "demo": Config(alphas=(1.0, 2.0, 3.0), lrs=(0.5,), seeds=2, steps=8_000),
    "cpu": Config(tuning_seeds=5),
    "paper": Config(lrs=(0.0025,), steps=50_000, momentum=0.9, init="glorot_normal", rate="paper"),
}  # fmt: skip

ADAM: dict[str, Any] = {"optimiser": "adam", "parametrization": (TARGETS, DIRECT), "lrs": (0.001,)}
OPTIMISERS = {
    "smoke": Config(**ADAM, **SMALL, seeds=1, checkpoint_every=20),
    "cpu": Config(**ADAM, alphas=(1.0, 2.0)),
    "paper": Config(**ADAM, alphas=(1.0, 2.0, 3.0, 4.0), steps=50_000, init="glorot_normal", rate="paper"),
}
FAST: dict[str, Any] = {
    "data": "cifar10", "model": "fast-cifar", "init": "he_normal", "pixels": "standard", "magnitude": 0.1,
    "parametrization": (DIRECT,), "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4, "peak": 0.2,
    "label_smoothing": 0.1, "shift": 2, "precision": "bfloat16", "min_kept": 0.02,
    "prune_modes": ("global recalibrated", "global", "layerwise recalibrated", "layerwise"),
}  # fmt: skip
"""Convolutions in bfloat16 take half of the time of float32 on a CPU that has it; weights and updates are float32."""
CIFAR = {
    "smoke": Config(
        **FAST, alphas=(1.0, 2.0), lrs=(0.02, 0.02), decays=(5e-4, 1e-3), lassos=(1e-4,), seeds=1, steps=6, batch=20,
        width=0.125, train=500, validation=100, test=100, points=5, band=(0.03, 0.2), checkpoint_every=3,
    ),
    "cpu": Config(
        **FAST, alphas=(1.0, 1.5, 2.0, 3.0), lrs=(0.2, 0.4, 0.2), decays=(5e-4, 5e-4, 1e-3), lassos=(5e-5, 1e-4),
        seeds=3, steps=4_320, batch=125, tolerance=0.01, points=12, band=(0.03, 0.1), checkpoint_every=360,
    ),
    "paper": Config(
        data="cifar10", model="conv6", lrs=(0.0025,), steps=100_000, momentum=0.9, init="glorot_normal",
        pixels="standard", batch_norm=True, rate="paper",
    ),
}  # fmt: skip


# One job: train a network, prune it to every fraction of the grid.


def find_data(cfg: Config) -> None:
    """Have the data at hand, and refuse settings that it does not fit."""
    found = data.load(cfg.data)
    data.check_images(cfg.model, (1, 28, 28) if cfg.flat else (3, 32, 32), 10, found)
    found.split_validation(cfg.validation)


def train(
    cfg: Config, folder: Path, progress: Progress, alpha: float, parametrization: str, lr: float, decay: float,
    seed: int,
) -> dict[str, Any]:  # fmt: skip
    """The same seed gives every method the same initial weights and the same batches."""
    device = local_device()
    splits = data.load_splits(cfg.data, cfg.pixels, cfg.validation, cfg.train, cfg.test).to(device)
    model = build(cfg, seed).to(device)
    before = weights_of(model)
    optimizer = make_optimizer(cfg, model, alpha, parametrization, lr, decay)
    train_images(
        cfg, folder, progress, model, optimizer, splits, seed, cfg.steps, not cfg.flat,
        schedule=(lambda step: triangle(step / cfg.steps, cfg.peak)) if cfg.peak else None,
    )  # fmt: skip
    pp.fold(model)
    after = weights_of(model)
    survivors = layerwise_masks(after, SURVIVORS)
    with replacing(folder / "weights.safetensors") as file:
        generator = torch.Generator().manual_seed(seed)
        file.write(to_safetensors(pruning.sample(before, after, survivors, SAMPLED, generator)))
    with Precision(cfg.precision, device.type).autocast(device):  # pruned in four ways: half of a job's time
        curves = pruned_accuracies(cfg, model, splits)
    overlap = [layerwise_masks(after, kept).overlap(layerwise_masks(before, kept)) for kept in cfg.grid]
    return {"kept": cfg.grid, **curves, "overlap": overlap, **pruning.movement(before, after, survivors)}


def build(cfg: Config, seed: int) -> nn.Module:
    """The network with the initial weights of this seed."""
    options: dict[str, Any] = {"init": cfg.init, "generator": torch.Generator().manual_seed(seed)}
    widths = [round(cfg.width * each) for each in models.WIDTHS]
    makes: dict[str, Callable[[], nn.Module]] = {
        "lenet-300-100": lambda: models.lenet_300_100(**options),
        "conv6": lambda: models.conv6(width=cfg.width, batch_norm=cfg.batch_norm, **options),
        "fast-cifar": lambda: models.fast_cifar(widths=widths, **options),
        "resnet20": lambda: models.resnet20(**options),
    }
    layout = torch.contiguous_format if cfg.flat else torch.channels_last
    return makes[cfg.model]().to(memory_format=layout)  # type: ignore[call-overload, no-any-return]


def make_optimizer(
    cfg: Config, model: nn.Module, alpha: float, parametrization: str, lr: float, decay: float
) -> Optimizer:
    """SGD or Adam with Powerprop around it, or, in the direct form, over φ itself."""
    if parametrization == DIRECT:
        pp.reparametrize(model, alpha)
    options: dict[str, Any] = {"lr": lr, "weight_decay": cfg.weight_decay if parametrization == LASSO else decay}
    if cfg.optimiser == "adam":
        base: Optimizer = Adam(model.parameters(), **options)
    else:
        base = SGD(model.parameters(), momentum=cfg.momentum, nesterov=cfg.nesterov, **options)
    if parametrization == LASSO:
        weights = list(select(model).values())

        def pull(*_: Any) -> None:
            """Add the slope of λ|w| to every gradient, before each step."""
            for weight in weights:
                if weight.grad is not None:
                    weight.grad.add_(weight.detach().sign(), alpha=decay)

        base.register_step_pre_hook(pull)
    return pp.Powerprop(base, model, alpha, rate=cfg.rate) if parametrization == TARGETS else base


def pruned_accuracies(cfg: Config, model: nn.Module, splits: data.Splits) -> dict[str, Any]:
    """Accuracy after pruning in the first way on validation and test images, and in the others on test images."""
    parts = torch.split(splits.train.x[:SEEN], SEEN // 10)
    seen = list(parts) if cfg.flat else [data.channels_last(part) for part in parts]
    test = {"test": splits.test}
    first, *rest = cfg.prune_modes
    curves = pruning.accuracies(model, {**test, "validation": splits.validation}, cfg.grid, first, seen)
    return {**curves, "others": {mode: pruning.accuracies(model, test, cfg.grid, mode, seen)["test"] for mode in rest}}


# The choice of the learning rate, on validation images, for the baseline as for every other method.


def choose(cfg: Config, method: Method, tuning: Rows) -> Candidate:
    """The best pruned among the candidates whose dense accuracy is within `tolerance` of the best of all methods.

    If none is, the method's best dense one. (The paper chose by the dense network alone; a learning rate so high that
    it spoils the dense network can still leave one that prunes well.) The test set plays no part in it.
    """
    tried = {each: rows_of(tuning, method, each) for each in cfg.candidates(method)}
    what, accuracy = f"training for alpha = {method.alpha:g}", partial(average, of=dense)
    every = (rows_of(tuning, *pair) for pair in cfg.tried)
    top = max((accuracy(rows) for rows in every if rows and not rows.lost), default=None)
    return best(what, tried, average, dense=accuracy, tolerance=cfg.tolerance, top=top)


def dense(row: Row) -> float:
    """Validation accuracy before anything is pruned."""
    return float(row["validation"][-1])


def average(rows: Rows, of: Callable[[Row], float] = lambda row: fmean(row["validation"])) -> float:
    """Validation accuracy, by default averaged over the whole grid, the dense network included; mean over the seeds."""
    return fmean(rows.values(of))


def rows_of(rows: Rows, method: Method, candidate: Candidate) -> Rows:
    """The trainings of a method with a candidate."""
    return rows.where(**method._asdict(), **candidate._asdict())


# The page.


@dataclass(frozen=True)
class MethodRows:
    """A method with a candidate, and its seeds; the lesser of two forms of the same power is drawn plain."""

    cfg: Config
    method: Method
    candidate: Candidate
    rows: Rows

    @property
    def rival(self) -> bool:
        """True for ordinary weights under a penalty λ|w|."""
        return self.method.parametrization == LASSO

    @property
    def plain(self) -> bool:
        """How it is drawn."""
        return self.rival or (self.method.parametrization == DIRECT and len(self.cfg.parametrization) > 1)

    @property
    def label(self) -> str:
        """The method in words."""
        alpha, form = self.method
        if self.rival:
            return RIVAL
        if self.cfg.optimiser == "sgd":
            return "baseline (α = 1)" if alpha == 1 else f"α = {alpha:g}"
        way = {TARGETS: "through virtual targets", DIRECT: "on φ directly"}[form]
        return "Adam (α = 1)" if alpha == 1 else f"Adam {way} (α = {alpha:g})"

    @property
    def settings(self) -> str:
        """The candidate in words."""
        lr, decay = self.candidate
        if self.rival:
            return f"λ = {decay:g}"
        return f"lr {lr:g}" + (f", decay {decay:g}" if self.cfg.decays else "")

    @property
    def score(self) -> float | None:
        """By which the candidate is chosen; nothing of one that diverged."""
        return None if self.rows.lost else average(self.rows)

    @property
    def dense_score(self) -> float | None:
        """The same of the dense network alone."""
        return None if self.rows.lost else average(self.rows, dense)

    def at(self, points: Iterable[int]) -> Mean:
        """The test accuracy, averaged over some points of the grid."""
        return Mean.of(self.rows.values(lambda row: fmean(row["test"][i] for i in points)))

    @property
    def band(self) -> Mean:
        """The same over the points of the band."""
        return self.at(self.cfg.band_points)

    @property
    def dense(self) -> Mean:
        """The same before anything is pruned."""
        return self.at([-1])

    def curve(self, of: str | Callable[[Any], list[float]]) -> Curve:
        """A number of each seed at every point of the grid."""
        return Curve(self.label, self.method.alpha, self.cfg.grid, self.rows.values(of), plain=self.plain)


def main(cfg: Config, run: Run, story: Story) -> Page:
    """Tune, train all seeds with what was chosen, and say what was found."""
    run.prepare(lambda: find_data(cfg))
    tuned = len(cfg.lrs) > 1 or len(cfg.lassos) > 1
    tried = [(method, each) for method, each in cfg.tried if cfg.chooses(method)]
    tuning = run.map(train, jobs(tried, cfg.tuning_seeds)) if tuned else Rows()
    own = {method: choose(cfg, method, tuning) for method in cfg.methods if cfg.chooses(method)}
    chosen = {method: own.get(method) or own[Method(1.0, TARGETS)] for method in cfg.methods}
    final = run.map(train, jobs(chosen.items(), cfg.seeds))
    measured = [MethodRows(cfg, method, each, rows_of(final, method, each)) for method, each in chosen.items()]
    measured = [m for m in measured if m.rows.finished]
    sections = [accuracy_section(cfg, measured), *modes_section(cfg, measured), overlap_section(measured)]
    sections.append(weights_section(measured))
    if len(cfg.lrs) > 1:
        every = Rows({row.folder: row for row in [*tuning, *final]}.values())
        sections += [tuning_section(cfg, tuning, measured), frontier_section(cfg, every)]
    intro = f"{story.intro}\n\nThis run: {extent(cfg)}."
    if cfg.parametrization == (DIRECT,):
        intro += (
            " α > 1 is trained on φ directly, so that weight decay is one of φ, a penalty of |w|^(2/α): weights that "
            "nothing holds go to zero, where a decay of w leaves small ones as they are."
        )
    intro += "" if cfg == story.full else f" In full (preset `paper`): {extent(story.full)}."
    return Page(story.title, intro, sections, story.paper, *verdict_of(measured, story.printed))


def jobs(pairs: Iterable[tuple[Method, Candidate]], seeds: int) -> list[dict[str, Any]]:
    """The settings of trainings: methods with candidates, from every seed."""
    return [{**method._asdict(), **each._asdict(), "seed": seed} for method, each in pairs for seed in range(seeds)]


def extent(cfg: Config) -> str:
    """The network and how much of a training it gets, for a reader who will compare it with the paper."""
    width = f" with {cfg.width:g} times the channels" if cfg.width != 1 else ""
    trained = f" of the first {cfg.train:,}" if cfg.train else ""
    passes = f", passes in {cfg.precision}" if cfg.precision != "float32" else ""
    return f"{cfg.model}{width}, {cfg.steps:,} steps of {cfg.batch} images{trained}, {cfg.runs}, {cfg.tested}{passes}"


def accuracy_section(cfg: Config, measured: Sequence[MethodRows]) -> Section:
    """Accuracy against weights kept: a figure, and a table with a few fractions and the mean over the band."""
    at = sorted({int(np.argmin(np.abs(np.log(cfg.grid) - np.log(kept)))) for kept in COLUMNS_AT}, reverse=True)
    lost = sum(m.rows.lost for m in measured)
    shown = table(
        "Accuracy against weights kept",
        [
            ("", lambda m: m.label), ("lr", lambda m: f"{m.candidate.lr:g}"),
            *([("decay", lambda m: f"{m.candidate.decay:g}")] if cfg.decays else []),
            (Percent("dense", "max", 2), lambda m: m.dense),
            *((Percent(f"{cfg.grid[i]:.1%} kept", "max"), partial(MethodRows.at, points=[i])) for i in at),
            (Percent(f"{percents(cfg.band)} kept", "max"), lambda m: m.band),
        ],
        measured,
        "Test accuracy in percent after one-shot pruning, without retraining; ranges are means over the grid."
        + (f" {lost} runs diverged." if lost else ""),
    )  # fmt: skip
    title = "Accuracy after one-shot pruning"
    text = (
        "Each network is trained densely, then the weights of smallest magnitude are set to zero, once, without any "
        f"training afterwards: {pruning.described(cfg.prune_modes[0])}."
    )
    caption = "Mean over the seeds, band of one standard deviation. The headline averages over the shaded range."
    curves = [m.curve("test") for m in measured]
    picture = Figure("accuracy", pruning_curves, curves, title=title, highlight=cfg.band, caption=caption)
    return Section(title, text, [picture], [shown])


def percents(band: tuple[float, float]) -> str:
    """A range of weights kept."""
    return f"{100 * band[0]:g}–{100 * band[1]:g}%"


def modes_section(cfg: Config, measured: Sequence[MethodRows]) -> list[Section]:
    """The same networks pruned in the other ways: a figure each, and the mean over two ranges of weights kept."""
    first, *others = cfg.prune_modes
    if not others:
        return []
    curves = [(first, m.curve("test")) for m in measured]
    curves += [(mode, m.curve(lambda row: row["others"][mode])) for mode in others for m in measured]  # noqa: B023
    figures = [
        Figure(
            f"accuracy-{mode.replace(' ', '-')}", pruning_curves, [curve for each, curve in curves if each == mode],
            title=f"Pruned {mode}", caption=f"{pruning.described(mode).capitalize()}.",
        )
        for mode in others
    ]  # fmt: skip
    means: Columns = [(Percent(f"{percents(each)} kept", "max"), partial(mean_inside, cfg, each)) for each in RANGES]
    columns: Columns = [("", lambda pair: f"{pair[0]}: {pair[1].label}"), *means]
    text = (
        "What a pruned network answers depends on how it was pruned as much as on how it was trained: one ranking of "
        "all layers leaves more where it matters, and statistics of batch norms that fit the pruned network restore "
        "much of what seemed lost. The networks, and their learning rates, are those of the figure above."
    )
    return [Section("Pruned in other ways", text, figures, [table("Test accuracy by way of pruning", columns, curves)])]


def mean_inside(cfg: Config, band: tuple[float, float], curve: tuple[str, Curve]) -> Mean:
    """The mean of a curve over a range of weights kept."""
    return Mean.of(curve[1].runs[:, inside(cfg.grid, band)].mean(axis=1))


def overlap_section(measured: Sequence[MethodRows]) -> Section:
    """Figure 2b."""
    curves, title = [m.curve("overlap") for m in measured], "Overlap of the masks before and after training"
    picture = Figure("overlap", pruning_curves, curves, title=title, ylabel="overlap of the two masks")
    text = (
        "The fraction of the weights kept after training that pruning at initialisation would have kept too. "
        "At 100% small weights could never escape pruning."
    )
    return Section("Do small weights still get a chance?", text, [picture])


def weights_section(measured: Sequence[MethodRows]) -> Section:
    """Figures 2c and 2d for the baseline and the power nearest to the paper's α = 4, and the numbers for all."""
    base = [m for m in measured if m.method.alpha == 1][:1]
    powers = [m for m in measured if m.method.alpha > 1 and not m.plain]
    shown = base + sorted(powers, key=lambda m: abs(m.method.alpha - 4))[:1]
    drawn = {m.label: load_file(m.rows.finished[0].file("weights.safetensors")) for m in shown}
    limit = max(float(np.quantile(np.abs(w[name]), 0.999)) for w in drawn.values() for name in ("before", "after"))
    pictures = [
        Figure(
            f"weights-alpha{m.method.alpha:g}", weight_change, *drawn[m.label].values(), title=m.label, limit=limit,
            caption=f"Weights drawn at random from the first seed, {m.label}.",
        )
        for m in shown
    ]  # fmt: skip
    names = {
        "sign_changes": "sign changed", "sign_changes_of_survivors": "sign changed, survivors",
        "near_zero_before": "|w| < 0.001 before", "near_zero_after": "|w| < 0.001 after",
    }  # fmt: skip
    columns = [(Percent(title), partial(lambda name, m: m.rows.mean(name), name)) for name, title in names.items()]
    text = f"Survivors are the weights kept when the trained network is pruned to {SURVIVORS:.0%}."
    numbers = table("Weights", [("", lambda m: m.label), *columns], measured, "In percent.")
    return Section("What training does to the weights", text, pictures, [numbers])


def tuning_section(cfg: Config, tuning: Rows, measured: Sequence[MethodRows]) -> Section:
    """What every candidate came to on the validation images, and which was chosen."""
    chosen = {m.method: m.candidate for m in measured if cfg.chooses(m.method)}
    every = [MethodRows(cfg, *pair, rows_of(tuning, *pair)) for pair in cfg.tried if pair[0] in chosen]
    kept = {m.method: m.score or 1.0 for m in every if m.candidate == chosen[m.method]}

    def mark(m: MethodRows) -> str:
        return "chosen" if m.candidate == chosen[m.method] else "diverged" if m.rows.lost else ""

    columns: Columns = [
        ("", lambda m: m.label), ("candidate", lambda m: m.settings),
        (Percent("mean over the grid", digits=2), lambda m: m.score),
        (Percent("dense", digits=2), lambda m: m.dense_score), ("", mark),
    ]  # fmt: skip
    text = (
        f"The learning rate{' and the decay' if cfg.decays else ''} of each row, the baseline included, is chosen on "
        f"the last {cfg.validation:,} training images, which are not trained on: among the candidates whose dense "
        f"accuracy is within {100 * cfg.tolerance:g} points of the best of the table (or, if none is, the row's most "
        "accurate), the one with the best accuracy averaged "
        f"over the whole grid of {cfg.points} fractions kept, the dense network included, and over {cfg.tuning_seeds} "
        f"tuning {'seed' if cfg.tuning_seeds == 1 else 'seeds'}. The test images play no part in any choice."
    )
    if cfg.magnitude:
        decays = " and decays" if cfg.decays else ""
        size = f"a weight of size {cfg.magnitude:g}"
        text += f" The candidates of a power are such that {size} learns{decays} equally fast."
    if len(chosen) < len(measured):
        text += " Powers that are not here have what is chosen for α = 1."
    better = [f"{m.label} with {m.settings}" for m in every if (m.score or 0.0) > kept[m.method]]
    if better:
        text += f"\n\nPassed over for their dense accuracy, though they prune better: {', '.join(better)}."
    return Section("Choice of the learning rate", text, (), [table("Validation score", columns, every)])


def frontier_section(cfg: Config, every: Rows) -> Section:
    """One point for each power and learning rate: what a network knows dense, and what is left of it when pruned."""
    points, lost = [], []
    for m in (MethodRows(cfg, *pair, rows_of(every, *pair)) for pair in cfg.tried):
        power = "L1" if m.rival else f"α = {m.method.alpha:g}"
        name = f"{power}, {m.candidate.lr:g}" + (f", {m.candidate.decay:g}" if cfg.decays else "")
        points += [Point(name, 100 * m.dense.mean, m.band, m.method.alpha)] if m.rows.finished else []
        lost += [f"{name} ({m.rows.lost} of {len(m.rows)})"] if m.rows.lost else []
    least = max((point.x for point in points), default=0.0) - 100 * TRAINED
    weak = [f"{point.method} ({point.x:.1f}%)" for point in points if point.x < least]
    text = (
        f"Every power with every learning rate that was tried, chosen or not, named by the two"
        f"{' and by the decay' if cfg.decays else ''}. Where a point of α > 1 lies above and to the right of the "
        "hollow ones, Powerpropagation has moved the frontier. Rates that were not chosen have n = "
        f"{cfg.tuning_seeds}."
    )
    text += f" Seeds that diverged are left out: {'; '.join(lost)}." if lost else ""
    below = f"Not drawn, more than {100 * TRAINED:g} points below the best dense accuracy"
    text += f" {below}: {'; '.join(weak)}." if weak else ""
    picture = Figure(
        "frontier", scatter, [point for point in points if point.x >= least],
        title="Dense accuracy against accuracy when pruned", xlabel="dense test accuracy (%)",
        ylabel=f"test accuracy, {percents(cfg.band)} of the weights kept", percent=True,
    )  # fmt: skip
    return Section("What a learning rate buys", text, [picture] if points else [])


def verdict_of(measured: Sequence[MethodRows], printed: str) -> tuple[list[Stat], Headline | None, dict[str, float]]:
    """The numbers at the top: of the power that scores best on validation images, and of the baseline.

    The largest gain, which the paper speaks of, and the mean over the band.
    """
    base = next((m for m in measured if m.method.alpha == 1), None)
    powers = [m for m in measured if m.method.alpha > 1]
    if base is None or not powers:
        return [], None, {}
    best = max(powers, key=lambda m: average(m.rows))
    gains, band = best.curve("test").mean - base.curve("test").mean, percents(base.cfg.band)
    peak, kept = 100 * float(gains.max()), base.cfg.grid[int(gains.argmax())]
    gain, *rivals = (each.band.mean - base.band.mean for each in (best, *(m for m in measured if m.rival)))
    stats = [
        Stat("gain over the baseline", f"{100 * gain:+.1f} points", f"mean over {band} of the weights kept"),
        Stat("largest gain", f"{peak:+.1f} points", f"at {kept:.1%} kept"),
        *(Stat(m.label, f"{m.band.mean:.1%}", f"dense {m.dense.mean:.2%}") for m in (best, base)),
    ]
    what = f"{best.label} against {base.label}: largest gain in test accuracy"
    what += f", and the mean over {band} of the weights kept"
    here = f"{peak:+.1f} points at {kept:.1%}; mean {100 * gain:+.1f}"
    here += "".join(f" ({RIVAL}: {100 * each:+.1f})" for each in rivals)
    return stats, Headline(what, here, printed), {"gain": gain}


SHOWN = "shown in a figure, no value printed"
STORIES = {
    "mnist-oneshot": Story(
        "One-shot pruning of LeNet-300-100 on MNIST",
        "Section 3, figure 2 a–d. The paper shows these results as figures and prints no values.",
        "Powerpropagation trains the weights as `w = φ|φ|^(α-1)`: what is large grows, what is small stays small. "
        "Networks trained this way keep their accuracy at sparsities where ordinary ones (α = 1) collapse.",
        MNIST["paper"], SHOWN,
    ),
    "mnist-optimisers": Story(
        "Powerpropagation with Adam on MNIST",
        "Appendix A. The paper shows one figure and prints no values; it finds virtual targets best, Adam on φ "
        "directly next, and plain Adam last.",
        "Adam divides each gradient by a running estimate of its size. Applied to φ directly that undoes part of "
        "Powerpropagation's effect; applied to the effective weights, with the step handed on to φ (virtual "
        "targets), it does not.", OPTIMISERS["paper"], SHOWN,
    ),
    "cifar-oneshot": Story(
        "One-shot pruning on CIFAR-10",
        "Section 5.1, figure 3a. The paper reports gains of up to 33 points at some sparsities, for the whole "
        "network and 100,000 steps.",
        "The protocol of the MNIST experiment on natural images: dense training, then magnitude pruning once, "
        "without retraining.", CIFAR["paper"], "gains of up to 33 points (whole network, 100,000 steps)",
    ),
}  # fmt: skip
AFTER = "after one-shot pruning"
EXPERIMENTS = {
    name: Experiment(name, title, paper, presets, partial(main, story=STORIES[name]))
    for name, title, paper, presets in (
        ("mnist-oneshot", f"accuracy of LeNet-300-100 against weights kept, {AFTER}", "figure 2 a–d, section 3", MNIST),
        (
            "mnist-optimisers",
            f"Adam alone, on φ directly and through virtual targets, {AFTER}",
            "appendix A",
            OPTIMISERS,
        ),
        ("cifar-oneshot", f"accuracy on CIFAR-10 against weights kept, {AFTER}", "figure 3a, section 5.1", CIFAR),
    )
}  # fmt: skip
