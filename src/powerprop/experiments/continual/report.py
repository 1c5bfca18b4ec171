"""What a continual-learning run says: figures, tables, and the numbers behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from powerprop.experiments.continual.arms import arms, tried
from powerprop.experiments.continual.candidates import choose
from powerprop.experiments.continual.checks import BY_VALIDATION
from powerprop.experiments.continual.config import Config
from powerprop.experiments.continual.measured import GIVEN, INFERRED, Measured, compared, measure, summary
from powerprop.experiments.harness.experiment import Findings, Results
from powerprop.experiments.harness.pages import run_page
from powerprop.report import Column, Curve, Headline, Mean, Section, Stat, Table, heatmap, lines
from powerprop.train.precision import precision_note

FORGOTTEN = (
    " Forgetting: the best accuracy that a task ever had minus its last; backward transfer: its last minus the one "
    "right after it was learned; means over all tasks but the last, the task given."
)
PROBED = (
    "It is measured on {} images of each of {} tasks, evenly spaced, and may come out above the average over all tasks."
)


@dataclass(frozen=True)
class Story:
    """The words of a report, and rows of the paper: (label, task-incremental, class-incremental, weights used).

    printed: what the paper prints of the headline; by default the class-incremental value of its last row.
    """

    title: str
    paper: str
    intro: str
    rows: tuple[tuple[str, str, str, str], ...] = ()
    printed: str = ""


def findings(config: Config, results: Results, out: Path, story: Story) -> Findings:
    """Draw the figures into `out/figures` and write the page, the table and the summary."""
    everything = [measure(config, arm, results) for arm in arms(config)]
    measured = [m for m in everything if m.runs]
    lost = [text for m in everything for text in m.diverged]
    table = main_table(config, measured, story, len(lost))
    notes = " ".join(sorted(set().union(*(m.notes for m in everything))))
    page = run_page(
        out, config, story.title, f"{story.intro}\n\n{run_note(config)} {notes}".strip(), story.paper,
        [
            *sections(config, measured, table, out / "figures"), *candidates_section(config, results),
            *diverged_section(lost),
        ],
        stats(config, measured) if measured else [], headline(config, measured, story) if measured else None,
    )  # fmt: skip
    return Findings(page, table, summary(config, everything))


def sections(config: Config, measured: Sequence[Measured], table: Table, figures: Path) -> list[Section]:
    """What the runs that came to their end show; without any, the table alone."""
    if not measured:
        return [Section("Accuracy and capacity", "No run came to its end.", tables=[table])]
    return [
        curves_section(measured, table, figures),
        *([matrix_section(best(measured), figures)] if config.matrix else []),
        inference_section(config, measured, figures),
    ]


def candidates_section(config: Config, results: Results) -> list[Section]:
    """What the candidates came to; nothing if there were none."""
    if not config.candidates:
        return []
    rows: list[list[str]] = []
    for arm in arms(config):
        found = tried(config, arm, results)
        best_of_all = choose(found, config.tasks)
        for text in config.candidates:
            each = found.get(text)
            numbers = [f"{100 * each.validation:.2f}", f"{100 * each.needed(config.tasks):.1f}"] if each else ["", ""]
            rows.append([arm.label, text, *numbers, "chosen" if text == best_of_all else "" if each else "diverged"])
    columns = ["", "settings", "validation accuracy", f"weights that {config.tasks} tasks would use", ""]
    text = (
        f"Each row of the table has the settings that were best on validation images of the first "
        f"{config.tuning_tasks} tasks, first seed, among those that leave room for all tasks if each takes as many new "
        "weights as the last of these. The test images play no part in it. The rate is that of α = 1."
    )
    return [Section("Settings that were chosen", text, [], [Table("Candidates", columns, rows, "In percent.")])]


def diverged_section(lost: Sequence[str]) -> list[Section]:
    """Which runs diverged, and how; nothing if none did."""
    return [Section("Diverged", "\n\n".join(lost))] if lost else []


def run_note(config: Config) -> str:
    """What this run did, for a reader who will compare it with the paper."""
    seeds = "one seed" if config.seeds == 1 else f"{config.seeds} seeds"
    tested = f"the first {config.test:,} test images of a task" if config.test else "all test images"
    steps = f"{config.steps:,} training and {config.retrain_steps:,} retraining steps per task"
    gamma = "; ".join(_method_note(config, method) for method in config.methods if method in BY_VALIDATION)
    sentences = [*([gamma] if gamma else []), *optimiser_text(config), *precision_text(config)]
    run = f"This run: {config.tasks} tasks, {steps} of {config.batch} images, {seeds}, {tested}."
    return " ".join([run, *(f"{each}." for each in sentences)])


def optimiser_text(config: Config) -> list[str]:
    """A sentence where training is not plain SGD on images as they are."""
    momentum = [f"SGD has a momentum of {config.momentum:g}"] if config.momentum else []
    moved = f"training images are moved by up to {config.shift} pixels and half of them mirrored"
    text = ", ".join([*momentum, *([moved] if config.shift else [])])
    return [text[0].upper() + text[1:]] if text else []


def precision_text(config: Config) -> list[str]:
    """A sentence where not everything was computed in float32."""
    if config.model == "mlp" or config.precision == "float32":
        return precision_note(config.precision)
    return [f"Passes of training compute in {config.precision}; networks are measured and pruned in float32"]


def _method_note(config: Config, method: str) -> str:
    """How a method was set, in the words of the table."""
    if method == "efficient-packnet":
        gamma = _chosen_or(config, config.gamma)
        return f"EPN, the algorithm as published: {gamma}, pruned at once, reusing all weights"
    how = f"pruned at most {config.prunings} times more, {config.pruning_steps} steps apart" if config.prunings else ""
    reused = "all weights" if config.reuse == "all" else "the output layer of earlier tasks alone"
    capped = f", at most {config.share:.2%} of a layer for a task" if config.share < 1 else ""
    return f"Frugal EPN: {_chosen_or(config, config.frugal_gamma)}, {how or 'pruned at once'}, reusing {reused}{capped}"


def _chosen_or(config: Config, gamma: float) -> str:
    """A γ, unless candidates have each their own."""
    return "γ as chosen below" if any("gamma=" in each for each in config.candidates) else f"γ = {gamma:g}"


def main_table(config: Config, measured: Sequence[Measured], story: Story, diverged: int) -> Table:
    """One row per arm, then the paper's; the scenario of every number is in the heading."""
    group, single, known = max(config.groups), 1 in config.groups, compared(config)
    columns: list[str | Column] = [
        "", "lr",
        Column(GIVEN, "max", 2, percent=True),
        Column("worst task", "max", 2, percent=True),
        Column(f"{INFERRED}, {group} images", "max", 2, percent=True),
        *([Column(f"{INFERRED}, 1 image", "max", 1, percent=True)] if single else []),
        *([Column(name, None, 2, percent=True) for name in ("forgetting", "backward transfer")] if known else []),
        Column("weights used", "min", 1, percent=True),
    ]  # fmt: skip
    rows: list[list[str | Mean | None]] = []
    for m in measured:
        inferred = [m.inferred(group), *([m.inferred(1)] if single else [])]
        kept = [m.forgetting(), m.backward_transfer()] if known else []
        rows.append([m.arm.label, f"{m.lr:.3g}", m.given(), m.worst(), *inferred, *kept, m.used()])
    for label, given, inferred_paper, used in story.rows:
        rows.append([label, "", given, "", inferred_paper, *[""] * (single + 2 * known), used])
    lost = f" {diverged} runs diverged." if diverged else ""
    part = "" if config.matrix else f" {PROBED.format(config.probe, min(config.probed, config.tasks))}"
    caption = (
        "Average test accuracy over all tasks after the last, in percent. Task-incremental: the task is given. "
        "Worst task: the lowest accuracy of a task, the task given. "
        "Class-incremental: it is inferred from so many images by the default method, which compares them with stored "
        "mean inputs, unlike the paper's, and must be right; other methods are below."
        f"{part}{FORGOTTEN if known else ''}{lost}"
    )
    return Table("All tasks, after the last", columns, rows, caption)


