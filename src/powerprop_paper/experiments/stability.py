"""Where does a power diverge at a rate at which the plain optimiser trains? `rate-stability`, beyond the paper.

For each network and optimiser the learning rate is chosen for α = 1, on validation data. Every power is then trained
with matched rates at that rate and at three times of it, or at a third, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import powerprop as pp
from powerprop.select import select
from powerprop_paper import data, models
from powerprop_paper.data import Windows
from powerprop_paper.experiments import language
from powerprop_paper.experiments.language import LanguageSettings
from powerprop_paper.pages import Column, Headline, Page, Section, Table, Value
from powerprop_paper.run import Experiment, Progress, Rows, Run, RunError
from powerprop_paper.settings import EachOnce, Positive, Powers, Seeds, Settings, Share
from powerprop_paper.train import evaluate, fit

Optimiser = Literal["SGD", "momentum", "Nesterov", "Adam", "AdamW", "RMSprop", "Muon"]
NetworkName = Literal["LeNet", "LeNet, Glorot", "GPT", "ResNet"]
THIRDS = (1 / 3, 1.0, 3.0)
"""Times the rate in the middle: the rates among which that of α = 1 is chosen."""
REST = 3e-3
"""The rate of AdamW for what Muon, which takes matrices alone, leaves over."""

MAKERS: dict[Optimiser, Callable[[list[nn.Parameter], float], Optimizer]] = {
    "SGD": lambda p, lr: SGD(p, lr),
    "momentum": lambda p, lr: SGD(p, lr, momentum=0.9),
    "Nesterov": lambda p, lr: SGD(p, lr, momentum=0.9, nesterov=True),
    "Adam": lambda p, lr: Adam(p, lr),
    "AdamW": lambda p, lr: AdamW(p, lr, weight_decay=0.01),
    "RMSprop": lambda p, lr: RMSprop(p, lr),
    "Muon": lambda p, lr: torch.optim.Muon(p, lr, weight_decay=0.01),
}


class Problem(NamedTuple):
    """A network with its data.

    measure: the model to what it reaches on validation and on test data, accuracy or nats per character.
    prune: the fraction of which weights (None: all that Powerprop takes) goes at once at the end.
    """

    model: nn.Module
    batches: data.Batches | Windows
    measure: Callable[[nn.Module], dict[str, float]]
    prune: tuple[float, tuple[str, ...] | None] = (0.9, None)
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    clip: float | None = None
    schedule: Callable[[float], float] | None = None

    def train(self, optimizer: Optimizer, steps: int, progress: Progress) -> None:
        """So many steps of an optimiser of the model."""
        schedule = self.schedule
        fit(
            self.model, optimizer, self.batches, steps, loss=self.loss, clip=self.clip,
            schedule=None if schedule is None else lambda step: schedule(step / steps),
            progress=lambda step, values: progress(step / steps, values),
        )  # fmt: skip


class Network(NamedTuple):
    """How a problem is made from a seed, the steps it is trained for, and the middle of the rates of its optimisers.

    hopeless: what a network reaches that has learned nothing.
    """

    make: Callable[[int], Problem]
    steps: int
    rates: dict[Optimiser, float]
    hopeless: float = 0.1


def lenet(seed: int) -> Problem:
    """LeNet-300-100 with PyTorch's own initialisation, U(±1/√fan_in), on MNIST."""
    model, generator = models.lenet_300_100(), torch.Generator().manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            bound = layer.in_features**-0.5
            for values in (layer.weight, layer.bias):
                nn.init.uniform_(values, -bound, bound, generator=generator)
    return _digits(model, seed)


def glorot_lenet(seed: int) -> Problem:
    """The same with the paper's initialisation, N(0, 2/(fan_in + fan_out)), that of `learning-rates`."""
    return _digits(models.lenet_300_100(generator=torch.Generator().manual_seed(seed)), seed)


def _digits(model: nn.Module, seed: int) -> Problem:
    return _images(model, data.load_splits("mnist", "unit", validation=5_000, test=5_000), 60, seed)


def resnet(seed: int) -> Problem:
    """The smallest of the ResNets for 32x32 images, of 16, 32 and 64 channels and batch norm, 32 images a step."""
    model = models.CifarResNet(1, 10)
    models.initialise(model, "he_normal", torch.Generator().manual_seed(seed))
    splits = data.load_splits("cifar10", "standard", validation=1_000, train=8_000, test=1_000)
    return _images(model, splits, 32, seed)


