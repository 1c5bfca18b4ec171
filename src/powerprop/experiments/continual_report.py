"""What a continual-learning run says: figures, tables, and the numbers behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from powerprop.experiments.base import Findings, Results
from powerprop.experiments.continual import Arm, Config, arms, rate
from powerprop.experiments.folder import plain
from powerprop.files import read_json
from powerprop.report import Cell, Column, Curve, Image, Page, Section, Stat, Table, heatmap, lines

GIVEN, INFERRED = "task-incremental", "class-incremental"


@dataclass(frozen=True)
class Story:
    """The words of a report, and rows of the paper: (label, task-incremental, class-incremental, weights used)."""

    title: str
    paper: str
    intro: str
    rows: tuple[tuple[str, str, str, str], ...] = ()


@dataclass(frozen=True)
class Measured:
    """The finished runs of an arm, without those that diverged."""

    arm: Arm
    runs: list[dict[str, Any]]
    diverged: int

    def given(self) -> Cell:
        """Average accuracy over all tasks after the last, with the task given."""
        return Cell.of(fmean(run["accuracy"]) for run in self.runs)

    def inferred(self, group: int) -> Cell:
        """The same with the task inferred by the default method from groups of this size."""
        whole = [run.get("class_incremental") for run in self.runs]
        if all(each is not None and each["group"] == group for each in whole):
            return Cell.of(fmean(each["accuracy"]) for each in whole if each is not None)
        return self.probed("shortlist", group, 1)

    def probed(self, method: str, group: int, what: int, at: int = -1) -> Cell:
        """The fraction of right tasks (what = 0) or right classes (1) in a probe of task inference."""
        return Cell.of(run["inference"][at]["rates"][method][str(group)][what] for run in self.runs)

    def used(self) -> Cell:
        """The fraction of weights used after the last task."""
        return Cell.of(run["used"][-1] for run in self.runs)


def measure(config: Config, arm: Arm, results: Results) -> Measured:
    """The seeds of an arm."""
    runs = [results[arm.job(seed).key] for seed in range(config.seeds)]
    good = [run for run in runs if "diverged" not in run]
    return Measured(arm, good, len(runs) - len(good))


def compose(config: Config, results: Results, out: Path, story: Story) -> Findings:
    """Draw the figures into `out/figures` and write the page, the table and the summary."""
    everything = [measure(config, arm, results) for arm in arms(config)]
    measured = [m for m in everything if m.runs]
    table = main_table(config, measured, story, sum(m.diverged for m in everything))
    notes = " ".join(sorted({run["note"] for m in measured for run in m.runs if run["note"]}))
    figures = out / "figures"
    sections = [
        curves_section(measured, table, figures),
        *(matrix_section(m, figures) for m in measured[-1:] if config.matrix),
        inference_section(config, measured, figures),
    ]
    page = Page(
        title=story.title,
        intro=f"{story.intro}\n\n{run_note(config)} {notes}".strip(),
        sections=sections,
        config=plain(asdict(config)),
        versions=read_json(out / "versions.json"),
        paper_reference=story.paper,
        stats=stats(config, measured),
    )
    return Findings(page, table, summary(config, measured))


def run_note(config: Config) -> str:
    """What this run did, for a reader who will compare it with the paper."""
    seeds = "one seed" if config.seeds == 1 else f"{config.seeds} seeds"
    tested = f"the first {config.test:,} test images of a task" if config.test else "all test images"
    steps = f"{config.steps:,} training and {config.retrain_steps:,} retraining steps per task"
    return f"This run: {config.tasks} tasks, {steps} of {config.batch} images, γ = {config.gamma:g}, {seeds}, {tested}."


def main_table(config: Config, measured: Sequence[Measured], story: Story, diverged: int) -> Table:
    """One row per arm, then the paper's; the scenario of every number is in the heading."""
    group, single = max(config.groups), 1 in config.groups
    columns: list[str | Column] = [
        "", "lr",
        Column(GIVEN, "max", 2, percent=True),
        Column(f"{INFERRED}, {group} images", "max", 2, percent=True),
        *([Column(f"{INFERRED}, 1 image", "max", 1, percent=True)] if single else []),
        Column("weights used", "min", 1, percent=True),
    ]  # fmt: skip
    rows: list[list[str | Cell | None]] = []
    for m in measured:
        inferred = [m.inferred(group), *([m.inferred(1)] if single else [])]
        rows.append([m.arm.label, f"{rate(config, m.arm.alpha):.3g}", m.given(), *inferred, m.used()])
    for label, given, inferred_paper, used in story.rows:
        rows.append([label, "", given, inferred_paper, *([""] if single else []), used])
    lost = f" {diverged} runs diverged." if diverged else ""
    caption = (
        "Average test accuracy over all tasks after the last, in percent. Task-incremental: the task is given. "
        f"Class-incremental: it is inferred from so many images by the default method, and must be right.{lost}"
    )
    return Table("All tasks, after the last", columns, rows, caption)


