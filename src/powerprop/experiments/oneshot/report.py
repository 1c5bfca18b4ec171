"""What a one-shot pruning run says: figures, tables, and the numbers behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from powerprop.experiments.harness.experiment import Findings, Results
from powerprop.experiments.harness.pages import run_page
from powerprop.experiments.oneshot.config import LASSO, Candidate, Config
from powerprop.experiments.oneshot.frontier import frontier_section
from powerprop.experiments.oneshot.measured import (
    Measured,
    band_points,
    baseline,
    best_arm,
    largest_gain,
    measure,
    nearest,
    nearest_to_four,
)
from powerprop.experiments.oneshot.pruning import GLOBAL, RECALIBRATED
from powerprop.experiments.oneshot.train import SEEN, SURVIVORS, Arm, arms
from powerprop.experiments.oneshot.tuning import Score, tuning_score
from powerprop.report import (
    Column,
    Curve,
    Headline,
    Image,
    Mean,
    Section,
    Stat,
    Table,
    pruning_curves,
    weight_change,
)

RANGES = ((0.05, 0.2), (0.03, 0.1))
"""Weights kept over which ways of pruning are compared: where they fall apart, and where little is left."""
COLUMNS_AT = (0.05, 0.02)
"""The table shows the points of the grid nearest to these fractions kept; more would not fit 80 columns."""


@dataclass(frozen=True)
class Story:
    """The words of a report.

    full: the settings of the paper, which a shortened run is shown beside.
    printed: what the paper says of the gain, for the headline.
    """

    title: str
    paper: str
    intro: str
    full: Config
    printed: str = "shown in a figure, no value printed"


def findings(config: Config, results: Results, out: Path, story: Story) -> Findings:
    """Draw the figures into `out/figures` and write the page, the table and the summary."""
    measured = [m for m in (measure(config, arm, results) for arm in arms(config)) if m.runs]
    points = band_points(config)
    table = main_table(config, measured, points)
    best = best_arm(measured)
    figures = out / "figures"
    sections = [
        accuracy_section(config, measured, table, figures),
        *ways_section(config, measured, figures),
        overlap_section(config, measured, figures),
        weights_section(measured, out),
    ]
    if len(config.lrs) > 1:
        sections.append(tuning_section(config, results, measured))
        sections.append(frontier_section(config, results, figures, band_text(config)))
    page = run_page(
        out, config, story.title, f"{story.intro}\n\n{run_note(config, story.full)}", story.paper, sections,
        stats(config, measured, best, points), headline(config, measured, best, story),
    )  # fmt: skip
    return Findings(page, table, summary(config, results, measured, best, points))


def run_note(config: Config, full: Config) -> str:
    """What this run did, and what is shortened in it, for a reader who will compare it with the paper."""
    run = f"This run: {extent(config)}{f', passes in {config.precision}' if config.precision != 'float32' else ''}."
    if config.forms == ("direct",):
        run += (
            " α > 1 is trained on φ directly, so that weight decay is one of φ, a penalty of |w|^(2/α): weights that "
            "nothing holds go to zero, where a decay of w leaves small ones as they are."
        )
    return run if config == full else f"{run} In full (preset `paper`): {extent(full)}."


def extent(config: Config) -> str:
    """The network and how much of a training it gets."""
    width = f" with {config.width:g} times the channels" if config.width != 1 else ""
    seeds = "one seed" if config.seeds == 1 else f"{config.seeds} seeds"
    measured = f"the first {config.test:,} test images" if config.test else "all test images"
    trained = f" of the first {config.train:,}" if config.train else ""
    steps = f"{config.steps:,} steps of {config.batch} images{trained}"
    return f"{config.model}{width}, {steps}, {seeds}, {measured}"


def main_table(config: Config, measured: Sequence[Measured], points: Sequence[int]) -> Table:
    """One row per arm: accuracy dense, at a few fractions kept, and averaged over the band."""
    at = sorted({nearest(config, kept) for kept in COLUMNS_AT}, reverse=True)
    columns: list[str | Column] = [
        "", "lr", *(["decay"] if config.decays else []), Column("dense", "max", 2, percent=True),
        *(Column(f"{config.grid[i]:.1%} kept", "max", 1, percent=True) for i in at),
        Column(f"{100 * config.band[0]:g}–{100 * config.band[1]:g}% kept", "max", 1, percent=True),
    ]  # fmt: skip
    rows: list[list[str | Mean]] = [
        [m.label, *settings_of(config, m), m.dense, *(m.band([i]) for i in at), m.band(points)] for m in measured
    ]
    lost = sum(m.diverged for m in measured)
    caption = "Test accuracy in percent after one-shot pruning, without retraining; ranges are means over the grid."
    return Table("Accuracy against weights kept", columns, rows, caption + (f" {lost} runs diverged." if lost else ""))


def settings_of(config: Config, m: Measured) -> list[str]:
    """What an arm was trained with: the rate, and the decay where there are several."""
    return [f"{each:g}" for each in (m.chosen if config.decays else m.chosen[:1])]


def accuracy_section(config: Config, measured: Sequence[Measured], table: Table, figures: Path) -> Section:
    curves = [m.accuracy(config.grid) for m in measured]
    title = "Accuracy after one-shot pruning"
    caption = "Mean over the seeds, band of one standard deviation. The headline averages over the shaded range."
    text = (
        "Each network is trained densely, then the weights of smallest magnitude are set to zero, once, without any "
        f"training afterwards: {described(config.ways[0])}."
    )
    picture = pruning_curves(curves, figures / "accuracy.svg", title, highlight=config.band, caption=caption)
    return Section(title, text, [picture], [table])


def described(way: str) -> str:
    """A way to prune in words."""
    ranking = "all layers are ranked together" if way.startswith(GLOBAL) else (
        "those of every layer by itself; the output layer keeps twice the fraction of the others"
    )  # fmt: skip
    again = (
        f"measured again on {SEEN:,} training images" if way.endswith(RECALIBRATED) else "those of the dense network"
    )
    return f"{ranking}; statistics of batch norms, where there are any, are {again}"


def ways_section(config: Config, measured: Sequence[Measured], figures: Path) -> list[Section]:
    """The same networks pruned in the other ways: a figure each, and the mean over two ranges of weights kept."""
    if len(config.ways) == 1:
        return []
    shown: list[Image] = []
    rows: list[list[str | Mean]] = []
    for way in config.ways:
        main = way == config.ways[0]
        curves = [m.accuracy(config.grid) if main else m.pruned_otherwise(config.grid, way) for m in measured]
        rows += [[f"{way}: {m.label}", *ranges(config, curve)] for m, curve in zip(measured, curves, strict=True)]
        if not main:
            path = figures / f"accuracy-{way.replace(' ', '-')}.svg"
            shown.append(pruning_curves(curves, path, f"Pruned {way}", caption=f"{described(way).capitalize()}."))
    columns: list[str | Column] = [
        "",
        *(Column(f"{100 * low:g}–{100 * high:g}% kept", "max", 1, percent=True) for low, high in RANGES),
    ]
    text = (
        "What a pruned network answers depends on how it was pruned as much as on how it was trained: one ranking of "
        "all layers leaves more where it matters, and statistics of batch norms that fit the pruned network restore "
        "much of what seemed lost. The networks, and their learning rates, are those of the figure above."
    )
    return [Section("Pruned in other ways", text, shown, [Table("Test accuracy by way of pruning", columns, rows)])]


def ranges(config: Config, curve: Curve) -> list[Mean]:
    """The mean over each of `RANGES` of the weights kept, and its spread over the seeds."""
    inside = [[i for i, kept in enumerate(config.grid) if low <= kept <= high] for low, high in RANGES]
    return [Mean.of(float(row[points].mean()) for row in np.atleast_2d(curve.values)) for points in inside]


def overlap_section(config: Config, measured: Sequence[Measured], figures: Path) -> Section:
    curves = [m.overlap(config.grid) for m in measured]
    title = "Overlap of the masks before and after training"
    picture = pruning_curves(curves, figures / "overlap.svg", title, ylabel="overlap of the two masks")
    text = (
        "The fraction of the weights kept after training that pruning at initialisation would have kept too. "
        "At 100% small weights could never escape pruning."
    )
    return Section("Do small weights still get a chance?", text, [picture])


def weights_section(measured: Sequence[Measured], out: Path) -> Section:
    """Figures 2c and 2d for the baseline and the power nearest to the paper's α = 4, and the numbers for all."""
    shown = [m for m in (baseline(measured), nearest_to_four(measured)) if m is not None]
    drawn = {m.label: load_file(out / "jobs" / m.keys[0] / "weights.safetensors") for m in shown}
    limit = max(float(np.quantile(np.abs(w[name]), 0.999)) for w in drawn.values() for name in ("before", "after"))
    images: list[Image] = []
    for m in shown:
        w = drawn[m.label]
        path = out / "figures" / f"weights-{m.keys[0].partition('-lr')[0]}.svg"
        caption = f"Weights drawn at random from the first seed, {m.label}."
        images.append(weight_change(w["before"], w["after"], w["survives"], path, m.label, limit, caption=caption))
    heads = ("sign changed", "sign changed, survivors", "|w| < 0.001 before", "|w| < 0.001 after")
    columns: list[str | Column] = ["", *(Column(head, digits=1, percent=True) for head in heads)]
    table = Table("Weights", columns, [weights_row(m) for m in measured], "In percent.")
    text = f"Survivors are the weights kept when the trained network is pruned to {SURVIVORS:.0%}."
    return Section("What training does to the weights", text, images, [table])


