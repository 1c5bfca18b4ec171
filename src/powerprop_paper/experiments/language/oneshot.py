"""A small GPT, trained with and without Powerprop, then pruned once: nats per character against sparsity.

Beside α there are the rivals that also push weights to zero: an L1 penalty, and a higher weight decay. Beside magnitude
pruning there are the two criteria that are used on language models, Wanda and SparseGPT.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softshrink
from torch.optim import Optimizer

import powerprop as pp
from powerprop.select import select
from powerprop_paper import data
from powerprop_paper.experiments import Columns, best, language, table
from powerprop_paper.experiments.language import LanguageSettings, nats
from powerprop_paper.models.gpt import GPT, continued
from powerprop_paper.pages import Column, Figure, Headline, Page, Section, Stat, Table
from powerprop_paper.report import Curve, Mean, lines
from powerprop_paper.run import Experiment, Progress, Rows, Run
from powerprop_paper.settings import Count, EachOnce, Positive, Powers, Range, require

WAYS = ("magnitude, uniform", "magnitude, global", "wanda, uniform", "sparsegpt, uniform")
"""Criteria, and how the sparsity is spread over layers; rates are chosen by the first, which the main table shows."""
TOLERANCE = 0.02
"""Nats that the dense network of the chosen rate may lack to that of the best candidate."""
AT = 0.8
"""The sparsity of the headline, and of the networks that write."""
WRITTEN = 240
"""Characters that a network writes for the page."""


class Method(NamedTuple):
    """How a network is trained: a power, and what else pushes weights to zero."""

    alpha: float = 1.0
    l1: float = 0.0
    decay: float = 0.0

    @property
    def label(self) -> str:
        """What the reader sees."""
        if self.l1:
            return f"AdamW, L1 penalty {self.l1:g}"
        if self.decay:
            return f"AdamW, weight decay {self.decay:g}"
        return "AdamW" if self.alpha == 1 else f"Powerprop, α = {self.alpha:g}"


@dataclass(frozen=True, kw_only=True)
class Config(LanguageSettings):
    """The settings of `gpt-oneshot`."""

    widths: Annotated[tuple[Count, ...], EachOnce()] = (128,)
    """of the networks"""
    alphas: Powers = (1.0, 2.0)
    """powers; 1 is the baseline"""
    lrs: Annotated[tuple[Positive, ...], EachOnce()] = (4e-3,)
    """candidates of the learning rate; the baseline's best is also that of a second comparison"""
    l1s: tuple[Positive, ...] = ()
    """rivals: α = 1 with the proximal step of an L1 penalty, |w| ← max(|w| - lr·λ, 0), for these λ"""
    decays: tuple[Positive, ...] = ()
    """rivals: α = 1 with this weight decay instead"""
    sparsities: Annotated[tuple[Annotated[float, Range(0, 1, above=True, below=True)], ...], EachOnce()] = (
        0.5, 0.6, 0.7, 0.8, 0.9, 0.95,
    )  # fmt: skip
    """each pruned at once from the dense network"""
    calibration: Count = 128
    """windows of training text that Wanda and SparseGPT look at"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1.0 in self.alphas, f"alphas must have 1, the baseline, got {self.alphas}")

    @property
    def methods(self) -> list[Method]:
        """The baseline, the powers, and the rivals of α = 1."""
        rivals = [Method(l1=each) for each in self.l1s] + [Method(decay=each) for each in self.decays]
        return [*(Method(alpha) for alpha in sorted(self.alphas)), *rivals]


POWERS = (1.0, 1.25, 1.5, 2.0, 3.0)
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
PRESETS = {
    "smoke": Config(
        widths=(16,), depth=1, heads=2, context=8, batch=4, steps=6, lrs=(4e-3, 8e-3), l1s=(0.1,), decays=(0.5,),
        sparsities=(0.5, 0.8), seeds=2, calibration=4, checkpoint_every=3, test=0.002, validation=0.001,
    ),
    "cpu": Config(precision="bfloat16"),
    "short": Config(precision="bfloat16", steps=2_000, l1s=(0.03,)),
    "rates": Config(
        precision="bfloat16", steps=2_000, alphas=POWERS, lrs=RATES, l1s=(0.01, 0.03, 0.1), decays=(0.1, 0.5)
    ),
    "paper": Config(
        precision="bfloat16", widths=(128, 256), alphas=POWERS, lrs=RATES, l1s=(0.01, 0.03, 0.1), decays=(0.1, 0.5)
    ),
}  # fmt: skip


# One job: train a network, prune it in every way to every sparsity.


def network(
    cfg: Config, folder: Path, progress: Progress, width: int, alpha: float, l1: float, decay: float, lr: float,
    seed: int,
) -> dict[str, Any]:  # fmt: skip
    """The same seed gives every method the same initial weights and the same text."""
    text, (ids, held_back, tested) = language.splits(cfg)
    model = language.build(cfg, width, seed)
    language.train(cfg, folder, progress, model, make_optimizer(model, Method(alpha, l1, decay), lr), seed)
    seen = language.windows(ids, cfg.context)[0]
    chosen = torch.randperm(len(seen), generator=torch.Generator().manual_seed(seed))[: cfg.calibration]
    calibration = list(torch.split(seen[chosen], 16))
    dense = {name: nats(cfg, model, part) for name, part in (("validation", held_back), ("test", tested))}
    written = {"dense": written_by(model, text, tested, seed)}
    pruned: dict[str, list[float]] = {way: [] for way in WAYS}
    on_validation, before = [], {name: value.clone() for name, value in model.state_dict().items()}
    for way, sparsity in product(WAYS, cfg.sparsities):
        prune(model, way, sparsity, calibration)
        pruned[way].append(nats(cfg, model, tested))
        if way == WAYS[0]:
            on_validation.append(nats(cfg, model, held_back))
            if sparsity == AT:
                written["pruned"] = written_by(model, text, tested, seed)
        model.load_state_dict(before)
    return {"dense": dense, "pruned": pruned, "validation": on_validation, "written": written}


def prune(model: nn.Module, way: str, sparsity: float, calibration: Sequence[Tensor]) -> None:
    """Prune the blocks at once."""
    criterion, distribution = way.split(", ")
    seen = None if criterion == "magnitude" else calibration
    pp.prune(model, sparsity, distribution, where=language.BLOCKS, criterion=criterion, data=seen)


def written_by(model: GPT, text: data.Text, ids: Tensor, seed: int) -> str:
    """What the network writes after the beginning of the test text."""
    generator = torch.Generator().manual_seed(seed)
    return text.decode(continued(model, ids[: model.context], WRITTEN, generator, temperature=0.8))


def make_optimizer(model: nn.Module, method: Method, lr: float) -> pp.Powerprop:
    """AdamW with Powerprop around it; under an L1 penalty with its proximal step after each."""
    base = language.adamw(model, lr, method.decay or language.WEIGHT_DECAY)
    if method.l1:
        _shrink(base, model, method.l1)
    return pp.Powerprop(base, model, method.alpha)


def _shrink(optimizer: Optimizer, model: nn.Module, strength: float) -> None:
    """|w| ← max(|w| - lr·strength, 0) after each step."""
    weights = list(select(model).values())

    @torch.no_grad()
    def pull(*_: Any) -> None:
        for weight in weights:
            weight.copy_(softshrink(weight, optimizer.param_groups[0]["lr"] * strength))

    optimizer.register_step_post_hook(pull)


# The choice of the learning rate, on validation text, for the baseline as for every other method.

Rates = dict[tuple[int, Method], float]
"""By the width of the network and the method."""


def jobs(rates: Iterable[tuple[tuple[int, Method], float]], seeds: int) -> list[dict[str, Any]]:
    """The settings of networks, one seed of all after the other: a run that is stopped has comparisons."""
    return [
        {"width": width, **method._asdict(), "lr": lr, "seed": seed}
        for seed, ((width, method), lr) in product(range(seeds), rates)
    ]


def of(rows: Rows, method: Method, width: int, lr: float) -> Rows:
    """A method's networks at a rate."""
    return rows.where(width=width, **method._asdict(), lr=lr)


