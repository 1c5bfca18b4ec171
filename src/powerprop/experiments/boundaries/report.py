"""What a run without boundaries says: the loss with its change points, and the arms side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from powerprop.experiments.boundaries.results import Streamed
from powerprop.experiments.harness.experiment import Findings, Job, Results, RunError
from powerprop.experiments.harness.pages import run_page
from powerprop.experiments.harness.typed import Diverged, result_of
from powerprop.report import Column, Curve, Headline, Mean, Section, Stat, Table, lines
from powerprop.train.precision import precision_note

if TYPE_CHECKING:
    from powerprop.experiments.boundaries.config import Config

Runs = Sequence[Streamed]
"""The results of an arm, one for each seed."""

ARMS = {"found": "boundaries found", "told": "boundaries told", "frugal": "boundaries found, packed frugally"}
AROUND = 20
"""Batches before and after a change in the figure of the average change."""


def read_runs(jobs: Sequence[Job], results: Results) -> dict[str, Runs]:
    """The results of the arms, seed by seed."""
    runs: dict[str, list[Streamed]] = {arm: [] for arm in ARMS}
    for job in jobs:
        found = result_of(Streamed, results, job.key)
        if isinstance(found, Diverged):
            raise RunError(f"{job.key} diverged: {found.diverged}")
        runs[job.settings["arm"]].append(found)
    return dict(runs)


def findings(config: Config, runs: Mapping[str, Runs], out: Path) -> Findings:
    """Draw the figures into `out/figures` and write the page, the table and the summary."""
    table = main_table(config, runs)
    notes = " ".join(sorted({run.note for each in runs.values() for run in each if run.note}))
    intro = (
        "Ten digits, the pixels of every task in an order of its own, in one unbroken stream of batches. One learner "
        "finds out by itself when the task changes, packs what it has learned and begins a new task; another, on the "
        "same batches, is told; a third finds out too and packs frugally."
    )
    page = run_page(
        out,
        config,
        title="Permuted-MNIST without task boundaries",
        intro=f"{intro}\n\n{run_note(config)} {notes}".strip(),
        paper="Section 5.3 mentions change-point detection as the way to do without task boundaries; it shows no "
        "numbers.",
        sections=[changes_section(config, runs["found"], out / "figures"), accuracy_section(config, table)],
        stats=stats(config, runs),
        headline=headline(runs),
    )
    return Findings(page, table, summary(config, runs))


def run_note(config: Config) -> str:
    """What this run did."""
    seeds = "one seed" if config.seeds == 1 else f"{config.seeds} seeds"
    span = f"{config.shortest:,}" if config.shortest == config.longest else f"{config.shortest:,} to {config.longest:,}"
    return (
        f"This run: {config.tasks} tasks of {span} batches of {config.batch} images, Powerprop + EPN, "
        f"α = {config.alpha:g}, γ = {config.gamma:g}, {config.retrain_steps:,} retraining steps on the latest "
        f"{config.memory:,} batches, {seeds}. Packed frugally: γ = {config.frugal_gamma:g}, pruned at most "
        f"{config.prunings} times more, {config.pruning_steps} steps apart, reusing the output layer of earlier tasks "
        "alone." + "".join(f" {each}." for each in precision_note(config.precision))
    )


def main_table(config: Config, runs: Mapping[str, Runs]) -> Table:
    """One row per arm; where boundaries were told, no number says how well they were found."""
    columns: list[str | Column] = [
        "", Column(f"found, of {config.tasks - 1}", digits=1), Column("missed", digits=1),
        Column("false alarms", digits=1), Column("delay, batches", digits=1),
        Column("task-incremental", "max", 2, percent=True),
        Column(f"class-incremental, {config.group} images", "max", 2, percent=True),
        Column("weights used", "min", 1, percent=True),
    ]  # fmt: skip
    rows: list[list[str | Mean | None]] = []
    for arm, label in ARMS.items():
        finding = [None] * 4 if arm == "told" else counts(runs[arm])
        known = [Mean.of(values) for values in accuracies(runs[arm])]
        rows.append([label, *finding, *known, Mean.of(run.used for run in runs[arm])])
    caption = (
        f"A change counts as found if it is noticed within {config.delay} batches. The delay is the number of batches "
        "of the new task before the one that revealed it. Average test accuracy over all true tasks after the stream, "
        "in percent. Task-incremental: with the found task that shares most batches with the "
        "true one. Class-incremental: the task is inferred from so many images, and must be right."
    )
    return Table("Boundaries and accuracy", columns, rows, caption)


def accuracies(runs: Runs) -> tuple[list[float], list[float]]:
    """The average over all tasks of every seed, with the task given and inferred."""
    return [fmean(run.given) for run in runs], [fmean(run.inferred) for run in runs]


def counts(runs: Runs) -> list[Mean | None]:
    """Changes found, missed, false alarms, and the mean delay over the changes of a seed."""
    delays = [fmean(run.delays) for run in runs if run.delays]
    numbers = [
        Mean.of(len(run.delays) for run in runs),
        Mean.of(len(run.missed) for run in runs),
        Mean.of(len(run.false) for run in runs),
    ]
    return [*numbers, Mean.of(delays) if delays else None]


def changes_section(config: Config, runs: Runs, figures: Path) -> Section:
    """The stream of the first seed, and the average change."""
    run = runs[0]
    whole = Curve("loss", config.alpha, range(len(run.losses)), run.losses)
    pictures = [
        lines(
            [whole], figures / "stream.svg", "Loss of each batch when it arrives", "batch", "cross-entropy",
            changes=(run.true, [noticed for noticed, _ in run.found]), wide=True,
        )
    ]  # fmt: skip
    if windows := around_changes(runs):
        mean = Curve("loss", config.alpha, range(-AROUND, AROUND + 1), windows)
        pictures.append(
            lines(
                [mean], figures / "change.svg", "The average change", "batches after the change", "cross-entropy",
                wide=True,
            )
        )  # fmt: skip
    text = (
        "The first seed: dashed lines are the true changes, triangles the batches at which they were noticed. A change "
        f"must be certain, upwards and last {config.confirm} batches; the batches that wait meanwhile are trained on "
        f"as part of the task they belong to. {where_begun(runs)} The average change is one over all changes and seeds."
    )
    return Section("Change points", text, pictures)


def around_changes(runs: Runs) -> list[list[float]]:
    """The losses around every true change that has enough of them on both sides."""
    places = [(run.losses, change) for run in runs for change in run.true]
    windows = [losses[max(0, change - AROUND) : change + AROUND + 1] for losses, change in places]
    return [window for window in windows if len(window) == 2 * AROUND + 1]


def where_begun(runs: Runs) -> str:
    """How often the first batch of a new task was named exactly."""
    begun = [start for run in runs for _, start in run.found]
    exact = sum(start in run.true for run in runs for _, start in run.found)
    return f"Of {len(begun)} alarms, {exact} named the very first batch of the new task."


def accuracy_section(config: Config, table: Table) -> Section:
    """What the tasks are worth."""
    text = (
        "The learner that is told packs a task when its last batch has been trained on. The one that packs frugally "
        "prunes gradually and leaves the hidden weights of earlier tasks out while a new one is trained. Everything "
        "else is the same: first weights, batches, and the batches kept for packing."
    )
    return Section("Found, told and packed frugally", text, (), [table])


def stats(config: Config, runs: Mapping[str, Runs]) -> list[Stat]:
    """The numbers at the top of the page."""
    changes, found, false = totals(runs["found"])
    means = {arm: [fmean(values) for values in accuracies(each)] for arm, each in runs.items()}
    (given, inferred), (given_told, inferred_told) = means["found"], means["told"]
    used = fmean(run.used for run in runs["frugal"])
    return [
        Stat("changes found", f"{found} of {changes}", f"{false} false alarms"),
        Stat("task-incremental", f"{given:.2%}", f"{given_told:.2%} with boundaries told"),
        Stat("class-incremental", f"{inferred:.2%}", f"{inferred_told:.2%} with boundaries told"),
        Stat("packed frugally", f"{means['frugal'][0]:.2%}", f"with {used:.1%} of the weights"),
    ]


def totals(runs: Runs) -> tuple[int, int, int]:
    """Over all seeds: changes, those that were found, false alarms."""
    return sum(len(r.true) for r in runs), sum(len(r.delays) for r in runs), sum(len(r.false) for r in runs)


def headline(runs: Mapping[str, Runs]) -> Headline:
    """Changes found, and the accuracy that this costs nothing of."""
    changes, found, false = totals(runs["found"])
    given, told = (fmean(accuracies(runs[arm])[0]) for arm in ("found", "told"))
    what = "changes of task found; task-incremental accuracy, in brackets with boundaries told"
    ours = f"{found} of {changes}, {false} false alarms; {100 * given:.2f} ({100 * told:.2f})"
    return Headline(what, ours, "no numbers")


def summary(config: Config, runs: Mapping[str, Runs]) -> dict[str, Any]:
    """The numbers of the report as plain data, without the losses."""
    arms = {}
    for arm, each in runs.items():
        given, inferred = accuracies(each)
        kept = [{name: value for name, value in asdict(run).items() if name not in ("losses", "note")} for run in each]
        arms[arm] = {
            "label": ARMS[arm],
            "task-incremental": fmean(given),
            "class-incremental": fmean(inferred),
            "runs": kept,
        }
    return {"tasks": config.tasks, "arms": arms}
