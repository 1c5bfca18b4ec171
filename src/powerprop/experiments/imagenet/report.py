"""What an ImageNet run says: tables 1 and 2 with the paper's values beside ours, costs, and the figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerprop import models
from powerprop.experiments.harness.experiment import Findings, Results
from powerprop.experiments.harness.pages import run_page
from powerprop.experiments.imagenet.cells import MODELS, TABLE_1, TABLE_2, cell, chosen
from powerprop.experiments.imagenet.costs import Costs
from powerprop.experiments.imagenet.figures import curves, extreme, oneshot
from powerprop.experiments.imagenet.measured import Measured, collect, column, label
from powerprop.report import Column, Headline, Mean, Section, Stat, Table

if TYPE_CHECKING:
    from powerprop.experiments.imagenet.config import Config

PAPER = (
    "Section 5.2: tables 1 and 2, the extreme-sparsity figure; section 5.1: figure 3 b and c. The paper's values are "
    "top-1 accuracies of ResNet-50 on ImageNet."
)


def report(config: Config, results: Results, out: Path) -> Findings:
    """Draw the figures into `out/figures` and write the page, the table and the summary."""
    measured = [collect(config, each, results, out) for each in chosen(config.cells, config.alphas, config.only)]
    costs = Costs(MODELS[config.model](config.classes, width=config.width), config.crop)
    table = table_one(measured)
    figures = out / "figures"
    sections = [
        Section("Sparse training (table 1)", NOTE, curves(measured, figures), [table]),
        *extreme(measured, figures),
        Section("Extended training (table 2)", EXTENDED, [], [table_two(measured)]),
        *oneshot(measured, figures),
        Section("Sparsity and cost", COSTS, [], [cost_table(measured, costs)]),
        *diverged(measured),
    ]
    title = "Sparse training on ImageNet" if comparable(config) else "The ImageNet pipeline on ten small classes"
    page = run_page(out, config, title, intro(config), PAPER, sections, stats(measured), headline(config, measured))
    return Findings(page, table, summary(measured, costs))


def comparable(config: Config) -> bool:
    """True if the run is the paper's, so that its numbers may be held against the printed ones."""
    return (config.data, config.model, config.width, config.crop) == ("imagenet", "resnet50", 64, 224)


def intro(config: Config) -> str:
    """What this run did, and what it does not say."""
    network = f"{config.model} with {config.width} channels in its first stage"
    ran = f"This run: {network}, {config.crop}x{config.crop}, {config.steps:,} steps of {config.batch} pictures"
    seeds = "one seed" if config.seeds == 1 else f"{config.seeds} seeds"
    text = f"{ran} of {config.data}, {config.classes} classes, {seeds}, {config.precision}."
    if comparable(config):
        return text
    return (
        "This is not ImageNet: a small network and a small set of pictures go through the code of the paper's "
        f"protocol, to show that it works from the JPEG files to the tables.\n\n{text} Its accuracies say nothing "
        "about ImageNet's, and a few points between two rows are noise; the paper's values stand beside them for the "
        "shape of the table alone."
    )


NOTE = (
    "Top-1 validation accuracy in percent. Uniform sparsity leaves the first convolution dense and prunes the last "
    "layer to at most 80%; ERK prunes both. Top-KAST* has 0% backward sparsity, Top-KAST† 50%. Every method has the "
    "paper's base learning rate: 0.4 for Powerprop + Iterative pruning, 0.1 for all others."
)


def table_one(measured: Sequence[Measured]) -> Table:
    """One row per method, two columns per sparsity: ours and the paper's."""
    single = [m for m in measured if m.cell.times == 1 and m.cell.row != "pp-dense"]
    names = list(dict.fromkeys((m.cell.distribution, m.cell.sparsity) for m in single))
    at = {(m.cell.row, (m.cell.distribution, m.cell.sparsity)): m for m in single}
    columns: list[str | Column] = [""]
    for distribution, sparsity in names:
        title = f"{100 * sparsity:g}%" + (" (ERK)" if distribution == "erk" else "") if sparsity else "dense"
        columns += [Column(title, "max", 2, percent=True), Column(f"{title}, paper", paper=True)]
    rows = []
    for row in dict.fromkeys(m.cell.row for m in single):
        values: list[Any] = [label(row) if row != "dense" else "Dense"]
        for name in names:
            found = at.get((row, name))
            values += [found.value() if found else None, TABLE_1.get(found.cell.name) if found else None]
        rows.append(values)
    return Table("Accuracy of sparse networks", columns, rows)


EXTENDED = (
    "Training k times as long, the schedule stretched with it. FLOPs are those of ResNet-50 at 224x224, relative to "
    "dense training of a single length, counted as in docs/flops.md. The value printed for RigL at uniform 90% holds "
    "only if the first convolution is counted as sparse, although the protocol leaves it dense: hence both. The "
    "paper's row of iterative pruning is Gale et al.'s, with a pruning schedule of its own."
)
COSTS = "FLOPs of this run's network relative to the dense one; training includes the length of the cell."


