"""Every method of the paper's table 1, with and without Powerprop: the table, extended training, extreme sparsity.

Rows are methods, columns are sparsities with their distribution. All methods share the network, the batches, the
optimiser (SGD with momentum, cosine schedule) and the number of steps; the learning rate of each is chosen on
validation images at one sparsity, over all seeds of the rates that come near the best. The rules for single layers are
the paper's: a first convolution stays dense and the last layer at most 80% sparse, except under ERK. The paper's own
table is of ResNet-50 on ImageNet (experiment `imagenet`); here the same methods are trained where two cores can do it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

import powerprop as pp
from powerprop.allocate import Layers, at_most
from powerprop_paper import data, models
from powerprop_paper.experiments import ImageSettings, listed, table, train_images
from powerprop_paper.pages import Figure, Headline, Page, Percent, Section, Stat, Table, Value
from powerprop_paper.pruning import SEEN
from powerprop_paper.report import Mean, lines
from powerprop_paper.run import Experiment, Progress, Rows, Run
from powerprop_paper.settings import Below1, Count, NonNegative
from powerprop_paper.sparse_methods import METHODS, ONESHOT, UNPRUNED, parse
from powerprop_paper.sparse_tables import (
    TWINS,
    SparseSettings,
    against_sparsity,
    cell,
    check_method,
    cost_figure,
    cost_table,
    curve,
    exactness,
    job,
    methods_table,
    sparsity_figure,
    title_of,
    weights_and_cost,
)
from powerprop_paper.train import evaluate, local_device, read_metrics

MOMENTUM = 0.9
NEAR = 0.003
"""A rate within this validation accuracy of the best gets all seeds: one run and one validation set judge noisily."""

# Settings.


class Problem(NamedTuple):
    """A data set with the network that learns it, and the length of a training that is not shortened."""

    data: str
    label: str
    build: Callable[..., nn.Module]
    rules: Layers
    convolutions: bool
    full_steps: int


PROBLEMS = {
    "mnist": Problem(
        "mnist", "LeNet-300-100 on MNIST", models.lenet_300_100, {"fc3.weight": at_most(0.8)}, False, 32_000
    ),
    "cifar10": Problem(
        "cifar10", "ResNet-20 on CIFAR-10", models.resnet20, {"conv1.weight": 0.0, "fc.weight": at_most(0.8)}, True,
        64_000,
    ),
    "fast-cifar": Problem(
        "cifar10", "a network made for speed (`models.fast_cifar`) on CIFAR-10", models.fast_cifar,
        {"stem.weight": 0.0, "fc.weight": at_most(0.8)}, True, 3_600,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(ImageSettings, SparseSettings):
    """The settings of a sparse-training table."""

    task: Literal["mnist", "cifar10", "fast-cifar"]
    """LeNet-300-100, ResNet-20, or CIFAR-10 with a network made for speed"""
    extended: tuple[str, ...] = ()
    """the methods of the extended-training table"""
    cycles: tuple[Count, ...] = ()
    """of each of its trainings, at `tune_at`"""
    clip: NonNegative = 0.0
    """largest norm of the gradient; 0 leaves it as it is. A filter with a few weights, on channels that have died,
    gives a constant: its batch norm divides by almost nothing and magnifies the gradient of the others"""
    warmup: Below1 = 0.0
    """the fraction of the steps in which the learning rate rises linearly to its full value"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.extended:
            check_method(name)


LEFT_OUT = (
    "pp-dense", "one-shot", "pp-one-shot", *(f"pp-{m}" for m in ("static", "snip", "set", "dsr", "snfs", "rigl"))
)  # fmt: skip
TABLE = ("uniform 0.8", "uniform 0.9", "uniform 0.95", "uniform 0.98", "uniform 0.99", "erk 0.8", "erk 0.9")
PAIR = ("rigl", "pp-topkast-0")