def curves_section(measured: Sequence[Measured], table: Table, figures: Path) -> Section:
    """Average accuracy and used weights against the number of tasks."""
    text = (
        "First the average over all tasks learned so far, each with its own sub-network. Nothing changes once it is "
        "learned: the logits of earlier tasks are compared bit for bit during the run. Then the fraction of weights "
        "that some task uses, and the accuracy of every task by itself."
    )
    pictures = [
        lines(
            [m.averages() for m in measured], figures / "average.svg", f"Average accuracy ({GIVEN})", "tasks learned",
            "accuracy", percent=True,
        ),
        lines(
            [m.used_weights() for m in measured], figures / "used.svg", "Weights in use", "tasks learned",
            "fraction of weights", percent=True,
        ),
        lines(
            [m.tasks() for m in measured], figures / "tasks.svg", f"Accuracy of each task ({GIVEN})", "task",
            "accuracy", percent=True,
        ),
    ]  # fmt: skip
    return Section("Accuracy and capacity", text, pictures, [table])


def matrix_section(m: Measured, figures: Path) -> Section:
    """The accuracy matrix and which task was inferred, of the first seed of an arm."""
    matrix, found = m.runs[0].matrix or [], m.runs[0].class_incremental
    rows = [row + [float("nan")] * (len(matrix) - len(row)) for row in matrix]
    pictures = [heatmap(rows, figures / "matrix.svg", f"Accuracy on every task ({GIVEN})")]
    if found is not None:
        title = f"Task inferred from {found.group} images"
        drawn = heatmap(found.confusion, figures / "confusion.svg", title, "inferred task", "true task", "images")
        pictures.append(drawn)
    return Section("Task by task", f"{m.arm.label}, first seed.", pictures)


