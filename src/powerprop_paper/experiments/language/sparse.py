"""A small GPT that is sparse while it trains, with and without Powerprop: nats per character and FLOPs.

All methods share initial weights, text, AdamW and the number of steps; the learning rate of each is chosen on
validation text at one sparsity. The head stays dense.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

import powerprop as pp
from powerprop.flops import count_flops
from powerprop_paper.experiments import language
from powerprop_paper.experiments.language import LanguageSettings, nats
from powerprop_paper.models.gpt import GPT
from powerprop_paper.pages import Column, Figure, Headline, Page, Section, Table, Value
from powerprop_paper.report import Curve, Mean, Point, lines, scatter
from powerprop_paper.run import Experiment, Progress, Rows, Run, RunError
from powerprop_paper.settings import Count, EachOnce, Positive, Power, require
from powerprop_paper.sparse_methods import METHODS, UNPRUNED, asked, parse, training_cost


@dataclass(frozen=True)
class Config(LanguageSettings):
    """The settings of `gpt-sparse`."""

    width: Count = 128
    """of the network"""
    methods: Annotated[tuple[str, ...], EachOnce()] = (
        "dense", "pp-dense", "static", "pp-static", "set", "pp-set", "rigl", "pp-rigl", "topkast-0", "pp-topkast-0",
        "iterative", "pp-iterative",
    )  # fmt: skip
    """rows of the table"""
    sparsities: Annotated[tuple[str, ...], EachOnce()] = ("uniform 0.8", "uniform 0.9", "uniform 0.95")
    """columns of the table"""
    alpha: Power = 2.0
    """the power of Powerprop"""
    lrs: Annotated[tuple[Positive, ...], EachOnce()] = (2e-3, 4e-3, 8e-3)
    """candidates of the learning rate; each method's is chosen on validation text at `tune_at`"""
    tune_at: str = "uniform 0.9"
    """the sparsity at which rates are chosen"""
    topkast_every: Count = 1
    """steps between refreshes of Top-KAST's masks"""
    regrow_every: Count = 25
    """steps between mask updates where growth is random; 100 in the papers, whose trainings are longer"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.methods:
            require(name in METHODS, f"method must be one of {', '.join(METHODS)}, got {name!r}")
        for target in (*self.sparsities, self.tune_at):
            parse(target)


PRESETS = {
    "smoke": Config(
        width=16, depth=1, heads=2, context=8, batch=4, steps=6, lrs=(4e-3,), seeds=1, checkpoint_every=3, test=0.002,
        validation=0.001, methods=("dense", "rigl", "pp-topkast-0", "iterative", "pp-iterative"),
        sparsities=("uniform 0.8", "erk 0.9"), tune_at="uniform 0.8",
    ),
    "cpu": Config(precision="bfloat16", steps=2_000, lrs=(4e-3,)),
    "paper": Config(precision="bfloat16"),
}  # fmt: skip


# One job: train a method at one sparsity.


def network(
    cfg: Config, folder: Path, progress: Progress, method: str, target: str, lr: float, seed: int
) -> dict[str, Any]:
    """The same seed gives every method the same initial weights and the same text."""
    _, (_, held_back, tested) = language.splits(cfg)
    model = language.build(cfg, cfg.width, seed)
    optimizer = make_optimizer(cfg, model, method, target, lr, seed)
    language.train(cfg, folder, progress, model, optimizer, seed)
    masks = optimizer.active
    flops = count_flops(model, torch.zeros(1, cfg.context, dtype=torch.long))
    return {
        "test": nats(cfg, model, tested),
        "validation": nats(cfg, model, held_back),
        "kept": {name: int(mask.count_nonzero()) for name, mask in masks.items()},
        "asked": asked(masks, METHODS[method], target, rules(cfg)),
        "inference_flops": flops.inference(masks),
        "training_flops": training_cost(flops, optimizer.sparsify, masks, optimizer.trainable),
    }


def rules(cfg: Config) -> dict[str, float]:
    """The head stays dense; a tied one is no weight at all."""
    return {} if cfg.tied else {"head.weight": 0.0}


def make_optimizer(cfg: Config, model: GPT, method: str, target: str, lr: float, seed: int) -> pp.Powerprop:
    """AdamW, the method and its α."""
    distribution, sparsity = parse(target)
    sparsify = METHODS[method].make(
        sparsity, distribution, cfg.steps, rules(cfg), seed, cfg.topkast_every, cfg.regrow_every
    )
    base = language.adamw(model, lr, cfg.weight_decay)
    return pp.Powerprop(base, model, cfg.alpha if METHODS[method].powerprop else 1.0, sparsify=sparsify)


# The choice of the learning rates, and the table.


def job(method: str, target: str, lr: float, seed: int) -> dict[str, Any]:
    """The settings of a training; a dense network has one target, whatever is asked."""
    return {"method": method, "target": UNPRUNED if METHODS[method].dense else target, "lr": lr, "seed": seed}


def choose(tried: Rows, method: str) -> float:
    """The rate with the lowest nats on validation text."""
    found = tried.where(method=method).finished
    if not found:
        raise RunError(f"{METHODS[method].label} diverged at every learning rate")
    return float(min(found, key=lambda row: row["validation"])["lr"])


def main(cfg: Config, run: Run) -> Page:
    """One network for each rate, then all seeds of every cell at the chosen ones."""
    run.prepare(lambda: language.splits(cfg))
    tried = run.map(network, [job(name, cfg.tune_at, lr, 0) for name in cfg.methods for lr in cfg.lrs])
    lrs = {name: choose(tried, name) for name in cfg.methods}
    cells = [
        job(name, target, lrs[name], seed)
        for name in cfg.methods
        for target in cfg.sparsities
        for seed in range(cfg.seeds)
    ]
    return page(cfg, run.map(network, {str(cell): cell for cell in cells}.values()), lrs)


# The page.


def cell(rows: Rows, method: str, target: str) -> Rows:
    """The seeds of a method at a sparsity."""
    return rows.where(method=method, target=UNPRUNED if METHODS[method].dense else target)


def title_of(target: str) -> str:
    """80%, or 90% (ERK)."""
    distribution, sparsity = parse(target)
    return f"{sparsity:.0%}" + (" (ERK)" if distribution == "erk" else "")


def page(cfg: Config, rows: Rows, lrs: dict[str, float]) -> Page:
    """What the run says."""
    sections = [
        Section("Nats against sparsity", "", figures(cfg, rows), [nats_table(cfg, rows, lrs), cost_table(cfg, rows)]),
        Section("Sparsity asked and reached", "", (), [exactness(cfg, rows)]),
    ]
    intro = (
        f"Every method starts from the same weights and reads the same text. {language.about(cfg, (cfg.width,))} "
        f"Powerprop has α = {cfg.alpha:g}; the learning rate of each row is the best of "
        f"{', '.join(f'{lr:g}' for lr in cfg.lrs)} on validation text at {title_of(cfg.tune_at)}, one seed."
    )
    paper = "The paper has no language models."
    return Page("Sparse training of a small GPT", intro, sections, paper, (), headline(cfg, rows))


def figures(cfg: Config, rows: Rows) -> list[Figure]:
    """Nats against sparsity, and against the FLOPs of the training at the sparsity of the choice."""
    uniform = [target for target in cfg.sparsities if parse(target)[0] == "uniform"]
    curves, points = [], []
    for name in cfg.methods:
        found = [cell(rows, name, target).values("test") for target in uniform]
        alone = METHODS[name.removeprefix("pp-")].label
        if not METHODS[name].dense and found and all(len(each) == cfg.seeds for each in found):
            x, values = [parse(target)[1] for target in uniform], list(zip(*found, strict=True))
            curves.append(Curve(METHODS[name].label, None, x, values, method=alone, plain=not METHODS[name].powerprop))
        if name != "pp-dense" and (cost := cell(rows, name, cfg.tune_at).mean("training_flops")):
            points.append(Point(METHODS[name].label, cost.mean, Mean.of(cell(rows, name, cfg.tune_at).values("test"))))
    caption = "Thick lines and filled markers: with Powerprop; thin and hollow: without."
    drawn = [
        Figure(
            "sparsity", lines, curves, title="Nats against sparsity", xlabel="sparsity", ylabel="nats per symbol",
            fractions=True, wide=True, caption=caption,
        )
    ] if curves else []  # fmt: skip
    title = f"Nats against the FLOPs of a training, {title_of(cfg.tune_at)} sparsity"
    labels = {"title": title, "xlabel": "FLOPs, dense = 1", "ylabel": "nats per symbol", "caption": caption}
    return [*drawn, *([Figure("cost", scatter, points, **labels)] if points else [])]


def table(title: str, names: Sequence[str], cfg: Config, value: Callable[[str, str], Value], caption: str) -> Table:
    """A row for each method, a column for each sparsity."""
    columns: list[str | Column] = ["method", *(Column(title_of(each), "min", 3) for each in cfg.sparsities)]
    rows = [[METHODS[name].label, *(value(name, target) for target in cfg.sparsities)] for name in names]
    return Table(title, columns, rows, caption)


def nats_table(cfg: Config, rows: Rows, lrs: dict[str, float]) -> Table:
    """Nats of test text; a dense network's stand in every column."""
    caption = "Nats per symbol of test text. Learning rates: " + ", ".join(
        f"{METHODS[name].label} {lr:g}" for name, lr in lrs.items()
    )
    return table(
        "Nats by method and sparsity", cfg.methods, cfg,
        lambda name, target: cell(rows, name, target).mean("test") or "diverged", f"{caption}.",
    )  # fmt: skip