def weights_row(m: Measured) -> list[str | Mean]:
    """Sign changes and weights near zero of an arm."""
    return [
        m.label,
        m.of(lambda run: run.sign_changes),
        m.of(lambda run: run.sign_changes_of_survivors),
        m.of(lambda run: run.near_zero_before),
        m.of(lambda run: run.near_zero_after),
    ]


def tuning_section(config: Config, results: Results, measured: Sequence[Measured]) -> Section:
    rows = []
    for m in measured:
        scores = {
            each: tuning_score(config, m.arm, each, results) for each in config.candidates(m.arm.alpha, m.arm.form)
        }
        found = [shown(config, m.arm, *each) for each in scores.items()]
        missing = [""] * (len(config.lrs) - len(found))
        rows.append([m.label, *found, *missing, ", ".join(settings_of(config, m))])
    scaled = " at α = 1" if config.magnitude else ""
    columns = ["", *(f"{named(config, each)}{scaled}" for each in config.candidates(1.0)), "chosen"]
    text = (
        f"The learning rate{' and the decay' if config.decays else ''} of each row, the baseline included, is chosen "
        f"on the last {config.validation:,} training "
        "images, which are not trained on: among the candidates whose dense accuracy is within "
        f"{100 * config.tolerance:g} points of the row's best, the one with the best accuracy averaged over the whole "
        f"grid of {config.points} fractions kept, the dense network included, and over {config.tuning_seeds} tuning "
        f"{'seed' if config.tuning_seeds == 1 else 'seeds'}. The test images play no part in any choice."
    )
    if config.magnitude:
        decays = " and decays" if config.decays and "direct" in config.forms else ""
        size = f"a weight of size {config.magnitude:g}"
        text += f" The candidates of a power are such that {size} learns{decays} equally fast."
    passed_over = better_pruned(config, results, measured)
    note = f"\n\nPassed over for their dense accuracy, though they prune better: {passed_over}." if passed_over else ""
    return Section("Choice of the learning rate", text + note, (), [Table("Validation score", columns, rows)])


