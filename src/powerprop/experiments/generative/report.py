"""What continual generative modelling says: the paper's table, curves of every task, and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from powerprop.experiments.generative.arms import DAMPED, Choice
from powerprop.experiments.generative.config import Config
from powerprop.experiments.generative.figures import figure_of_averages, figure_of_samples, figure_of_tasks
from powerprop.experiments.generative.measured import PAPER, Measured, measure_all, summary
from powerprop.experiments.harness.experiment import Findings, Results, RunError
from powerprop.experiments.harness.pages import run_page
from powerprop.report import Column, Headline, Mean, Section, Stat, Table
from powerprop.train.precision import precision_note

TITLES = {"mnist": "Ten digits in one autoencoder (MNIST)", "notmnist": "Ten letters in one autoencoder (notMNIST)"}
INTRO = (
    "Ten tasks, one character each, learned one after the other by a variational autoencoder: an encoder "
    "784-500-500-500-100 and a decoder head 50-500-500 for every task, and a decoder 500-500-784 that all tasks share. "
    "What is learned later may spoil the shared decoder for the characters of before; the methods differ in how they "
    "prevent it."
)
BEST = "Powerprop+EfficientPackNet"


def report(config: Config, results: Results, out: Path) -> Findings:
    """Draw the figures into `out/figures` and write the page, the tables and the summary."""
    measured = measure_all(config, results)
    if not any(m.runs for m in measured):
        raise RunError(f"every run diverged: {'; '.join(text for m in measured for text in m.diverged)}")
    table, figures = main_table(config, measured), out / "figures"
    lost, tried = [text for m in measured for text in m.diverged], [m for m in measured if m.tried]
    notes = " ".join(sorted(set().union(*(m.notes for m in measured))))
    sections = [
        Section("Test log-likelihood", likelihood_text(config, measured), tables=[table]),
        Section("What forgetting looks like", SAMPLES, [figure_of_samples(config, measured, out)]),
        Section("Task by task", CURVES, [figure_of_averages(config, measured, figures),
                                         figure_of_tasks(config, measured, figures)]),
        *([Section("Choices", CHOICES, tables=[choice_table(tried)])] if tried else []),
        *([Section("Diverged", "\n\n".join(lost))] if lost else []),
    ]  # fmt: skip
    page = run_page(
        out, config, TITLES[config.dataset], f"{INTRO}\n\n{run_note(config)} {notes}".strip(),
        "Section 5.2, table 3, and the figures of appendix C.", sections, stats(measured), headline(config, measured),
    )  # fmt: skip
    return Findings(page, table, summary(config, measured))


SAMPLES = (
    "Every method draws the characters of all tasks after it has learned the last one. Each task has kept its own "
    "part of the decoder; where the strokes are gone, the shared part has been overwritten."
)
CURVES = "The log-likelihood of the test images of a task when it has just been learned, and after every later task."
CHOICES = (
    "The power, and the strength and damping δ of a penalty, were chosen on validation images, on the first tasks with "
    "the first seed, for each method by itself. The log-likelihood with each; δ = 0 is the method as published."
)


def likelihood_text(config: Config, measured: Sequence[Measured]) -> str:
    """How the numbers came about, and of which methods no task's likelihood has moved."""
    exact = [m.arm.label for m in measured if m.unchanged() and m.arm.strategy == "EfficientPackNet"]
    kept = f" Of {' and '.join(exact)} every task's likelihood is, to the bit, what it was when the task was learned."
    return (
        f"Average over all tasks after the last, in nats, estimated with {config.samples:,} importance samples of each "
        f"image.{kept if exact else ''}"
    )