def curves_section(measured: Sequence[Measured], table: Table, figures: Path) -> Section:
    """Average accuracy and used weights against the number of tasks."""
    averages = [_curve(m, [_running_mean(run["accuracy"]) for run in m.runs]) for m in measured]
    used = [_curve(m, [run["used"] for run in m.runs]) for m in measured]
    across = "tasks learned"
    text = (
        "Left: the average over all tasks learned so far, each with its own sub-network. Nothing changes once it is "
        "learned: the logits of earlier tasks are compared bit for bit during the run. Right: the fraction of weights "
        "that some task uses."
    )
    first = lines(averages, figures / "average.png", f"Average accuracy ({GIVEN})", across, "accuracy", percent=True)
    second = lines(used, figures / "used.png", "Weights in use", across, "fraction of weights", percent=True)
    return Section("Accuracy and capacity", text, [Image(first), Image(second)], [table])


def matrix_section(m: Measured, figures: Path) -> Section:
    """The accuracy matrix and which task was inferred, of the first seed of an arm."""
    run = m.runs[0]
    size = len(run["matrix"])
    rows = [row + [float("nan")] * (size - len(row)) for row in run["matrix"]]
    first = heatmap(rows, figures / "matrix.png", f"Accuracy on every task ({GIVEN})")
    found = run["class_incremental"]
    title = f"Task inferred from {found['group']} images"
    second = heatmap(found["confusion"], figures / "confusion.png", title, "inferred task", "true task", "images")
    return Section("Task by task", f"{m.arm.label}, first seed.", [Image(first), Image(second)])


def inference_section(config: Config, measured: Sequence[Measured], figures: Path) -> Section:
    """How often the task is inferred rightly against the size of the group, and at several numbers of tasks."""
    m = measured[-1]
    probes = [run["inference"][-1]["rates"] for run in m.runs]
    curves = [
        Curve(method, None, [float(g) for g in groups], [[probe[method][g][0] for g in groups] for probe in probes])
        for method, groups in probes[0].items()
    ]
    title = "Right task against the number of images judged together"
    path = lines(curves, figures / "inference.png", title, "images", "right task", percent=True, logx=True)
    text = (
        f"{m.arm.label}. `exhaustive` asks every sub-network; `shortlist` (the default) the four whose inputs look "
        "most alike; `oneshot` and `binary` follow the gradient of a mixture of all masks. "
        f"Probed on {config.probe} test images of up to {config.probed} tasks."
    )
    return Section("Task inference", text, [Image(path, wide=True)], [inference_table(config, m)])


def inference_table(config: Config, m: Measured) -> Table:
    """One row per method, one column per number of tasks learned, at the largest group."""
    probes, group = m.runs[0]["inference"], max(config.groups)
    columns: list[str | Column] = ["", *(Column(f"{p['tasks']} tasks", "max", 1, percent=True) for p in probes)]
    methods = list(probes[-1]["rates"])
    rows: list[list[str | Cell]] = [
        [method, *(m.probed(method, group, 0, at) for at in range(len(probes)))] for method in methods
    ]
    return Table(f"Right task from {group} images", columns, rows, "In percent.")


def stats(config: Config, measured: Sequence[Measured]) -> list[Stat]:
    """The numbers at the top of the page."""
    best = max(measured, key=lambda m: m.given().mean)
    group = max(config.groups)
    return [
        Stat("task given", f"{best.given().mean:.2%}", f"{best.arm.label}, {GIVEN}"),
        Stat("task inferred", f"{best.inferred(group).mean:.2%}", f"from {group} images, {INFERRED}"),
        Stat("weights used", f"{best.used().mean:.1%}", f"after {config.tasks} tasks"),
    ]


def summary(config: Config, measured: Sequence[Measured]) -> dict[str, Any]:
    """The numbers of the report as plain data."""
    group = max(config.groups)
    return {
        "tasks": config.tasks,
        "arms": [
            {
                "label": m.arm.label, "method": m.arm.method, "alpha": m.arm.alpha, "lr": rate(config, m.arm.alpha),
                "seeds": len(m.runs), "diverged": m.diverged,
                GIVEN: m.given().mean, INFERRED: m.inferred(group).mean, "group": group, "used": m.used().mean,
                "accuracy": _curve(m, [_running_mean(run["accuracy"]) for run in m.runs]).mean.tolist(),
                "used_weights": _curve(m, [run["used"] for run in m.runs]).mean.tolist(),
                "inference": m.runs[0]["inference"],
            }
            for m in measured
        ],
    }  # fmt: skip


def _curve(m: Measured, values: list[list[float]]) -> Curve:
    return Curve(m.arm.label, m.arm.alpha, list(range(1, len(values[0]) + 1)), values, m.arm.method == "packnet")


def _running_mean(values: Sequence[float]) -> list[float]:
    return [fmean(values[: i + 1]) for i in range(len(values))]