def named(config: Config, each: Candidate) -> str:
    """A candidate as a reader sees it."""
    return f"lr {each.lr:g}" + (f", decay {each.decay:g}" if config.decays else "")


def shown(config: Config, arm: Arm, each: Candidate, score: Score | None) -> str:
    """What a candidate came to; the candidate, too, where it is not the column's."""
    found = f"{score.mean:.2%} (dense {score.dense:.2%})" if score else "diverged"
    name = f"λ = {each.decay:g}" if arm.form == LASSO else named(config, each)
    return f"{name}: {found}" if config.magnitude or arm.form == LASSO else found


def better_pruned(config: Config, results: Results, measured: Sequence[Measured]) -> str:
    """The candidates with a better mean over the grid than the one chosen."""
    found = []
    for m in measured:
        candidates = config.candidates(m.arm.alpha, m.arm.form)
        scores = {each: score for each in candidates if (score := tuning_score(config, m.arm, each, results))}
        better = [each for each, score in scores.items() if score.mean > scores[m.chosen].mean]
        found += [f"{m.label} with {named(config, each)}" for each in better]
    return ", ".join(found)


def stats(config: Config, measured: Sequence[Measured], best: Measured | None, points: Sequence[int]) -> list[Stat]:
    """The numbers at the top of the page."""
    base = baseline(measured)
    if best is None or base is None:
        return []
    where = f"mean over {band_text(config)}"
    gain = best.band(points).mean - base.band(points).mean
    peak = largest_gain(config, base, best)
    return [
        Stat("gain over the baseline", f"{100 * gain:+.1f} points", where),
        Stat("largest gain", f"{100 * peak[0]:+.1f} points", f"at {config.grid[peak[1]]:.1%} kept"),
        Stat(best.label, f"{best.band(points).mean:.1%}", f"dense {best.dense.mean:.2%}"),
        Stat(base.label, f"{base.band(points).mean:.1%}", f"dense {base.dense.mean:.2%}"),
    ]


