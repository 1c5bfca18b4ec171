"""A small GPT that is sparse while it trains, with and without Powerprop: nats per character and FLOPs.

All methods share initial weights, text, AdamW and the number of steps; the learning rate of each is chosen on
validation text at one sparsity. The head stays dense.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch

from powerprop.allocate import Layers
from powerprop_paper.experiments import best, language, listed
from powerprop_paper.experiments.language import LanguageSettings, nats
from powerprop_paper.pages import Column, Headline, Page, Section
from powerprop_paper.run import Experiment, Progress, Rows, Run
from powerprop_paper.settings import Count, EachOnce, Positive, Power
from powerprop_paper.sparse_methods import METHODS
from powerprop_paper.sparse_tables import (
    TWINS,
    SparseSettings,
    against_sparsity,
    cell,
    cost_figure,
    cost_table,
    exactness,
    job,
    methods_table,
    sparsity_figure,
    title_of,
    weights_and_cost,
)

RULES: Layers = {"head.weight": 0.0}
"""The head stays dense."""


@dataclass(frozen=True, kw_only=True)
class Config(LanguageSettings, SparseSettings):
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
    model, ids = language.build(cfg, cfg.width, seed), torch.zeros(1, cfg.context, dtype=torch.long)
    optimizer = cfg.sparsified(language.adamw(model, lr), model, method, target, cfg.steps, RULES, seed)
    language.train(cfg, folder, progress, model, optimizer, seed)
    return {
        "test": nats(cfg, model, tested), "validation": nats(cfg, model, held_back),
        **weights_and_cost(model, ids, optimizer, optimizer.active, method, target, RULES),
    }  # fmt: skip


def main(cfg: Config, run: Run) -> Page:
    """One network for each rate, by which it is chosen; then all seeds of every cell."""
    run.prepare(lambda: language.splits(cfg))
    tried = run.map(network, [job(name, cfg.tune_at, lr, 0) for name in cfg.methods for lr in cfg.lrs])
    lrs = {name: choose(cfg, tried, name) for name in cfg.methods}
    every = [(name, target, seed) for name in cfg.methods for target in cfg.sparsities for seed in range(cfg.seeds)]
    rows = run.map(network, [job(name, target, lrs[name], seed) for name, target, seed in every])
    both = {"ylabel": "nats per symbol"}
    figures = [
        *sparsity_figure(against_sparsity(cfg, rows, cfg.sparse), "nats", TWINS, **both),
        *cost_figure(cfg, rows, [name for name in cfg.methods if name != "pp-dense"], "Nats", **both),
    ]
    caption = (
        f"Nats per symbol of test text. Learning rates: {', '.join(f'{METHODS[n].label} {lrs[n]:g}' for n in lrs)}."
    )
    columns = {target: Column(title_of(target), "min", 3) for target in cfg.sparsities}
    shown = methods_table("Nats by method and sparsity", cfg.methods, columns, partial(nats_of, rows), caption)
    intro = (
        f"Every method starts from the same weights and reads the same text. {language.about(cfg, (cfg.width,))} "
        f"Powerprop has α = {cfg.alpha:g}; the learning rate of each row is the best of {listed(cfg.lrs)} on "
        f"validation text at {title_of(cfg.tune_at)}, one seed."
    )
    sections = [Section("Nats against sparsity", "", figures, [shown, cost_table(cfg, rows)]), exactness(cfg, rows)]
    paper = "The paper has no language models."
    return Page("Sparse training of a small GPT", intro, sections, paper, headline=headline(cfg, rows))


def choose(cfg: Config, tried: Rows, method: str) -> float:
    """The rate with the lowest nats on validation text."""
    rates = {lr: tried.where(method=method, lr=lr) for lr in cfg.lrs}
    return best(METHODS[method].label, rates, lambda rows: -float(rows[0]["validation"]))


def nats_of(rows: Rows, target: str, method: str) -> Any:
    """Nats of test text; a dense network's stand in every column."""
    return cell(rows, method, target).mean("test") or "diverged"


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