def _images(model: nn.Module, splits: data.Splits, batch: int, seed: int) -> Problem:
    def measure(model: nn.Module) -> dict[str, float]:
        parts = {"validation": splits.validation, "test": splits.test}
        return {name: evaluate(model, *part).accuracy for name, part in parts.items()}

    return Problem(model, data.Batches(*splits.train, batch, torch.Generator().manual_seed(seed)), measure)


TEXT = LanguageSettings(depth=2, context=32, batch=8)


def gpt(seed: int) -> Problem:
    """A GPT of two blocks, 64 wide; warm-up, a cosine and clipping as in the other experiments with it."""
    _, (ids, held_back, tested) = language.splits(TEXT)

    def measure(model: nn.Module) -> dict[str, float]:
        return {
            "validation": language.nats(TEXT, model, held_back[:20_000]),
            "test": language.nats(TEXT, model, tested[:20_000]),
        }

    windows = Windows(ids, TEXT.context, TEXT.batch, torch.Generator().manual_seed(seed))
    prune = (0.8, language.BLOCKS)
    return Problem(
        language.build(TEXT, 64, seed), windows, measure, prune, language.next_symbol, language.CLIP, language.rate
    )  # fmt: skip


LENET: dict[Optimiser, float] = {
    "SGD": 0.3, "momentum": 0.09, "Nesterov": 0.09, "Adam": 3e-3, "AdamW": 3e-3, "RMSprop": 1e-3, "Muon": 0.01
}  # fmt: skip
NETWORKS: dict[NetworkName, Network] = {
    "LeNet": Network(lenet, 400, LENET),
    "LeNet, Glorot": Network(glorot_lenet, 400, {"Muon": 0.01}),
    "GPT": Network(
        gpt, 300,
        {"SGD": 1.0, "AdamW": 6e-3},
        3.3,
    ),
    "ResNet": Network(
        resnet, 80,
        {"SGD": 0.3, "momentum": 0.03, "Adam": 3e-3, "RMSprop": 1e-3},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Config(Settings):
    """The settings of the comparison."""

    networks: Annotated[tuple[NetworkName, ...], EachOnce()] = ("LeNet", "LeNet, Glorot", "GPT", "ResNet")
    """which are trained; of LeNet with Glorot's initialisation only Muon, for `learning-rates` has the others"""
    optimisers: Annotated[tuple[Optimiser, ...], EachOnce()] = tuple(MAKERS)
    """base optimisers; Muon takes no convolutions"""
    alphas: Powers = (2.0, 3.0, 5.0)
    """powers beside 1"""
    around: Annotated[tuple[Positive, ...], EachOnce()] = (1.0, 3.0)
    """rates at which they are trained, times the best of α = 1"""
    seeds: Seeds = 1
    """runs of each"""
    length: Share = 1.0
    """of the trainings, as a fraction of the usual"""

    def steps_of(self, network: NetworkName) -> int:
        """Of a training."""
        return max(1, round(self.length * NETWORKS[network].steps))


PRESETS = {
    "smoke": Config(networks=("LeNet",), optimisers=("SGD",), alphas=(2.0,), length=0.01),
    "cpu": Config(),
    "full": Config(alphas=(1.5, 2.0, 3.0, 5.0), around=THIRDS),
}


# One training.


def train(
    cfg: Config, folder: Path, progress: Progress, network: NetworkName, optimiser: Optimiser, lr: float, alpha: float,
    seed: int,
) -> dict[str, Any]:  # fmt: skip
    """What it reaches on validation and test data, and on test data with weights pruned at once.

    The same seed gives every optimiser and power the same initial weights and the same batches.
    """
    problem, steps = NETWORKS[network].make(seed), cfg.steps_of(network)
    optimizer = pp.Powerprop(base_of(problem.model, optimiser, lr), problem.model, alpha)
    problem.train(optimizer, steps, progress)
    found = problem.measure(problem.model)
    fraction, where = problem.prune
    pp.prune(problem.model, fraction, where=where)
    return found | {"pruned": problem.measure(problem.model)["test"]}


def base_of(model: nn.Module, optimiser: Optimiser, lr: float) -> Optimizer:
    """The optimiser; of Muon, which takes matrices alone, with AdamW for the rest after each step."""
    if optimiser != "Muon":
        return MAKERS[optimiser](list(model.parameters()), lr)
    if not hasattr(torch.optim, "Muon"):
        raise RunError(f"Muon came to torch.optim after torch {torch.__version__}: leave it out by --optimisers")
    matrices = list(select(model).values())
    base = MAKERS[optimiser](matrices, lr)
    rest = AdamW([p for p in model.parameters() if not any(p is m for m in matrices)], REST, weight_decay=0.01)

    def step_rest(*_: Any) -> None:
        rest.step()
        rest.zero_grad()

    base.register_step_post_hook(step_rest)
    return base


# The rates, and what is said.


def main(cfg: Config, run: Run) -> Page:
    """One network after the other: the rate of α = 1 first, then every power around it."""
    sections, counted = [], {"trained": 0, "lost": 0}
    for name in cfg.networks:
        rates = {each: NETWORKS[name].rates[each] for each in cfg.optimisers if each in NETWORKS[name].rates}
        cells = [job(name, o, middle * f, 1.0) for o, middle in rates.items() for f in THIRDS]
        plain = run.map(train, [{**cell, "seed": seed} for cell in cells for seed in range(cfg.seeds)])
        best = {o: best_rate(plain.where(optimiser=o), name) for o in rates}
        cells = [job(name, o, lr * f, a) for o, lr in best.items() for a in (1.0, *cfg.alphas) for f in cfg.around]
        cells = [cell for cell in cells if not plain.where(**cell)]
        found = Rows([*plain, *run.map(train, [{**cell, "seed": s} for cell in cells for s in range(cfg.seeds)])])
        sections.append(section(cfg, name, best, found, counted))
    what = "trainings with α > 1 that learn nothing, of those at rates at which the plain optimiser learns"
    return Page(
        "Where powers diverge",
        "Matched rates, at the rate that is best for the plain optimiser on validation data, and beyond it.",
        sections,
        "The paper tunes the learning rate; this is beyond it.",
        headline=Headline(what, f"{counted['lost']} of {counted['trained']}", "not measured"),
    )


def job(network: NetworkName, optimiser: Optimiser, lr: float, alpha: float) -> dict[str, Any]:
    """The settings of a cell; rates have two digits, so that a third of three times is the same rate."""
    return {"network": network, "optimiser": optimiser, "lr": float(f"{lr:.2g}"), "alpha": alpha}


def best_rate(rows: Rows, network: NetworkName) -> float:
    """The rate that is best on validation data."""
    scores = {lr: fmean(of.values("validation")) for lr, of in rows.by("lr").items() if not of.lost}
    return float((min if in_nats(network) else max)(scores, key=scores.__getitem__))


def in_nats(network: NetworkName) -> bool:
    """True if less is better."""
    return NETWORKS[network].hopeless > 1


def learned(rows: Rows, network: NetworkName) -> bool:
    """True unless a training diverged, or all end near what a network reaches that has seen nothing."""
    if rows.lost:
        return False
    test, hopeless = fmean(rows.values("test")), NETWORKS[network].hopeless
    return test < 0.9 * hopeless if in_nats(network) else test > 2 * hopeless


def said(rows: Rows, network: NetworkName) -> str:
    """`97.5 (95)`, `1.91 (2.10)`, or that a training diverged."""
    if rows.lost:
        return "diverged"
    dense, pruned = fmean(rows.values("test")), fmean(rows.values("pruned"))
    text = f"{dense:.2f} ({pruned:.2f})" if in_nats(network) else f"{100 * dense:.1f} ({100 * pruned:.0f})"
    return text if learned(rows, network) else f"{text}, learns nothing"


def section(
    cfg: Config, network: NetworkName, best: dict[Optimiser, float], found: Rows, counted: dict[str, int]
) -> Section:
    """The table of a network; counts what powers lost where the plain optimiser learns."""
    values: list[list[Value]] = []
    for optimiser, lr in best.items():
        for factor in cfg.around:
            plain, *powers = [found.where(**job(network, optimiser, lr * factor, a)) for a in (1.0, *cfg.alphas)]
            values.append([optimiser, f"{plain[0]['lr']:g}", *(said(rows, network) for rows in (plain, *powers))])
            if learned(plain, network):
                counted["trained"] += len(powers)
                counted["lost"] += sum(not learned(rows, network) for rows in powers)
    columns: list[str | Column] = ["optimiser", "rate", *(f"α = {a:g}" for a in (1.0, *cfg.alphas))]
    what = NETWORKS[network].make.__doc__ or ""
    unit = "nats per character" if in_nats(network) else "accuracy in percent"
    text = f"{what} {cfg.steps_of(network)} steps; {unit} on test data, in brackets pruned at once; {cfg.runs}."
    return Section(network, text, tables=[Table(f"{network}: dense (pruned)", columns, values)])


EXPERIMENTS = {
    "rate-stability": Experiment(
        "rate-stability", "where powers diverge: optimisers, networks and rates", "beyond the paper", PRESETS, main
    )
}