def choose(cfg: Config, tuning: Rows, method: Method, width: int) -> float:
    """The rate that prunes best on validation text, of those whose dense network is within `tolerance` of the best."""
    tried = {lr: of(tuning, method, width, lr) for lr in cfg.lrs}
    return best(method.label, tried, lambda rows: -pruned(rows), dense=lambda rows: -dense(rows), tolerance=TOLERANCE)


def dense(rows: Rows) -> float:
    """Nats of the dense networks on validation text."""
    return fmean(row["dense"]["validation"] for row in rows)


def pruned(rows: Rows) -> float:
    """The same averaged over all sparsities."""
    return fmean(fmean(row["validation"]) for row in rows)


def main(cfg: Config, run: Run) -> Page:
    """One network for each rate; all seeds of the best, and of all methods at the baseline's best."""
    run.prepare(lambda: language.splits(cfg))
    every = list(product(cfg.widths, cfg.methods))
    tried = jobs(product(every, cfg.lrs), 1)
    tuning = run.map(network, tried) if len(cfg.lrs) > 1 else Rows()
    chosen = {(width, method): choose(cfg, tuning, method, width) for width, method in every}
    same = {(width, method): chosen[width, Method()] for width, method in every}
    rows = run.map(network, {str(job): job for lrs in (same, chosen) for job in jobs(lrs.items(), cfg.seeds)}.values())
    return page(cfg, rows, tuning, chosen, same)