def inference_section(config: Config, measured: Sequence[Measured], figures: Path) -> Section:
    """How often the task is inferred rightly against the size of the group, and at several numbers of tasks."""
    m = best(measured)
    probes = [run.inference[-1].rates for run in m.runs]
    curves = [
        Curve(method, None, [float(g) for g in groups], [[probe[method][g][0] for g in groups] for probe in probes],
              method=method)
        for method, groups in probes[0].items()
    ]  # fmt: skip
    title = "Right task against the number of images judged together"
    picture = lines(
        curves, figures / "inference.svg", title, "images", "right task", percent=True, logx=True, wide=True
    )
    text = (
        f"{m.arm.label}. `exhaustive` asks every sub-network; `shortlist` (the default) compares inputs "
        "with the mean input stored for each task, which the paper's method does not have, and asks the four most "
        "alike; `oneshot` and `binary` follow the gradient of a mixture of all masks. "
        f"Probed on {config.probe} test images of up to {config.probed} tasks."
    )
    return Section("Task inference", text, [picture], [inference_table(config, m)])


def inference_table(config: Config, m: Measured) -> Table:
    """One row per method, one column per number of tasks learned, at the largest group."""
    probes, group = m.runs[0].inference, max(config.groups)
    columns: list[str | Column] = ["", *(Column(f"{p.tasks} tasks", "max", 1, percent=True) for p in probes)]
    methods = list(probes[-1].rates)
    rows: list[list[str | Mean]] = [
        [method, *(m.probed(method, group, 0, at) for at in range(len(probes)))] for method in methods
    ]
    return Table(f"Right task from {group} images", columns, rows, "In percent.")


def stats(config: Config, measured: Sequence[Measured]) -> list[Stat]:
    """The numbers at the top of the page."""
    first, group = best(measured), max(config.groups)
    return [
        Stat("task given", f"{first.given().mean:.2%}", f"{first.arm.label}, {GIVEN}"),
        Stat("task inferred", f"{first.inferred(group).mean:.2%}", f"from {group} images, {INFERRED}"),
        Stat("weights used", f"{first.used().mean:.1%}", f"after {config.tasks} tasks"),
    ]


def headline(config: Config, measured: Sequence[Measured], story: Story) -> Headline:
    """Where the paper prints class-incremental accuracy that, else the average with the task given; of Powerprop."""
    first, group = best([m for m in measured if m.arm.alpha > 1] or measured), max(config.groups)
    printed = story.printed or next((row[2] for row in reversed(story.rows) if row[2]), "")
    what, value = f"{first.arm.label}, {GIVEN} accuracy after {config.tasks} tasks", first.given()
    if story.rows:
        what = f"{first.arm.label}, {INFERRED} accuracy after {config.tasks} tasks, inferred from {group} images"
        value = first.inferred(group)
    steps = f"{config.steps:,} + {config.retrain_steps:,} steps per task"
    return Headline(what, f"{100 * value.mean:.2f} ({steps})", printed)


def best(measured: Sequence[Measured]) -> Measured:
    """The arm with the highest average accuracy, the task given."""
    return max(measured, key=lambda m: m.given().mean)