DEFAULTS: dict[str, Any] = {"batch": 100, "weight_decay": 1e-4}
MNIST = {
    "smoke": Config(
        **DEFAULTS, task="mnist", methods=("dense", "static", "rigl", "pp-topkast-50", "pp-iterative", "pp-one-shot"),
        sparsities=("uniform 0.9", "erk 0.9"), alpha=2.0, lrs=(0.05,), tune_at="uniform 0.9", seeds=2, steps=20,
        cycles=(2,), extended=("rigl",), train=600, validation=300, test=300, checkpoint_every=10,
    ),
    "cpu": Config(
        task="mnist", methods=tuple(name for name in METHODS if name not in LEFT_OUT),
        sparsities=("uniform 0.95", "uniform 0.98", "uniform 0.99"), alpha=1.5, lrs=(0.05, 0.1, 0.2, 0.4),
        tune_at="uniform 0.98", seeds=3, steps=10_000, batch=100, weight_decay=5e-4, topkast_every=1, regrow_every=25,
    ),
    "paper": Config(
        **DEFAULTS, task="mnist", methods=tuple(METHODS), sparsities=TABLE, alpha=1.375, lrs=(0.05, 0.1, 0.2, 0.4),
        rate="paper", tune_at="uniform 0.98", seeds=3, steps=PROBLEMS["mnist"].full_steps, cycles=(2, 3, 5),
        extended=PAIR,
    ),
}  # fmt: skip

CIFAR = {
    "smoke": Config(
        task="fast-cifar", methods=("dense", "pp-topkast-0"), sparsities=("uniform 0.9",), alpha=1.5, lrs=(0.1,),
        tune_at="uniform 0.9", seeds=1, steps=2, batch=8, weight_decay=1e-4, train=64, validation=32, test=32,
        checkpoint_every=1, nesterov=True, label_smoothing=0.1, shift=2, precision="bfloat16", clip=3.0,
    ),
    "cpu": Config(
        task="fast-cifar",
        methods=(
            "dense", "static", "snip", "set", "rigl", "snfs", "dsr", "iterative", "pp-iterative", "topkast-0",
            "pp-topkast-0",
        ),
        sparsities=("uniform 0.9", "uniform 0.95", "uniform 0.98"), alpha=1.5, lrs=(0.2, 0.4),
        tune_at="uniform 0.95", seeds=2, steps=1_800, batch=125, nesterov=True, weight_decay=5e-4, clip=3.0,
        label_smoothing=0.1, shift=2, precision="bfloat16", checkpoint_every=180, warmup=0.2, topkast_every=1,
        topkast_decay=1e-3, regrow_every=25,
    ),
    "paper": Config(
        task="cifar10", methods=tuple(METHODS), sparsities=TABLE, alpha=1.375, lrs=(0.05, 0.1, 0.2), rate="paper",
        tune_at="uniform 0.95", seeds=3, steps=PROBLEMS["cifar10"].full_steps, batch=128, weight_decay=5e-4, shift=4,
        warmup=0.05, topkast_every=100, cycles=(2, 3, 5), extended=PAIR,
    ),
}  # fmt: skip


# One job: train a method at one sparsity, and measure it.


def train(
    cfg: Config, folder: Path, progress: Progress, method: str, target: str, lr: float, cycles: int, seed: int
) -> dict[str, Any]:
    """The same seed gives every method the same initial weights and the same batches."""
    device, problem, steps = local_device(), PROBLEMS[cfg.task], cfg.steps * cycles
    splits = load_splits(cfg).to(device)
    model = problem.build(generator=torch.Generator().manual_seed(seed)).to(device)
    if problem.convolutions:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = make_optimizer(cfg, model, method, target, lr, seed, steps)
    train_images(
        cfg, folder, progress, model, optimizer, splits, seed, steps, problem.convolutions, clip=cfg.clip or None,
        schedule=lambda step: rate(step / steps, cfg.warmup),
    )  # fmt: skip
    masks = prune_at_once(cfg, model, target, splits) if METHODS[method].kind == ONESHOT else optimizer.active
    return measure(cfg, model, optimizer, masks, splits, method, target)


def load_splits(cfg: Config) -> data.Splits:
    """Training, validation and test images as floats; CIFAR's standardised."""
    problem = PROBLEMS[cfg.task]
    pixels = "standard" if problem.convolutions else "unit"
    return data.load_splits(problem.data, pixels, cfg.validation, cfg.train, cfg.test)


def layer_rules(cfg: Config, distribution: str) -> Layers:
    """A first convolution stays dense, the last layer at most 80% sparse; ERK prunes them too (appendix C)."""
    return {} if distribution == "erk" else PROBLEMS[cfg.task].rules