# The page.


class Shown(NamedTuple):
    """A row of a table: networks of a size and a method at a rate, pruned in a way."""

    cfg: Config
    width: int
    method: Method
    lr: float
    rows: Rows
    way: str = WAYS[0]

    @property
    def label(self) -> str:
        """The method, and the size of its network where there are several."""
        size = f", {language.size(self.cfg, self.width)}" if len(self.cfg.widths) > 1 else ""
        return f"{self.method.label}{size}"

    def values(self, sparsity: float) -> list[float]:
        """Nats on test text of every seed, at a sparsity of the list or at 0."""
        i = self.cfg.sparsities.index(sparsity) if sparsity else None
        return self.rows.values(lambda row: row["dense"]["test"] if i is None else row["pruned"][self.way][i])

    def nats(self, sparsity: float) -> Mean | str:
        """Their mean over the seeds."""
        found = self.values(sparsity)
        return Mean.of(found) if found else "diverged"


def networks(cfg: Config, rows: Rows, lrs: Rates, ways: Iterable[str] = WAYS[:1]) -> list[Shown]:
    """All of them, in every way."""
    return [Shown(cfg, w, m, lr, of(rows, m, w, lr), way) for way in ways for (w, m), lr in lrs.items()]


def nats_columns(sparsities: Iterable[float]) -> Columns:
    """What each sparsity leaves of a network."""
    columns = [Column(f"{each:.0%}" if each else "dense", "min", 3) for each in sparsities]
    return [(column, partial(Shown.nats, sparsity=each)) for column, each in zip(columns, sparsities, strict=True)]


def page(cfg: Config, rows: Rows, tuning: Rows, best: Rates, same: Rates) -> Page:
    """What the run says."""
    shown = networks(cfg, rows, best)
    sections = [main_section(cfg, shown, "Pruned at once", "nats")]
    if same != best:
        at_same = networks(cfg, rows, same)
        sections.append(main_section(cfg, at_same, "All at the learning rate of AdamW", "nats-same-rate"))
    sections += [ways_section(cfg, networks(cfg, rows, best, WAYS)), text_section(shown)]
    if tuning:
        sections.append(rates_section(cfg, tuning, best))
    intro = (
        "Networks are trained densely, then the weights that score lowest are set to zero at once, without any "
        f"training afterwards. {language.about(cfg, cfg.widths)}"
    )
    title, paper = "One-shot pruning of a small GPT", "The paper has no language models."
    return Page(title, intro, sections, paper, *verdict_of(cfg, shown))


def main_section(cfg: Config, shown: Sequence[Shown], heading: str, name: str) -> Section:
    """Nats against sparsity, from the dense network on, pruned in the first way."""
    grid, figures = (0.0, *cfg.sparsities), []
    for width in cfg.widths:
        drawn = [each for each in shown if each.width == width and each.rows.finished]
        curves = [
            Curve(
                each.method.label, each.method.alpha, grid, list(zip(*map(each.values, grid), strict=True)),
                plain=each.method.alpha == 1 and each.method != Method(),
            )
            for each in drawn
        ]  # fmt: skip
        picture = Figure(
            f"{name}-{width}", lines, curves, title=f"Pruned at once, {language.size(cfg, width)} weights",
            xlabel="sparsity", ylabel="nats per symbol", fractions=True, wide=True,
            caption="Mean over the seeds, band of one standard deviation; the first point is the dense network.",
        )  # fmt: skip
        figures.append(picture)
    columns: Columns = [("", lambda each: each.label), ("lr", lambda each: f"{each.lr:g}"), *nats_columns(grid)]
    caption = f"Nats per symbol of test text, pruned by {WAYS[0]}; columns are sparsities of the blocks."
    return Section(heading, "", figures, [table("Nats against sparsity", columns, shown, caption)])