def run_note(config: Config) -> str:
    """What this run did, for a reader who will compare it with others."""
    seeds = "one seed" if config.seeds == 1 else f"{config.seeds} seeds"
    momentum = f"; momentum 0.9 with {config.momentum_lr:g} for EPN and with Powerprop" if config.momentum_lr else ""
    test = f"{config.test} random test images of each character" if config.test else "all test images"
    networks = "1 network" if config.vcl_samples == 1 else f"{config.vcl_samples} networks"
    slow = f", {config.si_steps:,} for SI" if config.si_steps else ""
    return (
        f"This run: {config.tasks} tasks, {config.steps:,} steps of {config.batch} images each{slow}, and "
        f"{config.retrain_steps:,} more for EPN after pruning; Adam with {config.lr:g}{momentum}; "
        f"α = {' or '.join(f'{each:g}' for each in config.alphas)}, γ = {config.gamma:g}; VCL draws {networks} a step; "
        f"{config.samples:,} importance samples, {test}; {seeds}. The paper: 200 epochs (about 21,600 steps) a task on "
        "MNIST, 400 on notMNIST and for SI, 10 networks a step, 5,000 importance samples, all test images."
        + "".join(f" While training: {each[0].lower()}{each[1:]}." for each in precision_note(config.precision))
    )


def main_table(config: Config, measured: Sequence[Measured]) -> Table:
    """One row per method, the paper's value beside ours."""
    columns: list[str | Column] = [
        "", "α", Column("log-likelihood", "max", 2), Column("paper", paper=True, digits=2),
        Column("when learned", None, 1), Column("forgotten since", None, 2),
        Column("shared weights in use", None, 1, percent=True),
    ]  # fmt: skip
    printed = PAPER[config.dataset]
    rows = [
        [
            m.arm.label, f"{m.choice.alpha:g}", m.average(), printed[m.arm.name], m.learned(), m.forgotten(), m.used(),
        ]
        for m in measured
    ]  # fmt: skip
    caption = (
        "Test log-likelihood in nats, higher is better. When learned, forgotten since: with "
        f"{config.curve_samples:,} importance samples of each image, which is a lower bound of what more would give."
    )
    return Table(f"All {config.tasks} tasks after the last", columns, rows, caption)


def choice_table(measured: Sequence[Measured]) -> Table:
    """The validation log-likelihood with everything that was tried, strengths in columns."""
    strengths = sorted({each.strength or 0.0 for m in measured for each in m.tried})
    shown = (f"strength {each:g}" if each else "no penalty" for each in strengths)
    columns: list[str | Column] = ["", "α", "δ", *shown]
    rows: list[list[str | Mean | float | None]] = []
    for m in measured:
        for alpha, damping in dict.fromkeys((each.alpha, each.damping) for each in m.tried):
            values = [_tried(m, Choice(alpha, each or None, damping)) for each in strengths]
            rows.append([m.arm.label, f"{alpha:g}", f"{damping:g}" if m.arm.strategy in DAMPED else "", *values])
    return Table("Validation log-likelihood", columns, rows, "An asterisk is what was chosen.")


def _tried(m: Measured, choice: Choice) -> str | None:
    value = m.tried.get(choice)
    return None if value is None else f"{value:.2f}{' *' if choice == m.choice else ''}"


def stats(measured: Sequence[Measured]) -> list[Stat]:
    """The best method, what it forgets, and the baseline."""
    found = [(value, m) for m in measured if (value := m.average()) is not None]
    value, best = max(found, key=lambda pair: pair[0].mean)
    naive = [f"{v.mean:.1f} naively" for v, m in found if m.arm.strategy == "Naive"]
    return [
        Stat("best log-likelihood", f"{value.mean:.2f}", f"{best.arm.label}{', ' + naive[0] if naive else ''}"),
        *(
            Stat("shared weights in use", f"{used.mean:.1%}", m.arm.label)
            for m in measured
            if (used := m.used()) is not None
        ),
    ]


def headline(config: Config, measured: Sequence[Measured]) -> Headline | None:
    """Powerprop + EfficientPackNet, or the best if it was not run."""
    known = {m.arm.name: value for m in measured if (value := m.average()) is not None}
    name = BEST if BEST in known else max(known, key=lambda each: known[each].mean)
    label = next(m.arm.label for m in measured if m.arm.name == name)
    return Headline(f"log-likelihood of {label}", known[name].format(2), f"{PAPER[config.dataset][name]:.2f}")
