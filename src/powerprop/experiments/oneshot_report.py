"""What a one-shot pruning run says: figures, tables, and the numbers behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from powerprop.experiments.base import Findings, Results
from powerprop.experiments.folder import plain
from powerprop.experiments.oneshot import FORMS, SURVIVORS, Arm, Config, arms, final_jobs, tuning_score
from powerprop.report import (
    Cell,
    Column,
    Curve,
    Image,
    Page,
    Section,
    Stat,
    Table,
    overlap_curves,
    pruning_curves,
    weight_change,
)
from powerprop.train.files import read_json

COLUMNS_AT = (0.05, 0.02, 0.01)
"""The table shows the points of the grid nearest to these fractions kept."""


@dataclass(frozen=True)
class Story:
    """The words of a report."""

    title: str
    paper: str
    intro: str


@dataclass(frozen=True)
class Measured:
    """An arm at its chosen learning rate: the results of its seeds, without those that diverged."""

    arm: Arm
    label: str
    lr: float
    keys: list[str]
    runs: list[dict[str, Any]]
    diverged: int

    def cell(self, name: str, index: int | None = None) -> Cell:
        """Mean and std over the seeds of a number, or of one point of a curve."""
        return Cell.of(run[name] if index is None else run[name][index] for run in self.runs)

    def band(self, points: Sequence[int], name: str = "test") -> Cell:
        """Mean and std over the seeds of the mean over some points of the grid."""
        return Cell.of(fmean(run[name][i] for i in points) for run in self.runs)

    def curve(self, name: str, x: list[float]) -> Curve:
        return Curve(self.label, self.arm.alpha, x, [run[name] for run in self.runs], self.arm.form == "direct")


def compose(config: Config, results: Results, out: Path, story: Story) -> Findings:
    """Draw the figures into `out/figures` and write the page, the table and the summary."""
    measured = [m for m in (measure(config, arm, results) for arm in arms(config)) if m.runs]
    points = band_points(config)
    table = main_table(config, measured, points)
    best = best_arm(measured)
    figures = out / "figures"
    sections = [
        accuracy_section(config, measured, table, figures),
        overlap_section(config, measured, figures),
        weights_section(measured, out),
    ]
    if len(config.lrs) > 1:
        sections.append(tuning_section(config, results, measured))
    page = Page(
        story.title, story.intro, sections, plain(asdict(config)), read_json(out / "versions.json"), story.paper,
        stats(config, measured, best, points),
    )  # fmt: skip
    return Findings(page, table, summary(config, results, measured, best, points))


def measure(config: Config, arm: Arm, results: Results) -> Measured:
    """The seeds of an arm at its chosen learning rate."""
    jobs = final_jobs(config, arm, results)
    runs = [results[job.key] for job in jobs]
    good = [(job.key, run) for job, run in zip(jobs, runs, strict=True) if "diverged" not in run]
    keys, kept = [key for key, _ in good], [run for _, run in good]
    return Measured(arm, label(config, arm), jobs[0].settings["lr"], keys, kept, len(runs) - len(kept))


def label(config: Config, arm: Arm) -> str:
    """What the reader sees of an arm."""
    if config.optimiser == "sgd":
        return "baseline (α = 1)" if arm.alpha == 1 else f"α = {arm.alpha:g}"
    return "Adam (α = 1)" if arm.alpha == 1 else f"Adam {FORMS[arm.form]} (α = {arm.alpha:g})"


def band_points(config: Config) -> list[int]:
    """The points of the grid inside the band that the headline averages over."""
    return [i for i, kept in enumerate(config.grid) if config.band[0] <= kept <= config.band[1]]


def best_arm(measured: Sequence[Measured]) -> Measured | None:
    """The arm with α > 1 that scores best on the validation images, over the whole grid."""
    candidates = [m for m in measured if m.arm.alpha > 1]
    return max(candidates, key=lambda m: m.band(range(len(m.runs[0]["kept"])), "validation").mean, default=None)


def baseline(measured: Sequence[Measured]) -> Measured | None:
    """The arm with α = 1, if it was run."""
    return next((m for m in measured if m.arm.alpha == 1), None)


def main_table(config: Config, measured: Sequence[Measured], points: Sequence[int]) -> Table:
    """One row per arm: accuracy dense, at a few fractions kept, and averaged over the band."""
    at = sorted({nearest(config, kept) for kept in COLUMNS_AT}, reverse=True)
    columns: list[str | Column] = [
        "", "learning rate", Column("dense", "max", 2, percent=True),
        *(Column(f"{config.grid[i]:.2%} kept", "max", 1, percent=True) for i in at),
        Column(f"mean {config.band[0]:.1%}–{config.band[1]:.1%}", "max", 1, percent=True),
    ]  # fmt: skip
    rows: list[list[str | Cell]] = [
        [m.label, f"{m.lr:g}", m.cell("test", -1), *(m.cell("test", i) for i in at), m.band(points)] for m in measured
    ]
    lost = sum(m.diverged for m in measured)
    caption = "Test accuracy in percent after one-shot pruning, without retraining."
    return Table("Accuracy against weights kept", columns, rows, caption + (f" {lost} runs diverged." if lost else ""))


def nearest(config: Config, kept: float) -> int:
    """The point of the grid nearest to a fraction kept, on the log scale."""
    return int(np.argmin(np.abs(np.log(config.grid) - np.log(kept))))


def accuracy_section(config: Config, measured: Sequence[Measured], table: Table, figures: Path) -> Section:
    curves = [m.curve("test", config.grid) for m in measured]
    title = "Accuracy after one-shot pruning"
    path = pruning_curves(curves, figures / "accuracy.png", title, highlight=config.band)
    caption = "Mean over the seeds, band of one standard deviation. The headline averages over the shaded range."
    text = (
        "Each network is trained densely, then the weights of smallest magnitude of every layer are set to zero, once, "
        "without any training afterwards. The output layer keeps twice the fraction of the others."
    )
    return Section(title, text, [Image(path, caption, wide=True)], [table])


def overlap_section(config: Config, measured: Sequence[Measured], figures: Path) -> Section:
    curves = [m.curve("overlap", config.grid) for m in measured]
    path = overlap_curves(curves, figures / "overlap.png", "Overlap of the masks before and after training")
    text = (
        "The fraction of the weights kept after training that pruning at initialisation would have kept too. "
        "At 100% small weights could never escape pruning."
    )
    return Section("Do small weights still get a chance?", text, [Image(path, wide=True)])


def weights_section(measured: Sequence[Measured], out: Path) -> Section:
    """Figures 2c and 2d for the baseline and the power nearest to the paper's α = 4, and the numbers for all."""
    shown = [m for m in (baseline(measured), nearest_to_four(measured)) if m is not None]
    drawn = {m.label: load_file(out / "jobs" / m.keys[0] / "weights.safetensors") for m in shown}
    limit = max(float(np.quantile(np.abs(w[name]), 0.999)) for w in drawn.values() for name in ("before", "after"))
    images = []
    for m in shown:
        w = drawn[m.label]
        path = out / "figures" / f"weights-{m.keys[0].partition('-lr')[0]}.png"
        weight_change(w["before"], w["after"], w["survives"], path, m.label, limit=limit)
        images.append(Image(path, f"Weights drawn at random from the first seed, {m.label}."))
    names = ("sign_changes", "sign_changes_of_survivors", "near_zero_before", "near_zero_after")
    heads = ("sign changed", "sign changed, survivors", "|w| < 0.001 before", "|w| < 0.001 after")
    columns: list[str | Column] = ["", *(Column(head, digits=1, percent=True) for head in heads)]
    table = Table("Weights", columns, [(m.label, *(m.cell(name) for name in names)) for m in measured], "In percent.")
    text = f"Survivors are the weights kept when the trained network is pruned to {SURVIVORS:.0%}."
    return Section("What training does to the weights", text, images, [table])