def ways_section(cfg: Config, shown: Sequence[Shown]) -> Section:
    """The same networks under every criterion."""
    columns: Columns = [("", lambda each: each.label), ("pruned by", lambda each: each.way)]
    text = (
        f"Wanda and SparseGPT look at {cfg.calibration} windows of training text, block by block; `global` ranks the "
        "magnitudes of all blocks together. SparseGPT also moves the weights that stay."
    )
    found = table("Nats by criterion", [*columns, *nats_columns(cfg.sparsities)], shown, "Nats per symbol.")
    return Section("By other criteria", text, tables=[found])


def text_section(shown: Sequence[Shown]) -> Section:
    """What networks write, dense and pruned."""
    firsts = [(each.method.label, row["written"]) for each in shown for row in each.rows.where(seed=0).finished]
    written = [(label, state, " / ".join(words.split("\n"))) for label, both in firsts for state, words in both.items()]
    text = f"Drawn at a temperature of 0.8 after the same beginning, first seed; pruned means {AT:.0%} by magnitude."
    return Section("What they write", text, tables=[Table("Text", ["", "network", "continues with"], written)])


def rates_section(cfg: Config, tuning: Rows, best: Rates) -> Section:
    """What each candidate came to on validation text."""

    def mark(each: Shown) -> str:
        chosen = each.lr == best[each.width, each.method]
        return "chosen" if chosen else "diverged" if each.rows.lost else ""

    columns: Columns = [
        ("", lambda each: each.label), ("lr", lambda each: each.lr),
        (Column("dense", digits=3), lambda each: each.rows.mean(lambda row: row["dense"]["validation"])),
        (Column("mean over sparsities", digits=3), lambda each: each.rows.mean(lambda row: fmean(row["validation"]))),
        ("", mark),
    ]  # fmt: skip
    text = (
        "The rate of each row, the baseline included, is the one that prunes best on validation text, averaged over "
        f"all sparsities, of those whose dense network is within {TOLERANCE:g} nats of the row's best; one seed."
    )
    every = [Shown(cfg, width, m, lr, of(tuning, m, width, lr)) for width, m in best for lr in cfg.lrs]
    return Section("Choice of the learning rate", text, tables=[table("Nats on validation text", columns, every)])


def verdict_of(cfg: Config, shown: Sequence[Shown]) -> tuple[list[Stat], Headline | None]:
    """The baseline of the first size, dense and pruned, and the power that prunes best on validation text."""
    first = [each for each in shown if each.width == cfg.widths[0] and each.rows.finished]
    base = [each for each in first if each.method == Method()]
    powers = [each for each in first if each.method.alpha > 1]
    if AT not in cfg.sparsities or not powers or not base:
        return [], None
    both = (min(powers, key=lambda each: pruned(each.rows.finished)), *base)
    dense, cut = ([f"{fmean(each.values(sparsity)):.3f}" for each in both] for sparsity in (0.0, AT))
    stats = [
        Stat(each.method.label, f"{sparse} nats", f"{AT:.0%} pruned, dense {whole}")
        for each, whole, sparse in zip(both, dense, cut, strict=True)
    ]
    what = (
        f"{both[0].method.label} against AdamW: nats per character of a small GPT, dense and with {AT:.0%} of the "
        "weights of its blocks pruned at once"
    )
    here = f"dense {' against '.join(dense)}; pruned {' against '.join(cut)}"
    return stats, Headline(what, here, "no language models")


EXPERIMENTS = {
    "gpt-oneshot": Experiment(
        "gpt-oneshot", "a small GPT on Tiny Shakespeare, pruned at once by magnitude, Wanda and SparseGPT",
        "not in the paper", PRESETS, main,
    ),
}  # fmt: skip