def table_two(measured: Sequence[Measured]) -> Table:
    """The paper's cells with their FLOPs, which need no training, and our accuracies where they were run."""
    costs = Costs(models.resnet50(), 224)
    runs = {m.cell.name: m for m in measured}
    extra = [m.cell.name for m in measured if m.cell.times != 1 and m.cell.name not in TABLE_2]
    columns: list[str | Column] = [
        "", "sparsity", Column("accuracy", "max", 2, percent=True), Column("accuracy, paper", paper=True),
        Column("FLOPs", digits=2), Column("FLOPs, first convolution sparse", digits=2),
        Column("FLOPs, paper", digits=2, paper=True),
    ]  # fmt: skip
    rows = []
    for name in [*TABLE_2, *extra]:
        this = cell(name)
        printed = TABLE_2.get(name, ("", None))
        stem = costs.training(this, sparse_stem=True) if this.distribution == "uniform" else None
        found = runs[name].value() if name in runs else None
        title = f"{label(this.row)} ({this.times:g}x)"
        rows.append([title, column(this), found, printed[0], costs.training(this), stem, printed[1]])
    return Table("Extended training", columns, rows)


def cost_table(measured: Sequence[Measured], costs: Costs) -> Table:
    """Sparsity asked and measured, and FLOPs."""
    columns: list[str | Column] = [
        "", "sparsity asked", Column("measured", percent=True, digits=2), Column("inference FLOPs", digits=3),
        Column("training FLOPs", digits=3),
    ]  # fmt: skip
    rows: list[list[Mean | float | str]] = []
    for m in measured:
        if m.runs:
            kept, sparsity = m.runs[0].kept, Mean.of(run.sparsity for run in m.runs)
            name = m.label if m.cell.times == 1 else f"{m.label} ({m.cell.times:g}x)"
            rows.append([name, column(m.cell), sparsity, costs.inference(kept), costs.training(m.cell, kept)])
    note = "The sparsity asked is that of the layers without a rule of their own."
    return Table("Sparsity and FLOPs", columns, rows, note)


def diverged(measured: Sequence[Measured]) -> list[Section]:
    """Which trainings diverged, and how; nothing if none did."""
    lost = [text for m in measured for text in m.diverged]
    return [Section("Diverged", "\n\n".join(lost))] if lost else []


def stats(measured: Sequence[Measured]) -> list[Stat]:
    """The numbers at the top: what Powerprop adds to the method alone, where both were run."""
    at = {m.cell.name: m for m in measured if m.runs}
    found = []
    for name, m in at.items():
        twin = at.get(name.removeprefix("pp-"))
        if name.startswith("pp-") and twin is not None:
            note = f"{100 * m.accuracy:.2f} against {100 * twin.accuracy:.2f} at {column(m.cell)}"
            found.append(Stat(m.label, f"{100 * (m.accuracy - twin.accuracy):+.2f} points", note))
    return found


def headline(config: Config, measured: Sequence[Measured]) -> Headline | None:
    """What Powerprop adds to iterative pruning at the highest sparsity where both were run, ours and the paper's."""
    at = {m.cell.name: m for m in measured if m.runs}
    pairs = [(m, at[name.removeprefix("pp-")]) for name, m in at.items() if name.removeprefix("pp-") in at]
    pairs = [pair for pair in pairs if pair[0].cell.row == "pp-iterative" and pair[0].cell.name in TABLE_1]
    if not pairs:
        return None
    ours, alone = max(pairs, key=lambda pair: pair[0].cell.sparsity)
    printed = [TABLE_1[m.cell.name].partition(" ")[0] for m in (ours, alone)]
    where = "" if comparable(config) else " (ten small classes, not ImageNet)"
    what = f"{ours.label} against {alone.label}, top-1 accuracy at {column(ours.cell)}{where}"
    found = [100 * m.accuracy for m in (ours, alone)]
    gain = f"{found[0] - found[1]:+.2f} points ({found[0]:.2f} against {found[1]:.2f})"
    paper = f"{float(printed[0]) - float(printed[1]):+.1f} points ({printed[0]} against {printed[1]})"
    return Headline(what, gain, paper)


def summary(measured: Sequence[Measured], costs: Costs) -> dict[str, Any]:
    """The numbers of the report as plain data."""
    return {
        "cells": [
            {
                "cell": m.cell.name, "label": m.label, "runs": len(m.runs), "diverged": len(m.diverged),
                "accuracy": [r.accuracy for r in m.runs],
                "paper": TABLE_1.get(m.cell.name, TABLE_2.get(m.cell.name, ("", None))[0] or None),
                "sparsity": [r.sparsity for r in m.runs],
                "training_flops": costs.training(m.cell, m.runs[0].kept) if m.runs else None,
            }
            for m in measured
        ],
    }  # fmt: skip
