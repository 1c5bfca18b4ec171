"""What a table of methods says: our values by scenario, those of others beside them, accuracy against bytes kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from powerprop.continual import STRATEGIES, Scenario
from powerprop.experiments.continual.baselines.arms import choices
from powerprop.experiments.continual.baselines.config import Config
from powerprop.experiments.continual.baselines.measured import (
    FAR,
    Comparison,
    Measured,
    comparisons,
    measure_all,
    summary,
)
from powerprop.experiments.continual.baselines.protocol import (
    ECONOMY,
    NEEDS_PIXELS,
    PROTOCOLS,
    all_options,
    names_of,
    steps_of,
)
from powerprop.experiments.continual.baselines.published import CLASS
from powerprop.experiments.harness.experiment import Findings, Results
from powerprop.experiments.harness.pages import run_page
from powerprop.report import Column, Headline, Image, Mean, Point, Section, Stat, Table, scatter
from powerprop.train.precision import precision_note

MEGABYTE, NOTHING = 1e6, 1e3
"""Methods that keep nothing are drawn at a kilobyte, since a logarithmic axis has no zero."""


PACKING = {"PackNet", "EfficientPackNet"}


@dataclass(frozen=True)
class Story:
    """The words of a report.

    twins: the headline is what Powerpropagation adds to the methods, not how many published values are met.
    """

    title: str
    paper: str
    intro: str
    twins: bool = False


def findings(config: Config, results: Results, out: Path, story: Story) -> Findings:
    """Draw the figures into `out/figures` and write the page, the tables and the summary."""
    measured = measure_all(config, results)
    table, beside = main_table(config, measured), comparisons(config, measured)
    lost = [text for m in measured for text in m.diverged]
    notes = " ".join(sorted(set().union(*(m.notes for m in measured))))
    sections = [
        Section("All methods", "", pictures(config, measured, out / "figures"), [table]),
        *([Section("Beside published values", BESIDE, tables=[beside_table(beside)])] if beside else []),
        *([Section("Choices", choice_note(config), tables=[choice_table(config, measured)])] if config.tunes() else []),
        *([Section("Diverged", "\n\n".join(lost))] if lost else []),
    ]
    page = run_page(
        out, config, story.title, f"{story.intro}\n\n{run_note(config)} {notes}".strip(), story.paper, sections,
        stats(config, measured), twins_headline(config, measured) if story.twins else headline(beside),
    )  # fmt: skip
    return Findings(page, table, summary(config, measured))


BESIDE = (
    "Every value with its scenario. The paper's table takes its values from the published ones; where it prints one of "
    "another scenario under class-incremental learning, it stands in the row of the scenario that it is of. "
    f"Away: our mean minus the published one, in its standard deviations; more than {FAR:g} has an exclamation mark. "
    "EfficientPackNet and PackNet infer the task from groups of images here, as in the paper."
)


def choice_note(config: Config) -> str:
    """How strengths and rates were chosen."""
    seeds = "with the first seed" if config.tuning_seeds == 1 else f"by the average of {config.tuning_seeds} seeds"
    return (
        "The strength of a penalty and the learning rate were chosen on validation data among factors of the published "
        f"ones, for each method and power by itself, {seeds}; the table has all seeds at what was chosen."
    )


def run_note(config: Config) -> str:
    """What this run did, for a reader who will compare it with others; of methods that are in the table."""
    protocol, names = PROTOCOLS[config.benchmark], names_of(config.strategy, config.benchmark)
    seeds = "one seed" if config.seeds == 1 else f"{config.seeds} seeds"
    of_pixels = ", ".join(name for name in protocol.steps if name in names)
    own = ", ".join(f"{name}: {kind} with {lr:g}" for name, (kind, lr) in protocol.own.items() if name in names)
    saved = savings(config, names)
    sentences = [
        f"Protocol: {protocol.reference}",
        f"This run: {config.tasks or protocol.tasks} tasks, {config.epochs:g} epochs{_shortened(config)}, {seeds}, "
        f"{config.validation:,} training images held back for choices",
        "Images have mean 0 and variance 1" + (f"; for {of_pixels} they are pixels in [0, 1]" if of_pixels else ""),
        *([f"Other optimisers: {own}"] if own else []),
        *(["A third of the steps of PackNet and EfficientPackNet are retraining"] if PACKING & set(names) else []),
        *([f"To save time: {'; '.join(saved)}"] if saved else []),
        *precision_note(config.precision),
    ]
    return f"{'. '.join(sentences)}."


def _shortened(config: Config) -> str:
    """Images that were left out."""
    train = f" of the last {config.images:,} training images" if config.images else ""
    return train + (f", the first {config.test:,} test images" if config.test else "")


def savings(config: Config, names: Sequence[str]) -> list[str]:
    """Where methods have less than is published."""
    if not config.economy:
        return []
    less = {name: ", ".join(f"{k} {v}" for k, v in each.items()) for name, each in ECONOMY.items() if name in names}
    shorter = {name: steps_of(config.benchmark, name, CLASS, 0, config.generator_steps) for name in NEEDS_PIXELS}
    return [
        *(f"{name} with {what}" for name, what in less.items()),
        *(f"{name} with {steps:,} steps per task in the class-incremental scenario"
          for name, steps in sorted(shorter.items()) if steps and name in names),
    ]  # fmt: skip


def main_table(config: Config, measured: Sequence[Measured]) -> Table:
    """One row per method, the scenario of every number in the heading; empty where a method has none."""
    groups = CLASS in config.columns() and any(m.together() is not None for m in measured)
    columns: list[str | Column] = [
        "",
        *(Column(scenario, "max", 2, percent=True) for scenario in config.columns()),
        *([Column(f"{CLASS}, {config.group} images", None, 2, percent=True)] if groups else []),
        Column("kept (MB)", None, 2), Column("seconds", None, 0),
    ]  # fmt: skip
    rows: list[list[str | Mean | float | None]] = []
    for m in measured:
        kept = m.most_kept()
        values = [m.accuracy(scenario) for scenario in config.columns()] + ([m.together()] if groups else [])
        rows.append([m.arm.label, *values, None if kept is None else kept / MEGABYTE, m.seconds()])
    caption = (
        "Average test accuracy over all tasks after the last, in percent. Kept: what a method keeps beyond the model, "
        "the most of all scenarios. Seconds: of one run on one core, with evaluation."
    )
    if groups:
        caption += f" {config.group} images: methods that infer the task do so from so many images that share it."
    return Table(f"{config.benchmark}, all tasks, after the last", columns, rows, caption)


def beside_table(found: Sequence[Comparison]) -> Table:
    """One row per value that somebody has published."""
    columns: list[str | Column] = [
        "", "scenario", Column("here", None, 2, percent=True), Column("published", paper=True), "source", "away",
        Column("the paper's table", paper=True),
    ]  # fmt: skip
    rows = [
        [
            c.label, c.scenario, c.here, None if c.published is None else str(c.published),
            None if c.published is None else c.published.source, _away(c),
            None if c.printed is None else str(c.printed),
        ]
        for c in found
    ]  # fmt: skip
    return Table("Values and those of others", columns, rows, "Average accuracy in percent.")


def _away(c: Comparison) -> str | None:
    return None if c.away is None else f"{c.away:+.1f}{' !' if abs(c.away) > FAR else ''}"


def choice_table(config: Config, measured: Sequence[Measured]) -> Table:
    """Which factors of the published strength and learning rate were chosen."""
    own = [m for m in measured if len(choices(config, m.arm)) > 1]
    columns: list[str | Column] = ["", *config.columns()]
    rows = [[m.arm.label, *(_factors(m, scenario) for scenario in config.columns())] for m in own]
    tried = {"strength": config.strengths, "strength of SI": config.si_strengths, "rate": config.rates}
    text = "; ".join(f"{name} {', '.join(f'{each:g}' for each in values)}" for name, values in tried.items() if values)
    return Table("Factors of the published settings", columns, rows, f"Tried: {text}.")


def _factors(m: Measured, scenario: Scenario) -> str | None:
    outputs = m.scenarios.get(scenario)
    if outputs is None:
        return None
    has_strength = "strength" in all_options(STRATEGIES[m.arm.name])
    return ", ".join(
        f"{name} {each:g}" for name, each in m.choices[outputs]._asdict().items() if has_strength or name == "rate"
    )


def pictures(config: Config, measured: Sequence[Measured], figures: Path) -> list[Image]:
    """Accuracy against bytes kept, a picture for every scenario; the hardest one first."""
    drawn = []
    for scenario in reversed(config.columns()):
        points = [
            Point(m.arm.label, max(kept, NOTHING) / MEGABYTE, value)
            for m in measured
            if (value := m.accuracy(scenario)) is not None and (kept := m.kept(scenario)) is not None
        ]
        if points:
            title = f"Accuracy against what is kept ({scenario})"
            caption = "Methods that keep nothing beyond the model stand at 0.001 MB."
            drawn.append(
                scatter(
                    points, figures / f"{scenario}.svg", title, "megabytes kept beyond the model", "average accuracy",
                    percent=True, logx=True, caption=caption,
                )
            )  # fmt: skip
    return drawn


def stats(config: Config, measured: Sequence[Measured]) -> list[Stat]:
    """The best method of every scenario; the upper bound does not compete."""
    found = []
    for scenario in config.columns():
        values = [(value, m) for m in measured if m.arm.name != "JointTraining" and (value := m.accuracy(scenario))]
        if values:
            value, best = max(values, key=lambda pair: pair[0].mean)
            found.append(Stat(scenario, f"{value.mean:.2%}", best.arm.label))
    return found


def headline(found: Sequence[Comparison]) -> Headline | None:
    """How many of the published values this run comes near to."""
    away = [c.away for c in found if c.away is not None]
    if not away:
        return None
    near = sum(abs(each) <= FAR for each in away)
    return Headline("values within two published standard deviations", f"{near} of {len(away)}", "")


def twins_headline(config: Config, measured: Sequence[Measured]) -> Headline | None:
    """What Powerpropagation adds to each method, in points, in the first scenario of the table."""
    scenario, *_ = config.columns()
    means = {(m.arm.name, m.arm.alpha): value.mean for m in measured if (value := m.accuracy(scenario)) is not None}
    gains = {
        name: 100 * (mean - means[name, 1.0])
        for (name, alpha), mean in means.items()
        if alpha > 1 and (name, 1.0) in means
    }
    if not gains:
        return None
    shown = ", ".join(f"{name} {gain:+.2f}" for name, gain in gains.items())
    return Headline(f"what Powerpropagation adds, {scenario}", f"{shown} points", "improves both (generative models)")
