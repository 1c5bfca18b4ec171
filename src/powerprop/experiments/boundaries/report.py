"""What a run without boundaries says: the loss with its change points, and both arms side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from powerprop.experiments.harness.experiment import Findings
from powerprop.experiments.harness.folder import plain
from powerprop.files import read_json
from powerprop.report import Cell, Column, Curve, Image, Page, Section, Stat, Table, lines

if TYPE_CHECKING:
    from powerprop.experiments.boundaries.config import Config

Runs = Sequence[dict[str, Any]]
"""The results of an arm, one for each seed."""

ARMS = {"found": "boundaries found", "told": "boundaries told"}
AROUND = 20
"""Batches before and after a change in the figure of the average change."""


def compose(config: Config, runs: Mapping[str, Runs], out: Path) -> Findings:
    """Draw the figures into `out/figures` and write the page, the table and the summary."""
    table = main_table(config, runs)
    notes = " ".join(sorted({run["note"] for each in runs.values() for run in each if run["note"]}))
    intro = (
        "Ten digits, the pixels of every task in an order of its own, in one unbroken stream of batches. One learner "
        "finds out by itself when the task changes, packs what it has learned and begins a new task; the other, on "
        "the same batches, is told."
    )
    page = Page(
        title="Permuted-MNIST without task boundaries",
        intro=f"{intro}\n\n{run_note(config)} {notes}".strip(),
        sections=[changes_section(config, runs["found"], out / "figures"), accuracy_section(config, table)],
        config=plain(asdict(config)),
        versions=read_json(out / "versions.json"),
        paper_reference="Section 5.3 mentions change-point detection as the way to do without task boundaries; it "
        "shows no numbers.",
        stats=stats(config, runs),
    )
    return Findings(page, table, summary(config, runs))


def run_note(config: Config) -> str:
    """What this run did."""
    seeds = "one seed" if config.seeds == 1 else f"{config.seeds} seeds"
    span = f"{config.shortest:,}" if config.shortest == config.longest else f"{config.shortest:,} to {config.longest:,}"
    return (
        f"This run: {config.tasks} tasks of {span} batches of {config.batch} images, Powerprop + EPN, "
        f"α = {config.alpha:g}, γ = {config.gamma:g}, {config.retrain_steps:,} retraining steps on the latest "
        f"{config.memory:,} batches, {seeds}."
    )


def main_table(config: Config, runs: Mapping[str, Runs]) -> Table:
    """One row per arm; the boundaries of the second were given, and no number says how well."""
    columns: list[str | Column] = [
        "", Column(f"found, of {config.tasks - 1}", digits=1), Column("missed", digits=1),
        Column("false alarms", digits=1), Column("delay, batches", digits=1),
        Column("task-incremental", "max", 2, percent=True),
        Column(f"class-incremental, {config.group} images", "max", 2, percent=True),
        Column("weights used", "min", 1, percent=True),
    ]  # fmt: skip
    rows: list[list[str | Cell | None]] = []
    for arm, label in ARMS.items():
        finding = counts(runs[arm]) if arm == "found" else [None] * 4
        known = [Cell.of(fmean(run[name]) for run in runs[arm]) for name in ("given", "inferred")]
        rows.append([label, *finding, *known, Cell.of(run["used"] for run in runs[arm])])
    caption = (
        f"A change counts as found if it is noticed within {config.delay} batches. The delay is the number of batches "
        "of the new task before the one that revealed it. Average test accuracy over all true tasks after the stream, "
        "in percent. Task-incremental: with the found task that shares most batches with the "
        "true one. Class-incremental: the task is inferred from so many images, and must be right."
    )
    return Table("Boundaries and accuracy", columns, rows, caption)


def counts(runs: Runs) -> list[Cell | None]:
    """Changes found, missed, false alarms, and the mean delay over the changes of a seed."""
    delays = [fmean(run["delays"]) for run in runs if run["delays"]]
    numbers = [Cell.of(len(run[name]) for run in runs) for name in ("delays", "missed", "false")]
    return [*numbers, Cell.of(delays) if delays else None]


def changes_section(config: Config, runs: Runs, figures: Path) -> Section:
    """The stream of the first seed, and the average change."""
    run = runs[0]
    whole = Curve("loss", config.alpha, range(len(run["losses"])), run["losses"])
    changes = (run["true"], [noticed for noticed, _ in run["found"]])
    pictures = [Image(lines([whole], figures / "stream.png", "Loss of each batch when it arrives", "batch",
                            "cross-entropy", changes=changes), wide=True)]  # fmt: skip
    if windows := around_changes(runs):
        mean = Curve("loss", config.alpha, range(-AROUND, AROUND + 1), windows)
        title = "The average change"
        pictures.append(Image(lines([mean], figures / "change.png", title, "batches after the change",
                                    "cross-entropy")))  # fmt: skip
    text = (
        "The first seed: dashed lines are the true changes, triangles the batches at which they were noticed. A change "
        f"must be certain, upwards and last {config.confirm} batches; the batches that wait meanwhile are trained on "
        f"as part of the task they belong to. {where_begun(runs)} The average change is one over all changes and seeds."
    )
    return Section("Change points", text, pictures)


def around_changes(runs: Runs) -> list[list[float]]:
    """The losses around every true change that has enough of them on both sides."""
    places = [(run["losses"], change) for run in runs for change in run["true"]]
    windows = [losses[max(0, change - AROUND) : change + AROUND + 1] for losses, change in places]
    return [window for window in windows if len(window) == 2 * AROUND + 1]


def where_begun(runs: Runs) -> str:
    """How often the first batch of a new task was named exactly."""
    begun = [start for run in runs for _, start in run["found"]]
    exact = sum(start in run["true"] for run in runs for _, start in run["found"])
    return f"Of {len(begun)} alarms, {exact} named the very first batch of the new task."


def accuracy_section(config: Config, table: Table) -> Section:
    """What the tasks are worth."""
    text = (
        "The arm that is told packs a task when its last batch has been trained on. Everything else is the same: "
        "first weights, batches, and the batches kept for packing."
    )
    return Section("Found and told", text, (), [table])


def stats(config: Config, runs: Mapping[str, Runs]) -> list[Stat]:
    """The numbers at the top of the page."""
    changes = sum(len(run["true"]) for run in runs["found"])
    found, false = (sum(len(run[name]) for run in runs["found"]) for name in ("delays", "false"))
    given, inferred = (
        {arm: fmean(fmean(run[name]) for run in each) for arm, each in runs.items()} for name in ("given", "inferred")
    )
    return [
        Stat("changes found", f"{found} of {changes}", f"{false} false alarms"),
        Stat("task-incremental", f"{given['found']:.2%}", f"{given['told']:.2%} with boundaries told"),
        Stat("class-incremental", f"{inferred['found']:.2%}", f"{inferred['told']:.2%} with boundaries told"),
    ]


def summary(config: Config, runs: Mapping[str, Runs]) -> dict[str, Any]:
    """The numbers of the report as plain data, without the losses."""
    kept = ("seed", "true", "found", "delays", "missed", "false", "given", "inferred", "used")
    return {
        "tasks": config.tasks,
        "arms": {
            arm: {
                "label": ARMS[arm],
                "task-incremental": fmean(fmean(run["given"]) for run in each),
                "class-incremental": fmean(fmean(run["inferred"]) for run in each),
                "runs": [{name: run[name] for name in kept} for run in each],
            }
            for arm, each in runs.items()
        },
    }