def make_optimizer(
    cfg: Config, model: nn.Module, method: str, target: str, lr: float, seed: int, steps: int
) -> pp.Powerprop:
    """SGD with momentum, the method and its α."""
    options: dict[str, Any] = {"momentum": MOMENTUM, "weight_decay": cfg.weight_decay, "nesterov": cfg.nesterov}
    base, rules = torch.optim.SGD(model.parameters(), lr, **options), layer_rules(cfg, parse(target)[0])
    return cfg.sparsified(base, model, method, target, steps, rules, seed, rate=cfg.rate)


def rate(done: float, warmup: float) -> float:
    """The learning rate when a fraction of the training is done: a linear rise, and the fall of a cosine over it."""
    rising = min(1.0, done / warmup) if warmup else 1.0
    return rising * (1 + math.cos(math.pi * done)) / 2


def prune_at_once(cfg: Config, model: nn.Module, target: str, splits: data.Splits) -> pp.Masks:
    """Prune a dense network after its training, and measure the statistics of its batch norms again."""
    distribution, sparsity = parse(target)
    masks = pp.prune(model, sparsity, distribution, layer_rules(cfg, distribution))
    pp.recalibrate(model, torch.split(splits.train.x[:SEEN], SEEN // 10))
    return masks


def measure(
    cfg: Config, model: nn.Module, optimizer: pp.Powerprop, masks: pp.Masks, splits: data.Splits, method: str,
    target: str,
) -> dict[str, Any]:  # fmt: skip
    """Accuracies, the weights kept and asked for, and FLOPs relative to dense training."""
    shape, rules = tuple(splits.test.x.shape[1:]), layer_rules(cfg, parse(target)[0])
    return {
        "test": evaluate(model, *splits.test, batch=data.AT_ONCE).accuracy,
        "validation": evaluate(model, *splits.validation, batch=data.AT_ONCE).accuracy,
        **weights_and_cost(model, shape, optimizer, masks, method, target, rules),
    }


# The choice of the learning rates, in two rounds, and the table.


def main(cfg: Config, run: Run) -> Page:
    """One run of each method at each candidate rate; all seeds of those near the best; the table at the chosen ones."""
    run.prepare(lambda: data.load(PROBLEMS[cfg.task].data).split_validation(cfg.validation))
    names, seeds = list(dict.fromkeys((*cfg.methods, *cfg.extended))), range(cfg.seeds)
    candidates = [(name, lr) for name in names for lr in cfg.lrs]
    first = run.map(train, [job(name, cfg.tune_at, lr, 0, cycles=1) for name, lr in candidates])
    tried = [(name, lr) for name in names for lr in finalists(first.where(method=name))]
    final = run.map(train, [job(name, cfg.tune_at, lr, seed, cycles=1) for name, lr in tried for seed in seeds])
    lrs = {name: choose(final.where(method=name)) for name in names}
    cells = [(name, target, 1) for name in cfg.methods for target in cfg.sparsities]
    cells += [(name, cfg.tune_at, cycles) for name in cfg.extended for cycles in (1, *cfg.cycles)]
    rows = run.map(
        train, [job(n, target, lrs[n], seed, cycles=cycles) for n, target, cycles in cells for seed in seeds]
    )
    return page(cfg, rows, lrs)


def score(tried: Rows) -> float:
    """Mean validation accuracy; nothing for a run that diverged."""
    return fmean(0.0 if row.lost else row["validation"] for row in tried)


def finalists(first: Rows) -> list[float]:
    """The rates of a method whose first seed comes near the best."""
    scores = {lr: score(rows) for lr, rows in first.by("lr").items()}
    return [lr for lr in scores if scores[lr] >= max(scores.values()) - NEAR]


def choose(final: Rows) -> float:
    """The finalist with the best mean validation accuracy over the seeds."""
    tried = final.by("lr")
    return float(max(tried, key=lambda lr: score(tried[lr])))


# The page.

PAIRS = (
    ("rigl", "static"),
    ("pp-topkast-0", "topkast-0"),
    ("pp-topkast-50", "topkast-50"),
    ("pp-iterative", "iterative"),
    ("pp-one-shot", "one-shot"),
)
"""Comparisons that the paper makes: the first is expected to be the better."""
DRAWN = ("dense", "static", "rigl", "iterative", "topkast-0", "pp-iterative", "pp-topkast-0")
"""The methods whose training is drawn: more could not be told apart."""
AGAINST_SPARSITY = ("static", "set", "rigl", "iterative", "topkast-0", "pp-iterative", "pp-topkast-0")
FAR = 0.05
"""A method that falls by more than this below all others would hide their differences."""
PAPER = (
    "Tables 1 and 2 and the extreme-sparsity figure of section 5.2 are of ResNet-50 on ImageNet; their values stand "
    "in the report of `imagenet`. The paper finds RigL above Static, and Powerprop above the method alone for Top-KAST "
    "and Iterative pruning, at every sparsity."
)
PRINTED = "+1.5 points at 95% (72.1 against 70.6, ResNet-50 on ImageNet)"
DUELS = "The two of a pair share initial weights and batches, seed by seed; a positive difference is as expected."


def page(cfg: Config, every: Rows, lrs: dict[str, float]) -> Page:
    """What the run says of the methods with their chosen rates."""
    rows, problem = every.where(cycles=1), PROBLEMS[cfg.task]
    costs = cost_figure(cfg, rows, cfg.methods, "Accuracy", ylabel="test accuracy", percent=True)
    sections = [
        Section(
            "Test accuracy", "", [*accuracy_figure(cfg, rows), *costs], [main_table(cfg, rows), cost_table(cfg, rows)]
        ),
        Section("Who beats whom", DUELS, tables=[duels(cfg, rows)]),
        Section("During training", "", [each for target in cfg.uniform for each in during_training(cfg, rows, target)]),
        exactness(cfg, rows),
        *([Section("Extended training", tables=[extended(cfg, every)])] if cfg.extended else []),
        Section("Learning rates", about_rates(cfg), tables=[
            table("Chosen", [("method", lambda name: METHODS[name].label), ("learning rate", lrs.get)], lrs)
        ]),
    ]  # fmt: skip
    short = f" (shortened: a full training has {problem.full_steps:,})" if cfg.steps < problem.full_steps else ""
    often = f"every {cfg.topkast_every} steps" if cfg.topkast_every > 1 else "after every step"
    clip = f" Gradients are clipped to a norm of {cfg.clip:g}." if cfg.clip else ""
    intro = (
        "Every method starts from the same weights and sees the same batches.\n\n"
        f"This run: {problem.label}, α = {cfg.alpha:g}, {cfg.steps:,} steps of {cfg.batch} images{short}, {cfg.seeds} "
        f"seed(s), {cfg.tested}. Top-KAST chooses its masks anew {often}.{clip}"
    )
    return Page(f"Sparse training: {cfg.task}", intro, sections, PAPER, stats(cfg, rows), headline(cfg, rows))


def accuracy(found: Rows) -> Mean | str:
    """Mean test accuracy and standard deviation over the seeds that did not diverge."""
    return found.mean("test") or "diverged"


def accuracy_figure(cfg: Config, rows: Rows) -> list[Figure]:
    """Accuracy against sparsity, uniform distribution.

    Where Static falls so far that beside it the others could not be told apart, it stands in the table alone.
    """
    curves = against_sparsity(cfg, rows, [name for name in AGAINST_SPARSITY if name in cfg.methods])
    others, caption = [each.mean.min() for method, each in curves.items() if method != "static"], TWINS
    if "static" in curves and others and curves["static"].mean.min() < min(others) - FAR:
        del curves["static"]
        caption += " Static is far below and stands in the table alone."
    return sparsity_figure(curves, "accuracy", caption, ylabel="test accuracy", percent=True)


def during_training(cfg: Config, rows: Rows, target: str) -> list[Figure]:
    """Validation accuracy during training."""
    curves = []
    for method in (name for name in DRAWN if name in cfg.methods):
        for row in cell(rows, method, target).where(seed=0).finished:
            measured = [each for each in read_metrics(row.file("metrics.jsonl")) if "accuracy" in each]
            curves.append(curve(method, [m["step"] for m in measured], [m["accuracy"] for m in measured]))
    sparsity = parse(target)[1]
    labels = {"title": f"Training at {sparsity:.0%} sparsity", "xlabel": "step", "ylabel": "validation accuracy"}
    options: dict[str, Any] = {"caption": f"First seed, at the chosen rate. {TWINS}", "percent": True, "wide": True}
    return [Figure(f"training-{100 * sparsity:g}", lines, curves, **labels, **options)] if curves else []


def main_table(cfg: Config, rows: Rows) -> Table:
    """Accuracies; dense networks have a column of their own."""
    dense = {UNPRUNED: Percent("dense", digits=2)} if cfg.sparse != list(cfg.methods) else {}
    columns = dense | {target: Percent(title_of(target), "max", 2) for target in cfg.sparsities}

    def value(target: str, name: str) -> Value:
        return accuracy(cell(rows, name, target)) if METHODS[name].dense == (target == UNPRUNED) else None

    return methods_table("Test accuracy by method and sparsity", cfg.methods, columns, value, "Percent.")


def duels(cfg: Config, rows: Rows) -> Table:
    """first - second of every pair at every sparsity."""

    def value(target: str) -> Callable[[tuple[str, str]], Value]:
        return lambda pair: difference(*(cell(rows, each, target) for each in pair)) or "diverged"

    pairs = [pair for pair in PAIRS if {*pair} <= {*cfg.methods}]
    columns = [(Percent(title_of(target), digits=2), value(target)) for target in cfg.sparsities]
    name = ("", lambda pair: " - ".join(METHODS[each].label for each in pair))
    return table("Differences", [name, *columns], pairs, "Points of test accuracy, the first less the second.")


def difference(first: Rows, second: Rows) -> Mean | None:
    """The mean difference over the seeds in which neither diverged: the two share initial weights and batches."""
    others = {row["seed"]: row["test"] for row in second.finished}
    found = [row["test"] - others[row["seed"]] for row in first.finished if row["seed"] in others]
    return Mean.of(found) if found else None


def extended(cfg: Config, rows: Rows) -> Table:
    """More cycles at the sparsity of the choice."""
    columns = {length: Percent(f"{length}x", "max", 2) for length in (1, *cfg.cycles)}
    caption = f"Test accuracy in percent at {title_of(cfg.tune_at)} sparsity, training scaled as a whole."
    return methods_table(
        "Extended training", cfg.extended, columns,
        lambda length, name: accuracy(cell(rows, name, cfg.tune_at, cycles=length)), caption,
    )  # fmt: skip


def about_rates(cfg: Config) -> str:
    """How the rates were chosen."""
    tried = listed(cfg.lrs)
    return (
        f"Each method's rate is the one of {tried} with the best validation accuracy at {title_of(cfg.tune_at)} "
        f"sparsity: one seed of all, then all seeds of those within {100 * NEAR:g} points of the best. The test images "
        "play no part in it."
    )


def stats(cfg: Config, rows: Rows) -> list[Stat]:
    """The best method at each of the highest sparsities."""
    tiles = []
    for target in cfg.sparsities[-4:]:
        means = {name: found for name in cfg.sparse if (found := cell(rows, name, target).mean("test"))}
        if means:
            best = max(means, key=lambda name: means[name].mean)
            tiles.append(Stat(f"best at {title_of(target)}", f"{means[best].mean:.2%}", METHODS[best].label))
    return tiles


def headline(cfg: Config, rows: Rows) -> Headline | None:
    """What Powerprop adds to iterative pruning at the highest uniform sparsity."""
    target = max(cfg.uniform, key=lambda each: parse(each)[1], default=None)
    if target is None:
        return None
    ours, alone = (cell(rows, name, target).mean("test") for name in ("pp-iterative", "iterative"))
    if ours is None or alone is None:
        return None
    what = f"Powerprop + Iterative pruning against Iterative pruning, test accuracy at {title_of(target)} sparsity"
    gain, both = 100 * (ours.mean - alone.mean), f"{100 * ours.mean:.2f} against {100 * alone.mean:.2f}"
    return Headline(what, f"{gain:+.2f} points ({both})", PRINTED)


EXPERIMENTS = {
    name: Experiment(name, title, "tables 1 and 2, extreme-sparsity figure, section 5.2", presets, main)
    for name, title, presets in (
        ("sparse-training", "every sparse-training method on MNIST, LeNet-300-100", MNIST),
        ("sparse-training-cifar", "every sparse-training method on CIFAR-10, a network made for speed", CIFAR),
    )
}