def cost_table(cfg: Config, rows: Rows) -> Table:
    """What each training costs, as a multiple of the dense one."""

    def value(name: str, target: str) -> Value:
        cost = cell(rows, name, target).mean("training_flops")
        return cost.mean if cost else "diverged"

    names = [name for name in cfg.methods if not METHODS[name].dense]
    caption = "FLOPs of a training, dense = 1, as the papers on RigL and Top-KAST count them; mean over the seeds."
    return table("Training FLOPs by method and sparsity", names, cfg, value, caption)


def exactness(cfg: Config, rows: Rows) -> Table:
    """How many runs have exactly the weights asked for."""
    shown: list[list[Value]] = []
    for target in cfg.sparsities:
        found = Rows(row for row in rows.where(target=target).finished if not METHODS[row["method"]].dense)
        exact = sum(row["kept"] == row["asked"] for row in found)
        shown.append([title_of(target), len(found), exact])
    return Table("Exact counts", ["asked", "runs", "exact"], shown, "Counts are compared weight by weight.")


def headline(cfg: Config, rows: Rows) -> Headline | None:
    """What Powerprop adds to each method at the sparsity of the choice."""
    gains = []
    for name in (each for each in cfg.methods if f"pp-{each}" in cfg.methods and not METHODS[each].dense):
        ours, alone = (cell(rows, each, cfg.tune_at).mean("test") for each in (f"pp-{name}", name))
        if ours and alone:
            gains.append(f"{METHODS[name].label} {ours.mean:.3f} against {alone.mean:.3f}")
    what = f"Nats per character of a small GPT at {title_of(cfg.tune_at)} sparsity, with Powerprop against without"
    return Headline(what, "; ".join(gains), "no language models") if gains else None


EXPERIMENTS = {
    "gpt-sparse": Experiment(
        "gpt-sparse", "a small GPT on Tiny Shakespeare, sparse while it trains", "not in the paper", PRESETS, main
    ),
}
