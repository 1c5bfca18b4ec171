"""What a run of robot tasks says: success and forgetting, curves of every task, clips of the arm."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from powerprop.experiments.harness.experiment import Findings, Results, RunError
from powerprop.experiments.harness.pages import run_page
from powerprop.experiments.harness.typed import Diverged, result_of
from powerprop.experiments.rl.config import Config
from powerprop.experiments.rl.measured import Measured
from powerprop.experiments.rl.methods import PUBLISHED, Arm, arms
from powerprop.experiments.rl.results import Learned
from powerprop.report import Column, Curve, Headline, Image, Section, Stat, Table, lines

SHOWN = {"fine-tuning": "Naive", "a-gem": "AGEM", "ewc": "EWC", "mas": "MAS", "perfect-memory": "PerfectMemory",
         "vcl": "VCL", "packnet": "PackNet", "efficient-packnet": "EfficientPackNet"}  # fmt: skip
"""The strategies by whose names curves have their colours."""


def read_runs(config: Config, results: Results) -> list[Measured]:
    """The results of every row, seed by seed."""
    return [Measured(arm, [_run(arm, seed, results) for seed in range(config.seeds)]) for arm in arms(config)]


def _run(arm: Arm, seed: int, results: Results) -> Learned:
    key = arm.job(seed).key
    found = result_of(Learned, results, key)
    if isinstance(found, Diverged):
        raise RunError(f"{key} diverged: {found.diverged}")
    return found


def findings(config: Config, measured: Sequence[Measured], out: Path) -> Findings:
    """Draw the figures into `out/figures` and write the page, the table and the summary."""
    table = main_table(config, measured)
    clips = clip_images(config, measured, out)
    notes = " ".join(sorted({run.note for m in measured for run in m.runs if run.note}))
    sections = [
        Section("Success and forgetting", INTERVALS, tables=[table, task_table(config, measured)]),
        Section("Success on the way", WAY, success_curves(config, measured, out / "figures")),
        *([Section("The arm at the very end", CLIPS, clips)] if clips else []),
    ]
    page = run_page(
        out, config, "Robot tasks one after another", f"{INTRO}\n\n{run_note(config)} {notes}".strip(), PAPER, sections,
        stats(measured), headline(measured),
    )  # fmt: skip
    return Findings(page, table, summary(config, measured))


INTRO = (
    "One network learns tasks of a simulated robot arm (Meta-World) by soft actor-critic, one after the other, and "
    "never acts in an earlier task again. Actor and critics are learners of the library's strategies; nothing is "
    "written anew for reinforcement learning."
)
PAPER = (
    "Table 4 and the hyper-parameters of appendix D: six tasks of a million steps in Meta-World's version of 2019. Its "
    "numbers stand beside ours for orientation; today's tasks, their rewards and this run's length are others."
)
INTERVALS = (
    "Success: the task is solved at any step of an episode of 200. In brackets: 90% bootstrap confidence intervals "
    "over seeds, which mean little with two or three of them."
)
WAY = "Mean over seeds with a band of one standard deviation; dashed lines are changes of task."
CLIPS = "The first seed, the most likely actions, up to half a second after success."


def run_note(config: Config) -> str:
    """What this run did."""
    seeds = "one seed" if config.seeds == 1 else f"{config.seeds} seeds"
    return (
        f"This run: {' → '.join(config.tasks)}, {config.steps:,} steps each, {config.retrain_steps:,} updates of "
        f"retraining where a method prunes, {seeds}, rewards {config.reward}, observations {config.observation!r}, "
        f"{config.final_episodes} episodes per number, the same for every method."
    )


def main_table(config: Config, measured: Sequence[Measured]) -> Table:
    """One row per method, the paper's values beside ours."""
    columns: list[str | Column] = [
        "", "average success", "forgetting", "largest change of an action",
        Column("weights used (%)", None, 0, percent=True), Column("paper: success", paper=True),
        Column("paper: forgetting", paper=True),
    ]  # fmt: skip
    rows = []
    for m in measured:
        printed = PUBLISHED.get((m.arm.method, m.arm.alpha), (None, None))
        moved, used = m.moved(), fmean(run.used for run in m.runs)
        rows.append([m.arm.label, str(m.success()), str(m.forgetting()), f"{moved:.3g}", used, *printed])
    caption = (
        "Average success over all tasks at the very end. Forgetting: success at the end of a task's training, before "
        "pruning, minus that at the very end, averaged over tasks. Change of an action: between the end of its task "
        "and the very end, on observations of all tasks but the last; 0 means bit-identical."
    )
    return Table("All methods", columns, rows, caption)


def task_table(config: Config, measured: Sequence[Measured]) -> Table:
    """Success on each task when it was trained, packed, and at the very end."""
    columns: list[str | Column] = ["", *(f"{name}: trained, packed, end" for name in config.tasks)]
    tasks = range(len(config.tasks))
    rows = [[m.arm.label, *(" → ".join(f"{v:.2f}" for v in m.of_task(t)) for t in tasks)] for m in measured]
    return Table("Every task", columns, rows, "Mean success over seeds. Packed: after pruning and retraining.")


def success_curves(config: Config, measured: Sequence[Measured], figures: Path) -> list[Image]:
    """A figure for every task: success of all methods against total steps."""
    drawn, changes = [], [t * config.steps for t in range(1, len(config.tasks))]
    for task, name in enumerate(config.tasks):
        curves = [
            Curve(m.arm.label, None, *m.curve(task), method=SHOWN[m.arm.method]) for m in measured if m.curve(task)[0]
        ]
        if curves:
            drawn.append(
                lines(
                    curves, figures / f"success-{task}-{name}.svg", f"Task {task + 1}: {name}", "steps in all",
                    "success", percent=True, changes=(changes, []), wide=True,
                )
            )  # fmt: skip
    return drawn


def clip_images(config: Config, measured: Sequence[Measured], out: Path) -> list[Image]:
    """The clips of the first run of every row that has some, copied beside the figures."""
    images = []
    for m in measured:
        run = m.runs[0]
        folder = out / "jobs" / m.arm.job(run.seed).key
        for task, name in enumerate(run.clips):
            path = out / "figures" / f"{m.arm.job(run.seed).key}-{name}"
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, path)
            what = f"{m.arm.label}, {config.tasks[task]}: success in {run.final[task]:.0%} of episodes at the very end"
            images.append(Image(path, f"Clip of the robot arm. {what}", what))
    return images


def stats(measured: Sequence[Measured]) -> list[Stat]:
    """Average success and forgetting of every row."""
    return [Stat(m.arm.label, f"{m.success().mean:.2f}", f"forgetting {m.forgetting().mean:.2f}") for m in measured]


def headline(measured: Sequence[Measured]) -> Headline:
    """The best row."""
    best = max(measured, key=lambda m: m.success().mean)
    printed = PUBLISHED.get((best.arm.method, best.arm.alpha), ("", ""))[0]
    return Headline(
        f"average success of {best.arm.label}", str(best.success()), f"{printed} (six tasks)" if printed else ""
    )


def summary(config: Config, measured: Sequence[Measured]) -> dict[str, Any]:
    """The numbers of the report as plain data."""
    rows = [
        {"label": m.arm.label, "method": m.arm.method, "alpha": m.arm.alpha, "success": asdict(m.success()),
         "forgetting": asdict(m.forgetting()), "moved": m.moved(),
         "runs": [{n: v for n, v in asdict(run).items() if n not in ("curve", "clips", "note")} for run in m.runs]}
        for m in measured
    ]  # fmt: skip
    return {"tasks": list(config.tasks), "steps": config.steps, "rows": rows}
