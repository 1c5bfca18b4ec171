"""Methods by sparsities: settings, choice of rates and pages that sparse training of every kind of network shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import nn

import powerprop as pp
from powerprop.allocate import Layers
from powerprop.flops import count_flops
from powerprop_paper.experiments import Columns, table
from powerprop_paper.pages import Column, Figure, Percent, Section, Table, Value
from powerprop_paper.report import Curve, Mean, Point, lines, scatter
from powerprop_paper.run import Row, Rows
from powerprop_paper.settings import Count, EachOnce, NonNegative, Positive, Power, Settings, require
from powerprop_paper.sparse_methods import METHODS, UNPRUNED, UPDATES_EVERY, asked, parse, training_cost

TWINS = "Thick lines and filled markers: with Powerprop; thin and hollow: without."


@dataclass(frozen=True, kw_only=True)
class SparseSettings(Settings):
    """The table, and what its methods are set to."""

    methods: Annotated[tuple[str, ...], EachOnce()]
    """rows of the table: dense, static, rigl, pp-topkast-0, …"""
    sparsities: Annotated[tuple[str, ...], EachOnce()]
    """columns of the table, such as "uniform 0.95" or "erk 0.9" """
    alpha: Power
    """the power of Powerprop"""
    lrs: Annotated[tuple[Positive, ...], EachOnce()]
    """candidates of the learning rate; each method's is chosen on validation data at `tune_at`"""
    tune_at: str
    """the sparsity at which rates are chosen"""
    topkast_every: Count = 5
    """steps between refreshes of Top-KAST's masks, 100 in its paper. In short trainings at high rates it must be more
    often, because weights that are trained but not used drift apart"""
    topkast_decay: NonNegative = 1e-4
    """λ of Top-KAST, by which weights that are trained but not used decay"""
    regrow_every: Count = UPDATES_EVERY
    """steps between mask updates where growth is random (SET, DSR), 100 in the papers. A short training needs more
    tries in fewer steps"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.methods:
            check_method(name)
        for target in (*self.sparsities, self.tune_at):
            parse(target)

    @property
    def sparse(self) -> list[str]:
        """The methods that are not dense."""
        return [name for name in self.methods if not METHODS[name].dense]

    @property
    def uniform(self) -> list[str]:
        """The targets with a uniform distribution."""
        return [target for target in self.sparsities if parse(target)[0] == "uniform"]

    def sparsified(
        self, base: torch.optim.Optimizer, model: nn.Module, method: str, target: str, steps: int, rules: Layers,
        seed: int, **options: Any,
    ) -> pp.Powerprop:  # fmt: skip
        """The base optimiser with a method and its α."""
        distribution, sparsity = parse(target)
        sparsify = METHODS[method].make(
            sparsity, distribution, steps, rules, seed, self.topkast_every, self.regrow_every, self.topkast_decay
        )
        return pp.Powerprop(
            base, model, self.alpha if METHODS[method].powerprop else 1.0, sparsify=sparsify, **options
        )  # fmt: skip


def check_method(name: str) -> None:
    """An error unless there is such a method."""
    require(name in METHODS, f"method must be one of {', '.join(METHODS)}, got {name!r}")


def job(method: str, target: str, lr: float, seed: int, **more: Any) -> dict[str, Any]:
    """The settings of a training; a dense network has one target, whatever is asked."""
    return {"method": method, "target": UNPRUNED if METHODS[method].dense else target, "lr": lr, **more, "seed": seed}


def weights_and_cost(
    model: nn.Module, inputs: Any, optimizer: pp.Powerprop, masks: pp.Masks, method: str, target: str, rules: Layers
) -> dict[str, Any]:
    """The weights kept and asked for, and FLOPs relative to dense training."""
    flops = count_flops(model, inputs)
    return {
        "kept": {name: int(mask.count_nonzero()) for name, mask in masks.items()},
        "asked": asked(masks, METHODS[method], target, rules),
        "sparsity": masks.sparsity(),
        "inference_flops": flops.inference(masks),
        "training_flops": training_cost(flops, optimizer.sparsify, masks, optimizer.trainable),
    }


def is_exact(row: Row) -> bool:
    """True if the weights kept are, to the weight, those asked for."""
    kept, wanted = row["kept"], row["asked"]
    return bool(kept == wanted if isinstance(wanted, dict) else sum(kept.values()) == wanted)


def cell(rows: Rows, method: str, target: str, **more: Any) -> Rows:
    """The seeds of a method at a sparsity."""
    return rows.where(method=method, target=UNPRUNED if METHODS[method].dense else target, **more)


def title_of(target: str) -> str:
    """A target as shown: 95% or 90% (ERK)."""
    distribution, sparsity = parse(target)
    return f"{sparsity:.0%}" + (" (ERK)" if distribution == "erk" else "")


def curve(method: str, x: Sequence[float], values: Any) -> Curve:
    """A row of the table as a curve."""
    one, alone = METHODS[method], METHODS[method.removeprefix("pp-")]
    return Curve(one.label, None, x, values, method=alone.label, plain=not one.powerprop)


def against_sparsity(cfg: Any, rows: Rows, methods: Sequence[str]) -> dict[str, Curve]:
    """The number of the table against uniform sparsity, of methods that reached all of them with all seeds."""
    curves = {}
    for method in methods:
        runs = [cell(rows, method, target).values("test") for target in cfg.uniform]
        if runs and all(len(each) == cfg.seeds for each in runs):
            per_seed = [list(each) for each in zip(*runs, strict=True)]
            curves[method] = curve(method, [parse(target)[1] for target in cfg.uniform], per_seed)
    return curves


def sparsity_figure(curves: Mapping[str, Curve], what: str, caption: str = TWINS, **options: Any) -> list[Figure]:
    """These curves, if there are some."""
    title = f"{what[0].upper()}{what[1:]} against sparsity"
    drawn = list(curves.values())
    return [Figure("sparsity", lines, drawn, title=title, xlabel="sparsity", fractions=True, wide=True, caption=caption,
                   **options)] if drawn else []  # fmt: skip


def cost_figure(cfg: SparseSettings, rows: Rows, methods: Sequence[str], what: str, **options: Any) -> list[Figure]:
    """The number of the table against what the training cost, where the rates were chosen."""
    points = []
    for method in methods if cfg.tune_at in cfg.sparsities else ():
        found = cell(rows, method, cfg.tune_at)
        if cost := found.mean("training_flops"):
            points.append(Point(METHODS[method].label, cost.mean, Mean.of(found.values("test"))))
    title = f"{what} against the FLOPs of a training, {title_of(cfg.tune_at)} sparsity"
    labels = {"title": title, "xlabel": "FLOPs, dense = 1", "caption": "Filled markers: with Powerprop."}
    return [Figure("cost", scatter, points, **labels, **options)] if points else []


def methods_table(
    title: str, names: Sequence[str], columns: Mapping[Any, Column], value: Callable[[Any, str], Value], caption: str
) -> Table:
    """A row for each method with the value of each column's key."""
    shown: Columns = [(column, partial(value, key)) for key, column in columns.items()]
    return table(title, [("method", lambda name: METHODS[name].label), *shown], names, caption)


