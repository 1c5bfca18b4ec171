"""Every method of continual learning on one benchmark: three tables, and Powerpropagation with EWC and Laplace.

The presets `cpu` follow the protocols with fewer epochs where these would take hours, and with fewer methods; the
presets `paper` are the protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, NamedTuple

from powerprop.continual import SCENARIOS, STRATEGIES, Accuracies, Scenario
from powerprop.continual.combine import all_arguments
from powerprop_paper import data
from powerprop_paper.experiments import Columns, Story, learn_tasks, listed, lost_runs, table
from powerprop_paper.experiments.baselines.learners import (
    group_accuracy,
    load_images,
    make_learner,
    make_stream,
    one_by_one,
    validation,
)
from powerprop_paper.experiments.baselines.protocol import (
    ECONOMY,
    NEEDS_PIXELS,
    PROTOCOLS,
    names_of,
    outputs_of,
    steps_of,
)
from powerprop_paper.experiments.baselines.published import CLASS, PRINTED, PUBLISHED
from powerprop_paper.experiments.baselines.published import Value as Published
from powerprop_paper.pages import Column, Figure, Headline, Page, Percent, Section, Stat, Table, Value
from powerprop_paper.report import Mean, Point, scatter
from powerprop_paper.run import Experiment, JobsFailedError, Progress, Rows, Run
from powerprop_paper.settings import Count, EachOnce, Natural, Positive, Range, Seeds, Settings, require
from powerprop_paper.train import local_device, matmul_precision, precision_note

SHOWN = {"JointTraining": "Joint", "AGEM": "A-GEM", "ICaRL": "iCaRL"}
"""Methods that readers know by another name than their class."""
PACKING = {"PackNet", "EfficientPackNet"}
FAR = 2.0
"""So many published standard deviations are far."""
MEGABYTE, NOTHING = 1e6, 1e3
"""Methods that keep nothing are drawn at a kilobyte, since a logarithmic axis has no zero."""

Factors = Annotated[tuple[Positive, ...], EachOnce()]


@dataclass(frozen=True)
class Config(Settings):
    """The settings of a table of continual-learning methods on one benchmark."""

    benchmark: Literal["split-mnist", "permuted-mnist", "split-cifar100"]
    """its protocol says which stream, network and optimiser"""
    epochs: Positive
    """passes through the images of every task; a part of one is possible"""
    seeds: Seeds
    """runs of each method: first weights, order of pixels, batches"""
    strategies: Annotated[tuple[str, ...], EachOnce()] = ("all",)
    """names of methods, or all"""
    scenarios: Annotated[tuple[Scenario, ...], EachOnce()] = SCENARIOS
    """the columns of the table, of those that the benchmark has"""
    powerprop: tuple[str, ...] = ("EfficientPackNet",)
    """those of the methods that are run with Powerpropagation too"""
    alpha: Annotated[float, Range(1, above=True)] = 1.375
    """its power, at the learning rate of the method without it"""
    strengths: Factors = (1.0,)
    """factors of the published strength of a penalty, of which the best on validation data is taken, for each method,
    power and scenario; a single one is taken as it is"""
    si_strengths: tuple[Positive, ...] = ()
    """those of SI, whose importances grow with the steps of a task, so that published ones are too small for fewer;
    none means the same as of the others"""
    rates: Factors = (1.0,)
    """factors of the learning rate, chosen together with the strengths"""
    tuning_seeds: Seeds = 1
    """runs of each strength and rate that are chosen from"""
    tasks: Natural = 0
    """the first so many of the stream; 0 means all"""
    width: Natural = 0
    """units of a hidden layer of a fully connected network; 0 means the protocol's"""
    images: Natural = 0
    """only the last so many training images of the data are used; 0 means all"""
    validation: Count = 5000
    """the last so many training images of the data are for choices: strengths, sparsities"""
    test: Natural = 0
    """the first so many test images of the data are measured; 0 means all"""
    group: Count = 128
    """methods that infer the task do so from single images, and once more from so many that share it"""
    economy: bool = False
    """let the costliest methods rehearse and draw less than published, and have the steps of the epochs where they are
    published with more"""
    generator_steps: Natural = 0
    """with economy, steps per task of RtF in the class-incremental scenario, where it needs more than others; three
    quarters of them for DGR, which needs fewer; 0 means those of the epochs"""
    matmul_precision: Literal["float32", "bfloat16"] = "float32"
    """of the factors in products of matrices; all else is float32"""

    def __post_init__(self) -> None:
        super().__post_init__()
        protocol, possible = PROTOCOLS[self.benchmark], names_of(("all",), self.benchmark)
        for each in self.strategies:
            text = f"strategies on {self.benchmark} must be all, or some of {', '.join(possible)}, got {each!r}"
            require(each == "all" or each in possible, text)
        for each in self.powerprop:
            require(each in STRATEGIES, f"powerprop must be some of {', '.join(STRATEGIES)}, got {each!r}")
        distinct = len(set(self.si_strengths)) == len(self.si_strengths)
        require(distinct, f"si_strengths must be none or some, each once, got {self.si_strengths}")
        most = f"the {protocol.tasks} of {self.benchmark}"
        require(self.tasks <= protocol.tasks, f"tasks must be at most {most}, got {self.tasks}")
        wanted = f"scenarios of {self.benchmark} are {', '.join(protocol.outputs)}"
        require(self.columns, f"{wanted}, got {', '.join(self.scenarios)}")
        fits = not self.width or protocol.model == "mlp"
        require(fits, f"width is of fully connected networks, which {self.benchmark} has none of, got {self.width}")
        fits = self.economy or not self.generator_steps
        require(fits, f"generator_steps are the published ones without economy, got {self.generator_steps}")
        self.check_held_back()

    @property
    def tunes(self) -> bool:
        """True if strengths or rates are chosen on validation data."""
        return max(len(self.strengths), len(self.si_strengths), len(self.rates)) > 1

    @property
    def columns(self) -> tuple[Scenario, ...]:
        """The scenarios of the table, in their usual order."""
        has = PROTOCOLS[self.benchmark].outputs
        return tuple(each for each in SCENARIOS if each in has and each in self.scenarios)

    @property
    def names(self) -> list[str]:
        """The methods of the table."""
        return names_of(self.strategies, self.benchmark)


