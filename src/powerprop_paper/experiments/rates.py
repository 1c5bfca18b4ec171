"""The learning rate of the plain optimiser for every power: `learning-rates`, beyond the paper.

For each optimiser the learning rate is chosen for α = 1, on validation images, from a grid of thirds. LeNet-300-100 is
then trained with other powers at that rate, at a third and at three times of it, with matched rates; and, for one
optimiser, at all rates with the update as printed beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import powerprop as pp
from powerprop_paper import data, models
from powerprop_paper.pages import Column, Figure, Headline, Page, Percent, Section, Table, Value
from powerprop_paper.report import Curve, lines
from powerprop_paper.run import Experiment, Progress, Row, Rows, Run
from powerprop_paper.settings import Count, EachOnce, Powers, Seeds, Settings, require
from powerprop_paper.train import evaluate, fit

MATCHED: Final = "matched"
PAPER: Final = "paper"
KEPT = 0.1
"""The fraction of each layer that is kept when a network is pruned at once."""

Made = Callable[[list[nn.Parameter], float], Optimizer]
Name = Literal["SGD", "momentum", "Nesterov", "Adam", "AdamW", "RMSprop"]
OPTIMISERS: dict[Name, tuple[Made, tuple[float, ...]]] = {
    "SGD": (lambda p, lr: SGD(p, lr), (0.03, 0.1, 0.3, 1.0, 3.0)),
    "momentum": (lambda p, lr: SGD(p, lr, momentum=0.9), (0.003, 0.01, 0.03, 0.1, 0.3)),
    "Nesterov": (lambda p, lr: SGD(p, lr, momentum=0.9, nesterov=True), (0.003, 0.01, 0.03, 0.1, 0.3)),
    "Adam": (lambda p, lr: Adam(p, lr), (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)),
    "AdamW": (lambda p, lr: AdamW(p, lr, weight_decay=0.01), (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)),
    "RMSprop": (lambda p, lr: RMSprop(p, lr), (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)),
}
"""What makes each base optimiser, and its learning rates in thirds."""
SHOWN: Final = "SGD"
"""The optimiser of the figures."""


@dataclass(frozen=True)
class Config(Settings):
    """The settings of the comparison."""

    optimisers: Annotated[tuple[Name, ...], EachOnce()] = ("SGD", "momentum", "Nesterov", "Adam", "AdamW", "RMSprop")
    """base optimisers; SGD is that of the figures"""
    alphas: Powers = (1.5, 2.0, 3.0, 5.0)
    """powers beside 1"""
    claimed: Powers = (1.25, 1.5, 2.0, 3.0)
    """powers that are trained with several seeds, by SGD at the rate of α = 1"""
    seeds: Seeds = 5
    """runs of these; of all others there is one"""
    steps: Count = 3_000
    """of training"""
    batch: Count = 60
    """images per step"""
    validation: Count = 5_000
    """training images held back, by which the rate of α = 1 is chosen"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(SHOWN in self.optimisers, f"optimisers must have {SHOWN} among them, got {self.optimisers}")


PRESETS = {
    "smoke": Config(optimisers=("SGD", "Adam"), alphas=(2.0,), claimed=(2.0,), seeds=2, steps=30),
    "cpu": Config(),
}


def train(
    cfg: Config, folder: Path, progress: Progress, optimiser: Name, lr: float, alpha: float, rate: str, seed: int
) -> dict[str, Any]:
    """LeNet-300-100 with the paper's initialisation; accuracy dense, and pruned at once."""
    splits = data.load_splits("mnist", "unit", validation=cfg.validation)
    model = models.lenet_300_100(generator=torch.Generator().manual_seed(seed))
    base = OPTIMISERS[optimiser][0](list(model.parameters()), lr)
    optimizer = pp.Powerprop(base, model, alpha, rate=rate)  # type: ignore[arg-type]
    batches = data.Batches(*splits.train, cfg.batch, torch.Generator().manual_seed(seed))
    fit(
        model, optimizer, batches, cfg.steps, checkpoint=folder / "checkpoint.pt",
        progress=lambda step, values: progress(step / cfg.steps, values),
    )  # fmt: skip
    found = {"validation": evaluate(model, *splits.validation).accuracy, "test": evaluate(model, *splits.test).accuracy}
    pp.prune(model, 1 - KEPT)
    return found | {"pruned": evaluate(model, *splits.test).accuracy}


def main(cfg: Config, run: Run) -> Page:
    """The rate of α = 1 first, then everything else at it and beside it."""
    run.prepare(lambda: data.load("mnist"))
    first = [job(name, lr, 1.0) for name in cfg.optimisers for lr in OPTIMISERS[name][1]]
    plain = run.map(train, first)
    best = {name: best_rate(plain.where(optimiser=name)) for name in cfg.optimisers}
    jobs = [job(name, lr, a) for name in cfg.optimisers for a in cfg.alphas for lr in around(name, best[name])]
    jobs += [job(SHOWN, lr, a, rate) for a in cfg.alphas for lr in OPTIMISERS[SHOWN][1] for rate in (MATCHED, PAPER)]
    jobs += [job(SHOWN, best[SHOWN], a, seed=s) for a in (1.0, *cfg.claimed) for s in range(cfg.seeds)]
    later = [each for n, each in enumerate(jobs) if each not in (*first, *jobs[:n])]
    found = Rows([*plain, *run.map(train, later)])
    return Page(
        "One learning rate for every power",
        "The rate that is best for the plain optimiser, on validation images, a third and three times of it: "
        "LeNet-300-100 on MNIST, accuracy in percent, in brackets with a tenth of each layer kept.",
        [claim(cfg, found, best[SHOWN]), stability(cfg, found, best), beside(cfg, found)],
        "The paper tunes the learning rate; this is beyond it.",
        headline=headline(cfg, found, best[SHOWN]),
    )