def cost_table(cfg: SparseSettings, rows: Rows) -> Table:
    """What each training costs, as a multiple of the dense one."""

    def value(target: str, name: str) -> Value:
        cost = cell(rows, name, target).mean("training_flops")
        return cost.mean if cost else "diverged"

    columns = {target: Column(title_of(target), digits=3) for target in cfg.sparsities}
    caption = "FLOPs of a training, dense = 1, as the papers on RigL and Top-KAST count them; mean over the seeds."
    return methods_table("Training FLOPs by method and sparsity", cfg.sparse, columns, value, caption)


def exactness(cfg: SparseSettings, rows: Rows) -> Section:
    """How many runs have exactly the sparsity asked, what that is over all layers, and what an image costs then."""

    def runs(target: str) -> Rows:
        return Rows(row for name in cfg.sparse for row in cell(rows, name, target).finished)

    def edge(of: str, choose: Callable[..., Any]) -> Callable[[str], Value]:
        return lambda target: choose(runs(target).values(of), default=None)

    columns: Columns = [
        ("asked", title_of), ("runs", lambda target: len(runs(target))),
        ("exact", lambda target: sum(map(is_exact, runs(target)))),
        (Percent("least sparsity", digits=4), edge("sparsity", min)),
        (Percent("most", digits=4), edge("sparsity", max)),
        (Column("least inference FLOPs", digits=3), edge("inference_flops", min)),
        (Column("most FLOPs", digits=3), edge("inference_flops", max)),
    ]  # fmt: skip
    caption = (
        "Counts are compared weight by weight. Sparsity is of all layers, of which the last has its own rule unless "
        "the distribution is ERK; FLOPs are relative to dense."
    )
    return Section("Sparsity asked and reached", tables=[table("Exact counts", columns, cfg.sparsities, caption)])
