"""What the experiment on task inference says: a table for every stream, a picture, and the inputs of no task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from powerprop.experiments.harness.experiment import Findings, Job, Results
from powerprop.experiments.harness.pages import run_page
from powerprop.experiments.harness.typed import result_of
from powerprop.experiments.inference.config import Config
from powerprop.experiments.inference.results import Asked
from powerprop.experiments.inference.streams import FOREIGN
from powerprop.report import Column, Curve, Headline, Mean, Section, Table, lines

BY_CLASS = "shortlist, means per class"
ABOUT = (
    "`exhaustive` asks every sub-network, `oneshot` and `binary` follow the gradient of a mixture of all masks: the "
    "paper's ways. `shortlist`, the default, compares inputs with a mean input stored for every task, or for every "
    "class of it, which the paper's method does not have: it is told apart from the others on purpose. Superfluous: "
    "outputs that stand for no class; the two methods named after them follow the log-sum-exp of these outputs instead "
    "of the entropy. Standardised: every pixel of every task has mean 0 and variance 1, so that one mean per task says "
    "nothing."
)
UNKNOWN = (
    "The fraction of single images that is flagged as being of no task. The limit is set on each task's validation "
    "images so that {rate:.0%} of them exceed it; `known` are test images of the tasks, which must not be flagged: the "
    "rate of false alarms. The entropy is that of the surest sub-network, with a limit set likewise."
)


def findings(config: Config, jobs: Sequence[Job], results: Results, out: Path) -> Findings:
    """Draw the pictures into `out/figures` and write the page, the table and the summary."""
    runs = [(job, result_of(Asked, results, job.key)) for job in jobs]
    kept = [(job, run) for job, run in runs if isinstance(run, Asked)]
    table = unknown_table(config, kept)
    sections = [stream_section(config, stream, kept, out / "figures") for stream in config.streams]
    sections.append(Section("Inputs of no task", UNKNOWN.format(rate=config.rate), tables=[table]))
    notes = " ".join(sorted({run.note for _, run in kept if run.note}))
    steps = f"{config.steps:,} + {config.retrain_steps:,} steps per task, width {config.width}, α = {config.alpha:g}"
    page = run_page(
        out, config, "Task inference, every method", f"{ABOUT}\n\nThis run: {steps}. {notes}".strip(),
        "Section 4.2 describes the inference; no table compares its forms.", sections, (), headline(config, kept),
    )  # fmt: skip
    summary = {job.key: {"rates": run.rates, "unknown": run.unknown} for job, run in kept}
    return Findings(page, table, {"runs": summary})


def stream_section(config: Config, stream: str, runs: Sequence[tuple[Job, Asked]], figures: Path) -> Section:
    """The table of one stream, and a picture of its plain form without superfluous outputs."""
    rows: list[list[str | Mean]] = []
    for inputs in config.inputs:
        for more in config.superfluous:
            found = chosen(runs, stream, inputs, more)
            for method in found[0].rates:
                means = [Mean.of(run.rates[method][str(group)] for run in found) for group in config.groups]
                rows.append([inputs, str(more), method, *means])
    images = [f"{group} image{'s' if group > 1 else ''}" for group in config.groups]
    columns: list[str | Column] = [
        "inputs",
        "superfluous",
        "method",
        *(Column(n, "max", 1, percent=True) for n in images),
    ]
    first = chosen(runs, stream, config.inputs[0], config.superfluous[0])
    curves = [
        Curve(method, None, [float(g) for g in config.groups],
              [[run.rates[method][str(g)] for g in config.groups] for run in first], method=method)
        for method in first[0].rates
    ]  # fmt: skip
    title = f"Right task, {stream} MNIST, {config.inputs[0]} inputs"
    picture = lines(
        curves, figures / f"{stream}.svg", title, "images", "right task", percent=True, logx=True, wide=True
    )
    accuracy = fmean(run.accuracy for run in first)
    text = f"{len(first)} run{'s' if len(first) > 1 else ''}; the task given, accuracy is {accuracy:.1%}."
    return Section(
        f"{stream.capitalize()} MNIST", text, [picture], [Table(f"Right task, {stream}", columns, rows, "In percent.")]
    )


def unknown_table(config: Config, runs: Sequence[tuple[Job, Asked]]) -> Table:
    """One row per stream, kind of inputs and flag; without superfluous outputs, or with the fewest."""
    rows: list[list[str | Mean]] = []
    for stream in config.streams:
        for inputs in config.inputs:
            found = chosen(runs, stream, inputs, min(config.superfluous))
            for by in found[0].unknown:
                means = [Mean.of(run.unknown[by][kind] for run in found) for kind in ("known", *FOREIGN)]
                rows.append([stream, inputs, by, *means])
    columns: list[str | Column] = [
        "stream",
        "inputs",
        "flagged by",
        Column("known (false alarms)", "min", 1, percent=True),
    ]
    columns += [Column(kind, "max", 1, percent=True) for kind in FOREIGN]
    return Table("Flagged as unknown, single images", columns, rows, "In percent.")


def chosen(runs: Sequence[tuple[Job, Asked]], stream: str, inputs: str, superfluous: int) -> list[Asked]:
    """The runs of a setting."""
    asked: dict[str, Any] = {"stream": stream, "inputs": inputs, "superfluous": superfluous}
    return [run for job, run in runs if asked.items() <= job.settings.items()]


def headline(config: Config, runs: Sequence[tuple[Job, Asked]]) -> Headline:
    """One number of the first stream, with that of the method which stores nothing beside it."""
    group = max(config.groups)
    found = chosen(runs, config.streams[0], config.inputs[0], config.superfluous[0])
    values = [fmean(run.rates[method][str(group)] for run in found) for method in ("shortlist", "exhaustive")]
    what = f"right task, {config.streams[0]} MNIST, {group} images: with stored means, and without (exhaustive)"
    return Headline(what, f"{values[0]:.1%}, {values[1]:.1%}", "no numbers")