def headline(config: Config, measured: Sequence[Measured], best: Measured | None, story: Story) -> Headline | None:
    """The gain over the baseline: the largest at one fraction kept, which the paper speaks of, and over the band."""
    base = baseline(measured)
    if best is None or base is None:
        return None
    gain, at = largest_gain(config, base, best)
    mean = best.band(band_points(config)).mean - base.band(band_points(config)).mean
    what = f"{best.label} against {base.label}: largest gain in test accuracy, and the mean over {band_text(config)}"
    here = f"{100 * gain:+.1f} points at {config.grid[at]:.1%}; mean {100 * mean:+.1f}"
    for rival in (m for m in measured if m.arm.form == LASSO):
        of_rival = rival.band(band_points(config)).mean - base.band(band_points(config)).mean
        here += f" ({rival.label}: {100 * of_rival:+.1f})"
    return Headline(what, here, story.printed)


def band_text(config: Config) -> str:
    """The range of weights kept that the headline averages over."""
    return f"{100 * config.band[0]:g}–{100 * config.band[1]:g}% of the weights kept"


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
    candidates = config.candidates(m.arm.alpha, m.arm.form)
    scores = {each: tuning_score(config, m.arm, each, results) for each in candidates} if len(candidates) > 1 else {}
    tuning = {
        f"{each.lr:g}{f' {each.decay:g}' if config.decays else ''}": score._asdict() if score else "diverged"
        for each, score in scores.items()
    }
    return {
        "label": m.label, "alpha": m.arm.alpha, "form": m.arm.form, **m.chosen._asdict(), "tuning": tuning,
        "seeds": len(m.runs), "diverged": m.diverged,
        "test": m.accuracy(config.grid).mean.tolist(), "test_std": m.accuracy(config.grid).std.tolist(),
        "overlap": m.overlap(config.grid).mean.tolist(), "dense": m.dense.mean, "band": m.band(points).mean,
        "sign_changes": m.of(lambda run: run.sign_changes).mean,
        "near_zero": m.of(lambda run: run.near_zero_after).mean,
    }  # fmt: skip