SMALL: dict[str, Any] = {
    "seeds": 1, "tasks": 2, "images": 1_200, "validation": 200, "test": 100, "group": 16, "economy": True,
}  # fmt: skip
SPLIT_MNIST = {
    "smoke": Config("split-mnist", epochs=0.2, width=16, **SMALL),
    "cpu": Config("split-mnist", epochs=4, seeds=3, economy=True, generator_steps=2_000, matmul_precision="bfloat16"),
    "paper": Config("split-mnist", epochs=4, seeds=10),
}
PERMUTED_MNIST = {
    "smoke": Config("permuted-mnist", epochs=0.2, width=16, strategies=("Naive", "SI", "EWC"), **SMALL),
    "cpu": Config(
        "permuted-mnist", epochs=2, seeds=3, strategies=("Naive", "EWC", "Laplace", "MAS", "SI"), powerprop=(),
        scenarios=("class-incremental",), strengths=(0.25, 0.5, 1.0, 2.0), si_strengths=(32.0, 64.0), tuning_seeds=3,
        test=2_000, economy=True, matmul_precision="bfloat16",
    ),
    "paper": Config("permuted-mnist", epochs=10, seeds=10),
}  # fmt: skip
SPLIT_CIFAR100 = {
    "smoke": Config("split-cifar100", epochs=0.1, strategies=("Naive", "GPM"), powerprop=(), **SMALL),
    "cpu": Config(
        "split-cifar100", epochs=3, seeds=1, test=2_000, validation=2_500, alpha=1.75, economy=True,
        strategies=("Naive", "OWM", "AGEM", "EWC", "ER", "HAT", "GPM", "EfficientPackNet"),
    ),
    "paper": Config("split-cifar100", epochs=200, seeds=5, validation=2_500, alpha=1.75),
}  # fmt: skip
PENALTIES: dict[str, Any] = {
    "benchmark": "permuted-mnist", "strategies": ("EWC", "Laplace"), "powerprop": ("EWC", "Laplace"),
    "scenarios": ("task-incremental",),
}  # fmt: skip
EWC = {
    "smoke": Config(epochs=0.1, width=16, strengths=(0.1, 1.0), rates=(1.0, 3.0), **PENALTIES, **SMALL),
    "cpu": Config(
        epochs=2, seeds=3, images=25_000, test=2_000, alpha=1.5, strengths=(0.01, 0.1, 1.0), rates=(3.0, 10.0, 30.0),
        matmul_precision="bfloat16", **PENALTIES,
    ),
    "paper": Config(
        epochs=10, seeds=10, alpha=1.5, strengths=(0.01, 0.1, 1.0, 10.0), rates=(1.0, 3.0, 10.0), **PENALTIES
    ),
}  # fmt: skip