def nearest_to_four(measured: Sequence[Measured]) -> Measured | None:
    candidates = [m for m in measured if m.arm.alpha > 1 and m.arm.form == "targets"]
    return min(candidates, key=lambda m: abs(m.arm.alpha - 4), default=None)


def tuning_section(config: Config, results: Results, measured: Sequence[Measured]) -> Section:
    rows = []
    for m in measured:
        scores = [tuning_score(config, m.arm, lr, results) for lr in config.lrs]
        rows.append([m.label, *("diverged" if s < 0 else f"{s:.2%}" for s in scores), f"{m.lr:g}"])
    columns = ["", *(f"lr {lr:g}" for lr in config.lrs), "chosen"]
    text = (
        "The learning rate of each row, the baseline included, is the one with the best score on the last "
        f"{config.validation:,} training images, which are not trained on. The score is the accuracy averaged over the "
        f"whole grid of {config.points} fractions kept, the dense network included, and over {config.tuning_seeds} "
        f"tuning {'seed' if config.tuning_seeds == 1 else 'seeds'}. The test images play no part in any choice."
    )
    return Section("Choice of the learning rate", text, (), [Table("Validation score", columns, rows)])


def stats(config: Config, measured: Sequence[Measured], best: Measured | None, points: Sequence[int]) -> list[Stat]:
    """The numbers at the top of the page."""
    base = baseline(measured)
    if best is None or base is None:
        return []
    where = f"mean over {config.band[0]:.1%}–{config.band[1]:.1%} of the weights kept"
    gain = best.band(points).mean - base.band(points).mean
    return [
        Stat("gain over the baseline", f"{100 * gain:+.1f} points", where),
        Stat(best.label, f"{best.band(points).mean:.1%}", f"dense {best.cell('test', -1).mean:.2%}"),
        Stat(base.label, f"{base.band(points).mean:.1%}", f"dense {base.cell('test', -1).mean:.2%}"),
    ]


def summary(
    config: Config, results: Results, measured: Sequence[Measured], best: Measured | None, points: Sequence[int]
) -> dict[str, Any]:
    """The numbers of the report as plain data."""
    base = baseline(measured)
    return {
        "kept": config.grid,
        "band": list(config.band),
        "arms": [_arm_summary(config, results, m, points) for m in measured],
        "best": None if best is None else best.label,
        "gain": None if best is None or base is None else best.band(points).mean - base.band(points).mean,
    }


def _arm_summary(config: Config, results: Results, m: Measured, points: Sequence[int]) -> dict[str, Any]:
    tuning = {f"{lr:g}": tuning_score(config, m.arm, lr, results) for lr in config.lrs} if len(config.lrs) > 1 else {}
    return {
        "label": m.label, "alpha": m.arm.alpha, "form": m.arm.form, "lr": m.lr, "tuning": tuning,
        "seeds": len(m.runs), "diverged": m.diverged,
        "test": m.curve("test", config.grid).mean.tolist(), "test_std": m.curve("test", config.grid).std.tolist(),
        "overlap": m.curve("overlap", config.grid).mean.tolist(),
        "dense": m.cell("test", -1).mean, "band": m.band(points).mean,
        "sign_changes": m.cell("sign_changes").mean, "near_zero": m.cell("near_zero_after").mean,
    }  # fmt: skip