def job(optimiser: Name, lr: float, alpha: float, rate: str = MATCHED, seed: int = 0) -> dict[str, Any]:
    """The settings of a training; α = 1 has no rate to match."""
    return {
        "optimiser": optimiser, "lr": lr, "alpha": alpha, "rate": MATCHED if alpha == 1 else rate, "seed": seed
    }  # fmt: skip


def best_rate(rows: Rows) -> float:
    """The rate with the best accuracy on validation images."""
    return float(max(rows.finished, key=lambda row: row["validation"])["lr"])


def around(optimiser: Name, lr: float) -> tuple[float, ...]:
    """A rate of the grid with its neighbours."""
    rates = OPTIMISERS[optimiser][1]
    at = rates.index(lr)
    return rates[max(at - 1, 0) : at + 2]


def said(rows: Rows) -> str:
    """`97.5 (95)`, or that the training diverged."""
    if rows.lost:
        return "diverged"
    return f"{100 * rows[0]['test']:.1f} ({100 * rows[0]['pruned']:.0f})"


def claim(cfg: Config, found: Rows, lr: float) -> Section:
    """The best rate of the plain optimiser, several seeds."""
    rows = found.where(optimiser=SHOWN, lr=lr, rate=MATCHED)
    values: list[list[Value]] = []
    for alpha in (1.0, *cfg.claimed):
        of = Rows(row for row in rows.where(alpha=alpha) if row["seed"] < cfg.seeds)
        values.append([f"α = {alpha:g}", of.mean("test"), of.mean("pruned")])
    columns: list[str | Column] = ["", Percent("dense", "max", digits=2), Percent(f"{KEPT:.0%} kept", "max")]
    text = f"{SHOWN} at {lr:g}, the best rate of α = 1 on validation images; {cfg.seeds} seeds."
    return Section("The rate of the plain optimiser", text, tables=[Table("Accuracy", columns, values)])


def headline(cfg: Config, found: Rows, lr: float) -> Headline | None:
    """The largest power at the rate of α = 1."""
    rows = found.where(optimiser=SHOWN, lr=lr, rate=MATCHED)
    dense = [mean for alpha in (cfg.claimed[-1], 1.0) if (mean := rows.where(alpha=alpha).mean("test"))]
    if len(dense) < 2:
        return None
    what = f"α = {cfg.claimed[-1]:g} at the learning rate that is best for α = 1, and α = 1: dense test accuracy"
    return Headline(what, " and ".join(f"{mean.mean:.2%}" for mean in dense), "not measured")


def stability(cfg: Config, found: Rows, best: dict[Name, float]) -> Section:
    """Every optimiser at a third, at once and at three times its best rate."""
    powers = (1.0, *cfg.alphas)
    values: list[list[Value]] = [
        [name, f"{lr:g}", *(said(found.where(optimiser=name, lr=lr, alpha=a, rate=MATCHED, seed=0)) for a in powers)]
        for name in cfg.optimisers
        for lr in around(name, best[name])
    ]
    columns: list[str | Column] = ["optimiser", "rate", *(f"α = {a:g}" for a in powers)]
    text = "The middle row of each optimiser is its best rate for α = 1. One seed."
    return Section(
        "Rates from a third to three times", text, tables=[Table("Dense accuracy (pruned)", columns, values)]
    )


def beside(cfg: Config, found: Rows) -> Section:
    """Accuracy against the rate, with matched rates and with the update as printed."""
    figures = []
    for rate, title in ((MATCHED, "Matched rates"), (PAPER, "The update as printed")):
        rows = Rows([*found.where(alpha=1.0), *found.where(rate=rate)]).where(optimiser=SHOWN, seed=0)
        curves = [curve(a, rows.where(alpha=a)) for a in (1.0, *cfg.alphas)]
        figures.append(
            Figure(rate, lines, curves, title=title, xlabel="learning rate", ylabel="accuracy", percent=True, logx=True)
        )
    text = f"{SHOWN}, one seed; a training that diverged counts as chance."
    return Section("With and without", text, figures)


def curve(alpha: float, rows: Sequence[Row]) -> Curve:
    """Accuracy at every rate."""
    reached = {row["lr"]: row.get("test", 0.1) for row in rows}
    rates = sorted(reached)
    return Curve(f"α = {alpha:g}", alpha, rates, [reached[lr] for lr in rates])


EXPERIMENTS = {
    "learning-rates": Experiment(
        "learning-rates", "one learning rate for every power and optimiser", "beyond the paper", PRESETS, main
    )
}