# One job: a method learns the stream and is measured in the scenarios that its outputs serve.


def learn(
    cfg: Config, folder: Path, progress: Progress, strategy: str, alpha: float, outputs: str, strength: float,
    rate: float, seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Learn all tasks, from the saved learner in the folder if there is one, and measure.

    strength, rate: factors of the published strength of a penalty and of the protocol's learning rate.
    """
    device, images = local_device(), load_images(cfg)
    stream = make_stream(cfg, images.to(device), strategy, seed)
    scenarios = outputs_of(cfg.benchmark, strategy, cfg.columns)[outputs]
    learner = make_learner(cfg, images, strategy, alpha, outputs, strength, rate, seed, device)
    steps = learner.steps + getattr(learner, "retrain_steps", 0)

    def after_task(task: data.Task) -> dict[str, float]:
        rows = learner.records["accuracies"]
        return {each: Accuracies(each, rows[each]).average() for each in scenarios}

    records = learn_tasks(
        folder, progress, learner, stream, steps, after_task, scenarios, cfg.matmul_precision, **one_by_one(learner)
    )
    with matmul_precision(cfg.matmul_precision):
        return {
            "accuracies": records["accuracies"],
            "validation": {each: validation(learner, stream, each) for each in scenarios if cfg.tunes},
            "memory_bytes": learner.memory_bytes(),
            "group_accuracy": group_accuracy(cfg, learner, stream) if CLASS in scenarios else None,
            "note": images.note,
        }


# Rows of the table and the trainings that they need; strengths and learning rates are chosen first, if asked.


class Method(NamedTuple):
    """A row: a strategy, with or without Powerpropagation."""

    strategy: str
    alpha: float

    @property
    def label(self) -> str:
        """What the reader sees."""
        shown = SHOWN.get(self.strategy, self.strategy)
        return shown if self.alpha == 1 else f"Powerprop + {shown}"

    @property
    def has_strength(self) -> bool:
        """True if it has a penalty of some strength."""
        return "strength" in all_arguments(STRATEGIES[self.strategy])


class Choice(NamedTuple):
    """Factors of the published strength of a penalty and of the learning rate."""

    strength: float = 1.0
    rate: float = 1.0


Training = tuple[Method, str]
"""A method with a kind of outputs."""


def trainings(cfg: Config) -> list[Training]:
    """Every method, and below it the same with Powerpropagation, with every kind of outputs that its columns need."""
    return [
        (Method(name, alpha), outputs)
        for name in cfg.names
        for alpha in ((1.0, cfg.alpha) if name in cfg.powerprop else (1.0,))
        for outputs in outputs_of(cfg.benchmark, name, cfg.columns)
    ]


def settings_of(method: Method, outputs: str, choice: Choice) -> dict[str, Any]:
    """Of a training, from every seed."""
    return {**method._asdict(), "outputs": outputs, **choice._asdict()}


def choices(cfg: Config, method: Method) -> list[Choice]:
    """What a method may be trained with: every strength, if it has one, at every rate."""
    strengths = (cfg.si_strengths or cfg.strengths) if method.strategy == "SI" else cfg.strengths
    return [Choice(*each) for each in product(strengths if method.has_strength else (1.0,), cfg.rates)]


def choose(cfg: Config, method: Method, outputs: str, tuning: Rows) -> Choice:
    """The choice with the best validation accuracy over the tuning seeds; one that diverged is below all others."""

    def score(choice: Choice) -> float:
        tried = tuning.where(**settings_of(method, outputs, choice))
        return -1.0 if tried.lost else fmean(fmean(row["validation"].values()) for row in tried)

    found = choices(cfg, method)
    return found[0] if len(found) == 1 else max(found, key=score)


# The page.


@dataclass(frozen=True)
class MethodRows:
    """A row: the finished runs by kind of outputs, what each was trained with, and the outputs of each column."""

    method: Method
    runs: Mapping[str, Rows]
    choices: Mapping[str, Choice]
    scenarios: Mapping[Scenario, str]

    def of(self, scenario: Scenario) -> Rows:
        """The finished runs that a column is of; none for columns that the method does not have."""
        return self.runs.get(self.scenarios.get(scenario, ""), Rows())

    def accuracy(self, scenario: Scenario) -> Mean | None:
        """Average over all tasks after the last; None where the method has no value."""
        return self.of(scenario).mean(lambda row: Accuracies(scenario, row["accuracies"][scenario]).average())

    def group_accuracy(self) -> Mean | None:
        """Class-incremental, the task inferred from a group of images."""
        found = [value for rows in self.runs.values() for value in rows.values("group_accuracy") if value is not None]
        return Mean.of(found) if found else None

    def kept(self, *scenarios: Scenario) -> int | None:
        """Bytes beyond the model, the most of all seeds: memories have one size, bases may differ a little."""
        return max((bytes for each in scenarios for bytes in self.of(each).values("memory_bytes")), default=None)


def main(cfg: Config, run: Run, story: Story) -> Page:
    """Choose, train all seeds with what was chosen, and say what was found."""
    run.prepare(lambda: load_images(cfg).split_validation(cfg.validation))
    pairs = trainings(cfg)
    several = [(*pair, found) for pair in pairs if len(found := choices(cfg, pair[0])) > 1]
    every = [settings_of(method, outputs, each) for method, outputs, found in several for each in found]
    tuning = run.map(learn, [{**each, "seed": seed} for seed in range(cfg.tuning_seeds) for each in every])
    if run.failures:
        raise JobsFailedError(run.failures)
    chosen = {pair: choose(cfg, *pair, tuning) for pair in pairs}
    final = [settings_of(*pair, choice) for pair, choice in chosen.items()]
    rows = run.map(learn, [{**each, "seed": seed} for seed in range(cfg.seeds) for each in final])
    return make_page(cfg, story, rows, chosen)


def make_page(cfg: Config, story: Story, rows: Rows, chosen: Mapping[Training, Choice]) -> Page:
    """Accuracy by scenario, values of others beside ours, accuracy against bytes kept."""
    measured = measure(cfg, rows, chosen)
    beside = comparisons(cfg, measured)
    sections = [
        Section("All methods", "", pictures(cfg, measured), [main_table(cfg, measured)]),
        *([Section("Beside published values", BESIDE, tables=[beside_table(beside)])] if beside else []),
        *([Section("Choices", choice_note(cfg), tables=[choice_table(cfg, measured)])] if cfg.tunes else []),
        *Section.diverged(lost_runs(rows, partial(name_of, cfg))),
    ]
    intro = f"{story.intro}\n\n{run_note(cfg)} {rows.notes}".strip()
    top = twins_headline(cfg, measured, story.printed) if story.printed else headline(beside)
    return Page(story.title, intro, sections, story.paper, stats(cfg, measured), top)


def measure(cfg: Config, rows: Rows, chosen: Mapping[Training, Choice]) -> list[MethodRows]:
    """Every row of the table."""
    found = []
    for method in dict.fromkeys(method for method, _ in chosen):
        own = {outputs: choice for (each, outputs), choice in chosen.items() if each == method}
        runs = {outputs: rows.where(**settings_of(method, outputs, each)).finished for outputs, each in own.items()}
        kinds = outputs_of(cfg.benchmark, method.strategy, cfg.columns)
        columns = {scenario: outputs for outputs, scenarios in kinds.items() for scenario in scenarios}
        found.append(MethodRows(method, runs, own, columns))
    return found


def name_of(cfg: Config, row: Mapping[str, Any]) -> str:
    """What was run."""
    scenarios = " and ".join(outputs_of(cfg.benchmark, row["strategy"], cfg.columns)[row["outputs"]])
    return f"{Method(row['strategy'], row['alpha']).label}, {scenarios}"


BESIDE = (
    "Every value with its scenario. The paper's table takes its values from the published ones; where it prints one of "
    "another scenario under class-incremental learning, it stands in the row of the scenario that it is of. "
    f"Away: our mean minus the published one, in its standard deviations; more than {FAR:g} has an exclamation mark. "
    "EfficientPackNet and PackNet infer the task from groups of images here, as in the paper."
)


def choice_note(cfg: Config) -> str:
    """How strengths and rates were chosen."""
    seeds = "with the first seed" if cfg.tuning_seeds == 1 else f"by the average of {cfg.tuning_seeds} seeds"
    return (
        "The strength of a penalty and the learning rate were chosen on validation data among factors of the published "
        f"ones, for each method and power by itself, {seeds}; the table has all seeds at what was chosen."
    )


def run_note(cfg: Config) -> str:
    """What this run did, for a reader who will compare it with others; of methods that are in the table."""
    protocol, names = PROTOCOLS[cfg.benchmark], cfg.names
    shortened = f" of the last {cfg.images:,} training images" if cfg.images else ""
    shortened += f", the first {cfg.test:,} test images" if cfg.test else ""
    of_pixels = ", ".join(name for name in protocol.steps if name in names)
    own = ", ".join(f"{name}: {kind} with {lr:g}" for name, (kind, lr) in protocol.own.items() if name in names)
    saved = savings(cfg)
    sentences = [
        f"Protocol: {protocol.reference}",
        f"This run: {cfg.tasks or protocol.tasks} tasks, {cfg.epochs:g} epochs{shortened}, {cfg.runs}, "
        f"{cfg.validation:,} training images held back for choices",
        "Images have mean 0 and variance 1" + (f"; for {of_pixels} they are pixels in [0, 1]" if of_pixels else ""),
        *([f"Other optimisers: {own}"] if own else []),
        *(["A third of the steps of PackNet and EfficientPackNet are retraining"] if PACKING & set(names) else []),
        *([f"To save time: {'; '.join(saved)}"] if saved else []),
        *precision_note(cfg.matmul_precision),
    ]
    return f"{'. '.join(sentences)}."


def savings(cfg: Config) -> list[str]:
    """Where methods have less than is published."""
    if not cfg.economy:
        return []
    less = {name: ", ".join(f"{k} {v}" for k, v in own.items()) for name, own in ECONOMY.items() if name in cfg.names}
    steps = {name: steps_of(cfg.benchmark, name, CLASS, 0, cfg.generator_steps) for name in sorted(NEEDS_PIXELS)}
    return [f"{name} with {what}" for name, what in less.items()] + [
        f"{name} with {shorter:,} steps per task in the class-incremental scenario"
        for name, shorter in steps.items()
        if shorter and name in cfg.names
    ]


def main_table(cfg: Config, measured: Sequence[MethodRows]) -> Table:
    """One row per method, the scenario of every number in the heading; empty where a method has none."""

    def megabytes(m: MethodRows) -> float | None:
        kept = m.kept(*cfg.columns)
        return None if kept is None else kept / MEGABYTE

    groups = CLASS in cfg.columns and any(m.group_accuracy() is not None for m in measured)
    of_groups = (Percent(f"{CLASS}, {cfg.group} images", digits=2), MethodRows.group_accuracy)
    columns: Columns = [
        ("", lambda m: m.method.label),
        *((Percent(each, "max", 2), partial(MethodRows.accuracy, scenario=each)) for each in cfg.columns),
        *([of_groups] if groups else []), (Column("kept (MB)", digits=2), megabytes),
    ]  # fmt: skip
    caption = (
        "Average test accuracy over all tasks after the last, in percent. Kept: what a method keeps beyond the model, "
        "the most of all scenarios."
    )
    if groups:
        caption += f" {cfg.group} images: methods that infer the task do so from so many images that share it."
    return table(f"{cfg.benchmark}, all tasks, after the last", columns, measured, caption)


class Comparison(NamedTuple):
    """One of our values beside those of others: the published one, and the paper's if it is of this scenario."""

    label: str
    scenario: Scenario
    here: Mean
    published: Published | None
    printed: Published | None

    @property
    def away(self) -> float | None:
        """From the published value, in its standard deviations; None if there is none."""
        return None if self.published is None else (100 * self.here.mean - self.published.mean) / self.published.std


def comparisons(cfg: Config, measured: Sequence[MethodRows]) -> list[Comparison]:
    """Every value that somebody has published, the scenario named; groups of images where the paper has groups."""
    found = []
    for m in measured:
        name, alpha = m.method
        known = PUBLISHED[cfg.benchmark].get(name, {}) if alpha == 1 else {}
        kind, printed = PRINTED[cfg.benchmark].get(f"Powerprop + {name}" if alpha > 1 else name, (None, None))
        for scenario in cfg.columns:
            here = (m.group_accuracy() if scenario == CLASS else None) or m.accuracy(scenario)
            of_paper = printed if scenario == kind else None
            if here is not None and (scenario in known or of_paper is not None):
                found.append(Comparison(m.method.label, scenario, here, known.get(scenario), of_paper))
    return found


def beside_table(found: Sequence[Comparison]) -> Table:
    """One row per value that somebody has published."""

    def away(c: Comparison) -> str | None:
        return None if c.away is None else f"{c.away:+.1f}{' !' if abs(c.away) > FAR else ''}"

    columns: Columns = [
        ("", lambda c: c.label), ("scenario", lambda c: c.scenario), (Percent("here", digits=2), lambda c: c.here),
        (Column("published", paper=True), lambda c: c.published and str(c.published)),
        ("source", lambda c: c.published and c.published.source), ("away", away),
        (Column("the paper's table", paper=True), lambda c: c.printed and str(c.printed)),
    ]  # fmt: skip
    return table("Values and those of others", columns, found, "Average accuracy in percent.")


def choice_table(cfg: Config, measured: Sequence[MethodRows]) -> Table:
    """Which factors of the published strength and learning rate were chosen."""

    def factors(scenario: Scenario) -> Callable[[MethodRows], Value]:
        def value(m: MethodRows) -> Value:
            chosen = m.choices[m.scenarios[scenario]]._asdict() if scenario in m.scenarios else {}
            shown = {name: each for name, each in chosen.items() if m.method.has_strength or name == "rate"}
            return ", ".join(f"{name} {each:g}" for name, each in shown.items()) or None

        return value

    tried = {"strength": cfg.strengths, "strength of SI": cfg.si_strengths, "rate": cfg.rates}
    text = "; ".join(f"{name} {listed(values)}" for name, values in tried.items() if values)
    columns: Columns = [("", lambda m: m.method.label), *((each, factors(each)) for each in cfg.columns)]
    several = [m for m in measured if len(choices(cfg, m.method)) > 1]
    return table("Factors of the published settings", columns, several, f"Tried: {text}.")


def pictures(cfg: Config, measured: Sequence[MethodRows]) -> list[Figure]:
    """Accuracy against bytes kept, a picture for every scenario; the hardest one first."""
    drawn = []
    for scenario in reversed(cfg.columns):
        points = [
            Point(m.method.label, max(kept, NOTHING) / MEGABYTE, value)
            for m in measured
            if (value := m.accuracy(scenario)) is not None and (kept := m.kept(scenario)) is not None
        ]
        if points:
            picture = Figure(
                scenario, scatter, points, title=f"Accuracy against what is kept ({scenario})",
                xlabel="megabytes kept beyond the model", ylabel="average accuracy", percent=True, logx=True,
                caption="Methods that keep nothing beyond the model stand at 0.001 MB.",
            )  # fmt: skip
            drawn.append(picture)
    return drawn


def stats(cfg: Config, measured: Sequence[MethodRows]) -> list[Stat]:
    """The best method of every scenario; the upper bound does not compete."""
    found = []
    for scenario in cfg.columns:
        rivals = [m for m in measured if m.method.strategy != "JointTraining"]
        if values := [(value, m) for m in rivals if (value := m.accuracy(scenario))]:
            value, best = max(values, key=lambda pair: pair[0].mean)
            found.append(Stat(scenario, f"{value.mean:.2%}", best.method.label))
    return found


def headline(found: Sequence[Comparison]) -> Headline | None:
    """How many of the published values this run comes near to."""
    away = [c.away for c in found if c.away is not None]
    if not away:
        return None
    near = sum(abs(each) <= FAR for each in away)
    return Headline("values within two published standard deviations", f"{near} of {len(away)}", "")


def twins_headline(cfg: Config, measured: Sequence[MethodRows], printed: str) -> Headline | None:
    """What Powerpropagation adds to each method, in points, in the first scenario of the table."""
    scenario, *_ = cfg.columns
    means = {m.method: value.mean for m in measured if (value := m.accuracy(scenario)) is not None}
    pairs = [(each, Method(each.strategy, 1.0)) for each in means if each.alpha > 1]
    gains = {each.strategy: 100 * (means[each] - means[plain]) for each, plain in pairs if plain in means}
    if not gains:
        return None
    shown = ", ".join(f"{name} {gain:+.2f}" for name, gain in gains.items())
    return Headline(f"what Powerpropagation adds, {scenario}", f"{shown} points", printed)


CLASS_TABLE = 'Section 5.3.2, table "Class-incremental learning results", column'
STORIES = {
    "split-mnist-strategies": Story(
        "Split-MNIST: every method, every scenario",
        f"{CLASS_TABLE} Split-MNIST.",
        "Five tasks of two digits, learned one after the other in a network of 784-400-400 units by every method of "
        "the library. Task-incremental: a head for each task, and the task is given. Domain-incremental: first or "
        "second digit of the task, which is not given. Class-incremental: which of ten digits.",
    ),
    "permuted-mnist-strategies": Story(
        "Permuted-MNIST: every method, every scenario",
        f"{CLASS_TABLE} Permuted-MNIST.",
        "Ten tasks, each with the pixels in another order, learned one after the other in a network of 784-1000-1000 "
        "units. Task-incremental: a head for each task, and the task is given. Domain-incremental: which of ten "
        "digits. Class-incremental: which of a hundred, ten for each order.",
    ),
    "split-cifar100-strategies": Story(
        "Split-CIFAR100: every method, with a head for each task",
        f"{CLASS_TABLE} 10-task Split-CIFAR100.",
        "Ten tasks of ten classes in an AlexNet-like network with a head for each task, which is given, or found out "
        "(class-incremental: the surest of all heads, or the task that a method infers).",
    ),
    "powerprop-ewc": Story(
        "Powerpropagation with EWC and Laplace",
        'Section 5.2, table "Deep generative models": Powerprop. + EWC and Powerprop. + Laplace improve on both; '
        "here on task-incremental Permuted-MNIST.",
        "Ten tasks, each with the pixels in another order, a head for each. The strength of the penalty and the "
        "learning rate are chosen on validation data for every row by itself.",
        printed="improves both (generative models)",
    ),
}
TABLE = "table of class-incremental learning, section 5.3"
IMPROVES = "section 5.2: Powerpropagation improves EWC and Laplace"
EVERY = "every method of continual learning on"
EXPERIMENTS = {
    name: Experiment(name, title, paper, presets, partial(main, story=STORIES[name]))
    for name, title, paper, presets in (
        ("split-mnist-strategies", f"{EVERY} five tasks of two digits", TABLE, SPLIT_MNIST),
        ("permuted-mnist-strategies", f"{EVERY} ten orders of the pixels", TABLE, PERMUTED_MNIST),
        ("split-cifar100-strategies", f"{EVERY} ten tasks of ten classes", TABLE, SPLIT_CIFAR100),
        ("powerprop-ewc", "EWC and Laplace with and without Powerpropagation, both tuned", IMPROVES, EWC),
    )
}
