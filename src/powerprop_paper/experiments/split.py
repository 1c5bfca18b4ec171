"""Task after task in one network, each with a sub-network of its own: section 5.3 of the paper.

The paper trains 50,000 steps per task (CIFAR: 75,000) with plain SGD and retrains as many; the presets `cpu` a few per
cent of it, from smaller first weights and at learning rates that grow with α.

`long-permuted-mnist` and its like are the figure "extremely long task sequences". γ = 0.9 leaves room for many tasks,
and the grid of fractions is finer: in steps of 10% a crowded network would give away weights that a task does not need.
The longest sequence goes on when no weight is free: then a task learns which of the frozen weights to use.

`rotated-mnist` is no experiment of the paper. Leaving out the weights of earlier tasks, as "frugal-packnet" does, might
cost most where tasks resemble each other: both forms stand beside each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, NamedTuple

from powerprop.continual import GRID, Accuracies, Packing, Scenario, accuracy_on
from powerprop.continual.packing.efficient import check_grid
from powerprop_paper import data
from powerprop_paper.experiments import Columns, Story, learn_tasks, lost_runs, table
from powerprop_paper.experiments.baselines.published import CLASS, PRINTED, TASK
from powerprop_paper.packing import Measures, PackingSettings, inference_curves, make_learner, make_stream
from powerprop_paper.pages import Figure, Headline, Page, Percent, Section, Stat, Table
from powerprop_paper.report import Curve, Mean, heatmap, lines
from powerprop_paper.run import Experiment, JobsFailedError, Progress, Row, Rows, Run, RunError
from powerprop_paper.settings import (
    Below1,
    Count,
    EachOnce,
    Natural,
    NonNegative,
    Positive,
    Powers,
    Share,
    require,
)
from powerprop_paper.train import local_device, matmul_precision, precision_note

LABELS = {
    "frugal-packnet": ("frugal EPN", "Frugal EfficientPackNet"), "efficient-packnet": ("EPN", "EfficientPackNet"),
    "packnet": ("PackNet", "PackNet"),
}  # fmt: skip
"""Methods in tables, where EPN is the paper's short form of EfficientPackNet, and in the table of colours."""
OURS = ("EfficientPackNet", "Powerprop + EfficientPackNet")
"""The rows of the paper's table that are its own."""


@dataclass(frozen=True, kw_only=True)
class Config(PackingSettings):
    """The settings of an experiment in which tasks are learned one after the other."""

    alphas: Powers
    """powers; 1 is the method without Powerpropagation"""
    steps: Count
    """of training per task"""
    data: Literal["mnist", "cifar100"] = "mnist"
    """data set"""
    stream: Literal["permuted", "rotated", "split"] = "permuted"
    """pixels of every task in an order of its own, images at an angle of its own, or some classes per task"""
    model: Literal["mlp", "alexnet"] = "mlp"
    """two hidden layers and one output layer for all tasks, or convolutions and one output layer per task"""
    methods: Annotated[tuple[Literal["frugal-packnet", "efficient-packnet", "packnet"], ...], EachOnce()] = (
        "efficient-packnet",
    )
    """efficient-packnet is the paper's: all weights take part, pruned at once; frugal-packnet prunes gradually, reuses
    the output layer of earlier tasks alone, and learns masks over frozen weights when a layer is full"""
    frugal_gamma: Share = 0.96
    """the gamma of frugal-packnet"""
    momentum: Below1 = 0.0
    """of SGD"""
    decay: tuple[Literal["training", "retraining"], ...] = ()
    """let the learning rate fall to zero along these phases"""
    init_scale: Positive = 1.0
    """the standard deviation of the first weights, and of those that are initialised again, in units of Glorot's; small
    ones leave the largest weights to those that have learned something"""
    clip: NonNegative = 0.0
    """the largest norm of a gradient; 0 is any"""
    shift: Natural = 0
    """training images of alexnet are moved by up to so many pixels, half of them mirrored; 0 leaves them as they are"""
    batch: Count = 64
    """images per step"""
    precision: Literal["float32", "bfloat16"] = "float32"
    """of the mlp: of the factors in products of matrices, all else is float32; of alexnet: of the passes of training,
    networks are measured and pruned in float32"""
    candidates: tuple[str, ...] = ()
    """settings to choose from, each such as "lr=0.1 gamma=0.98 clip=1", for every method and power by itself: the best
    on validation images of the first tasks among those that leave room for all"""
    tuning_tasks: Count = 2
    """so many tasks decide"""
    search: Literal["linear", "binary", "taylor"] = "linear"
    """how the sparsity of a task is found"""
    grid: tuple[float, ...] = GRID
    """kept fractions to choose from; frugal-packnet goes on below the last, down to 0.05%"""
    validation: Natural = 5000
    """the last so many training images of the data decide the sparsity"""
    test: Natural = 0
    """the first so many test images of a task are measured; 0 means all"""
    matrix: bool = True
    """measure all tasks after each one, and the whole test set with inferred tasks at the end"""
    groups: Annotated[tuple[Count, ...], EachOnce()] = (1, 4, 16, 64, 128)
    """sizes of the groups of images whose task is inferred together"""
    infer_at: tuple[Count, ...] = ()
    """numbers of tasks after which inference is probed, besides the last"""
    probe_tasks: Count = 10
    """so many tasks, evenly spaced, are probed"""
    probe_images: Count = 512
    """test images of each"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for at in self.infer_at:
            require(at <= self.tasks, f"infer_at must be in 1..{self.tasks}, the tasks, got {at}")
        if "frugal-packnet" in self.methods:
            self.check_prunings()
        self.check_held_back()
        fits = self.model == "mlp" or self.stream == "split"
        require(fits, f"model alexnet is for a split stream, got stream {self.stream!r}")
        fits = self.model == "alexnet" or not self.shift
        require(fits, f"shift moves images of networks of convolutions, got {self.shift} with {self.model}")
        check_grid(self.grid)
        require(len(set(self.candidates)) == len(self.candidates), f"candidates must differ, got {self.candidates}")
        for text in self.candidates:
            self.with_candidate(text)
        fits = not self.candidates or self.tuning_tasks <= self.tasks
        require(fits, f"tuning_tasks must be at most the {self.tasks} tasks, got {self.tuning_tasks}")

    def with_candidate(self, text: str | None) -> Config:
        """The settings with those of a candidate, which are refused where any others would be."""
        if text is None:
            return self
        pairs = [word.partition("=")[::2] for word in text.split()]
        try:
            found = {name: float(number) for name, number in pairs}
        except ValueError:
            found = {}
        good = len(found) == len(pairs) > 0 and found.keys() <= {"lr", "gamma", "clip"}
        require(good, f"a candidate must look like 'lr=0.1 gamma=0.98 clip=1', some or all of these, got {text!r}")
        if "gamma" in found:
            found["frugal_gamma"] = found["gamma"]
        return replace(self, candidates=(), **found)  # type: ignore[arg-type]


PERMUTED = {
    "smoke": Config(
        tasks=3, alphas=(1.0, 1.375), lr=0.3, seeds=1, steps=8, retrain_steps=4, gamma=0.3, clip=1.0, width=40,
        search="taylor", images=2_000, validation=500, test=64, groups=(1, 16), probe_images=32, prunings=2,
        pruning_steps=2, frugal_gamma=0.3, methods=("frugal-packnet", "efficient-packnet"),
    ),
    "cpu": Config(
        tasks=10, alphas=(1.0, 1.375), lr=1.0, seeds=1, steps=1_000, retrain_steps=500, gamma=0.99, clip=1.0,
        decay=("retraining",), init_scale=0.5, search="binary", methods=("frugal-packnet", "efficient-packnet"),
        frugal_gamma=0.995, precision="bfloat16",
    ),
    "paper": Config(
        tasks=10, alphas=(1.0, 1.375), lr=0.05, seeds=10, steps=50_000, retrain_steps=50_000, gamma=0.99,
        rate="paper",
    ),
}  # fmt: skip

ROTATED = {name: replace(preset, stream="rotated") for name, preset in PERMUTED.items()}
ROTATED["smoke"] = replace(ROTATED["smoke"], gamma=0.6, frugal_gamma=0.6, steps=40, retrain_steps=12, search="binary")

SPLIT = {
    "smoke": replace(
        PERMUTED["smoke"], stream="split", tasks=5, search="binary", probe_tasks=3,
        methods=("frugal-packnet", "efficient-packnet", "packnet"),
    ),
    "cpu": replace(PERMUTED["cpu"], stream="split", tasks=5, seeds=3, search="linear", frugal_gamma=0.998),
    "paper": replace(PERMUTED["paper"], stream="split", tasks=5),
}  # fmt: skip

SMALL_STEPS = tuple(round(0.95 * 0.95**k, 5) for k in range(100))
"""Kept fractions, each 5% below the one before, from 95% to 0.6%."""
LONG = {
    "smoke": replace(
        PERMUTED["smoke"], tasks=7, alphas=(1.0, 1.5), steps=4, retrain_steps=2, search="binary", grid=SMALL_STEPS,
        matrix=False, infer_at=(3,), probe_tasks=3, pruning_steps=1,
    ),
    "cpu": replace(
        PERMUTED["cpu"], tasks=100, alphas=(1.0, 1.25, 1.5), steps=700, retrain_steps=400, gamma=0.9, frugal_gamma=0.96,
        methods=("frugal-packnet",), grid=SMALL_STEPS, validation=2_000, matrix=False, groups=(1, 16, 128),
        infer_at=(10,), probe_images=256,
    ),
    "paper": replace(
        PERMUTED["paper"], tasks=300, alphas=(1.0, 1.125, 1.25, 1.375, 1.5), gamma=0.9, matrix=False,
        infer_at=(10, 100),
    ),
}  # fmt: skip
LONGER = {
    "smoke": replace(LONG["smoke"], alphas=(1.5,), infer_at=(2, 5)),
    "cpu": replace(LONG["cpu"], tasks=300, alphas=(1.25,), infer_at=(10, 100), precision="float32"),
    "paper": LONG["paper"],
}
ENDLESS = {
    "smoke": replace(LONGER["smoke"], tasks=6, methods=("frugal-packnet",)),
    "cpu": replace(LONGER["cpu"], tasks=900, infer_at=(100, 300), precision="bfloat16", probe_tasks=3),
    "paper": replace(LONG["paper"], tasks=1000, methods=("frugal-packnet",)),
}

CIFAR = {
    "smoke": Config(
        data="cifar100", stream="split", tasks=2, model="alexnet", alphas=(1.75,), lr=0.05, seeds=1, steps=1,
        retrain_steps=1, gamma=0.01, clip=1.0, batch=8, search="binary", grid=(0.9, 0.3), images=2_000,
        validation=500, test=16, matrix=False, groups=(1, 8), probe_images=8, probe_tasks=2, precision="bfloat16",
        momentum=0.9, shift=2, candidates=("lr=0.05 clip=1", "lr=0.1 gamma=0.02"), tuning_tasks=1,
    ),
    "cpu": Config(
        data="cifar100", stream="split", tasks=10, model="alexnet", alphas=(1.0, 1.375, 1.75), lr=0.02, seeds=1,
        steps=1_000, retrain_steps=500, gamma=0.98, momentum=0.9, decay=("training", "retraining"),
        init_scale=0.5, shift=2, search="binary", validation=2_500, probe_images=128, precision="bfloat16",
        candidates=(
            "lr=0.02 gamma=0.98 clip=0", "lr=0.04 gamma=0.98 clip=0", "lr=0.04 gamma=0.98 clip=2",
            "lr=0.02 gamma=1 clip=0",
        ),
    ),
    "paper": Config(
        data="cifar100", stream="split", tasks=10, model="alexnet", alphas=(1.75,), lr=0.05, seeds=5, steps=75_000,
        retrain_steps=75_000, gamma=0.99, rate="paper",
    ),
}  # fmt: skip


def find_data(cfg: Config) -> None:
    """Have the data at hand, and refuse settings that it does not fit."""
    for method in cfg.methods:
        fits = method == "packnet" or cfg.validation
        require(fits, f"validation must be at least 1, which {method} decides by, got {cfg.validation}")
    images = data.load_last(cfg.data, cfg.images)
    data.check_images(cfg.model, *(((1, 28, 28), 10) if cfg.model == "mlp" else ((3, 32, 32), 100)), images)
    fits = cfg.stream != "split" or images.classes % cfg.tasks == 0
    require(fits, f"tasks must divide the {images.classes} classes of {images.name}, got {cfg.tasks}")
    images.split_validation(cfg.validation)


# A job: learn all tasks, and measure after each; or the first ones, by which settings are chosen.


def learn(
    cfg: Config, folder: Path, progress: Progress, method: str, alpha: float, seed: int, candidate: str | None = None
) -> dict[str, Any]:
    """Learn all tasks, from the saved learner in the folder if there is one, with all that is measured in it."""
    cfg, learner, stream, note = begin(cfg, method, alpha, seed, candidate)
    measures, steps = Measures(cfg, learner, stream), cfg.steps + cfg.retrain_steps
    records = learn_tasks(
        folder, progress, learner, stream, steps, measures.after_task, precision=product_precision(cfg)
    )
    return {"note": note, **records}


def trial(
    cfg: Config, folder: Path, progress: Progress, method: str, alpha: float, seed: int, candidate: str
) -> dict[str, Any]:
    """Learn the first tasks with a candidate's settings, and measure them on validation images alone."""
    cfg, learner, stream, _ = begin(cfg, method, alpha, seed, candidate)
    first, precision = stream[: cfg.tuning_tasks], product_precision(cfg)

    def after_task(task: data.Task) -> dict[str, float]:
        learner.records.setdefault("used", []).append(learner.nets.masks.used())
        return {}

    steps = cfg.steps + cfg.retrain_steps
    records = learn_tasks(folder, progress, learner, first, steps, after_task, precision=precision)
    with matmul_precision(precision):
        found = [accuracy_on(learner, task, TASK, part=task.validation()) for task in first]
    return {"validation": fmean(found), "used": records["used"]}


def begin(
    cfg: Config, method: str, alpha: float, seed: int, candidate: str | None
) -> tuple[Config, Packing, data.Stream, str]:
    """The settings with the candidate's, the learner, its tasks, and what the reader must know of the images."""
    cfg, images = cfg.with_candidate(candidate), data.load_last(cfg.data, cfg.images)
    stream = make_stream(cfg.stream, images.to(local_device()), cfg.tasks, seed, cfg.validation)
    return cfg, make_learner(cfg, method, alpha, seed, local_device()), stream, images.note


def product_precision(cfg: Config) -> str:
    """Of the factors in products of matrices; a network of convolutions has a precision of its passes instead."""
    return cfg.precision if cfg.model == "mlp" else "float32"


# Settings that are chosen on validation images of the first tasks.


def needed(row: Mapping[str, Any], tasks: int) -> float:
    """The fraction of weights that so many tasks would use, if each took as many new ones as the later of the tried."""
    used: list[float] = row["used"]
    return used[0] + (tasks - 1) * (used[-1] - used[0]) / max(1, len(used) - 1)


def choose(method: Method, tried: Rows, tasks: int) -> str:
    """The best on validation images among the candidates that leave room for all tasks; if none does, the most frugal.

    γ decides how much a task may take: by accuracy alone the largest would always win, and the last tasks would pay.
    """
    if not tried.finished:
        raise RunError(f"{method.label} diverged with every candidate: {', '.join(row['candidate'] for row in tried)}")
    fits = [row for row in tried.finished if needed(row, tasks) <= 1]
    best = max(fits, key=lambda row: row["validation"]) if fits else min(tried.finished, key=lambda r: needed(r, tasks))
    return str(best["candidate"])


# The page.


class Method(NamedTuple):
    """One row of the table."""

    method: str
    alpha: float

    @property
    def label(self) -> str:
        """What the reader sees."""
        name, _ = LABELS[self.method]
        return name if self.alpha == 1 else f"Powerprop + {name}, α={self.alpha:g}"


def paper_rows(story: Story) -> list[tuple[str, Scenario, Any]]:
    """Rows of the paper's table: label, scenario, value."""
    if isinstance(story.printed, str):
        return []
    benchmark, *names = story.printed
    return [(name.replace("EfficientPackNet", "EPN"), *PRINTED[benchmark][name]) for name in names]


@dataclass(frozen=True)
class MethodRows:
    """The runs of a method that came to their end."""

    cfg: Config
    method: Method
    candidate: str | None
    rows: Rows

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self.cfg.with_candidate(self.candidate).lr

    def mean(self, of: Callable[[Row], float]) -> Mean:
        """Mean and std over the seeds of a number of each."""
        return Mean.of(self.rows.values(of))

    @property
    def given(self) -> Mean:
        """Average accuracy over all tasks after the last, with the task given."""
        return self.mean(lambda row: fmean(row["accuracy"]))

    @property
    def used(self) -> Mean:
        """The fraction of weights used after the last task."""
        return self.mean(lambda row: row["used"][-1])

    def inferred(self, group: int) -> Mean:
        """Average accuracy with the task inferred by the default method from groups of this size."""
        whole = self.rows.values(lambda row: row.get("class_incremental"))
        if all(each and each["group"] == group for each in whole):
            return Mean.of(fmean(each["accuracy"]) for each in whole)
        return self.mean(lambda row: row["inference"][-1]["rates"]["shortlist"][str(group)][1])

    def earlier(self, of: Callable[[Accuracies], float]) -> Mean:
        """What became of earlier tasks."""
        return self.mean(lambda row: of(Accuracies(TASK, row["matrix"])))

    def curve(self, of: Any) -> Curve:
        """A number after each task; colours tell methods apart if there are several, else powers."""
        values, several = self.rows.values(of), len(self.cfg.methods) > 1
        name, plain = LABELS[self.method.method][1] if several else None, several and self.method.alpha == 1
        return Curve(self.method.label, self.method.alpha, range(1, len(values[0]) + 1), values, name, plain)


def main(cfg: Config, run: Run, story: Story) -> Page:
    """Choose the settings of every method, learn all tasks from all seeds, and say what was found."""
    run.prepare(lambda: find_data(cfg))
    methods = [Method(method, alpha) for method in cfg.methods for alpha in cfg.alphas]
    every = [{**each._asdict(), "seed": 0, "candidate": text} for each in methods for text in cfg.candidates]
    trials = run.map(trial, every) if every else Rows()
    if run.failures:
        raise JobsFailedError(run.failures)
    tried = {each: trials.where(**each._asdict()) for each in methods}
    chosen = {each: choose(each, rows, cfg.tasks) if cfg.candidates else None for each, rows in tried.items()}
    final = [{**m._asdict(), "seed": seed, "candidate": chosen[m]} for seed in range(cfg.seeds) for m in methods]
    return make_page(cfg, story, trials, run.map(learn, final), chosen)


def make_page(cfg: Config, story: Story, trials: Rows, rows: Rows, chosen: Mapping[Method, str | None]) -> Page:
    """What the runs that came to their end show; without any, the table alone."""
    every = [MethodRows(cfg, each, text, rows.where(**each._asdict()).finished) for each, text in chosen.items()]
    measured = [m for m in every if m.rows]
    shown = main_table(cfg, measured, story, sum("diverged" in row for row in rows))
    sections = [Section("Accuracy and capacity", "No run came to its end.", tables=[shown])]
    if measured:
        best = best_of(measured)
        matrix = [matrix_section(best)] if cfg.matrix else []
        sections = [curves_section(measured, shown), *matrix, inference_section(cfg, best)]
    sections += [candidates_section(cfg, trials, chosen)] if trials else []
    sections += Section.diverged(lost_runs(rows, lambda row: method_of(row).label))
    return Page(
        story.title, f"{story.intro}\n\n{run_note(cfg)} {rows.notes}".strip(), sections,
        story.paper, *verdict_of(cfg, measured, story), {"lr": [each.lr for each in measured]},
    )  # fmt: skip


def candidates_section(cfg: Config, trials: Rows, chosen: Mapping[Method, str | None]) -> Section:
    """What the candidates came to."""
    room = f"weights that {cfg.tasks} tasks would use"
    columns: Columns = [
        ("", lambda row: method_of(row).label), ("settings", lambda row: row["candidate"]),
        (Percent("validation accuracy", digits=2), lambda row: row.get("validation")),
        (Percent(room), lambda row: None if row.lost else needed(row, cfg.tasks)),
        ("", lambda row: "diverged" if row.lost else "chosen" if row["candidate"] == chosen[method_of(row)] else ""),
    ]  # fmt: skip
    text = (
        "Each row of the table has the settings that were best on validation images of the first "
        f"{cfg.tuning_tasks} tasks, first seed, among those that leave room for all tasks if each takes as many new "
        "weights as the last of these. The test images play no part in it."
    )
    return Section("Settings that were chosen", text, tables=[table("Candidates", columns, trials, "In percent.")])


def method_of(row: Mapping[str, Any]) -> Method:
    """The method that a run is of."""
    return Method(row["method"], row["alpha"])


def run_note(cfg: Config) -> str:
    """What this run did, for a reader who will compare it with the paper."""
    tested = f"the first {cfg.test:,} test images of a task" if cfg.test else "all test images"
    steps = f"{cfg.steps:,} training and {cfg.retrain_steps:,} retraining steps per task"
    chosen = any("gamma=" in each for each in cfg.candidates)
    exact, frugal = ("γ as chosen below" if chosen else f"γ = {each:g}" for each in (cfg.gamma, cfg.frugal_gamma))
    packing = {
        "frugal-packnet": f"Frugal EPN: {frugal}, pruned at most {cfg.prunings} times more, {cfg.pruning_steps} steps "
        "apart, reusing the output layer of earlier tasks alone",
        "efficient-packnet": f"EPN, the algorithm as published: {exact}, pruned at once, reusing all weights",
    }
    passes = f"Passes of training compute in {cfg.precision}; networks are measured and pruned in float32"
    notes = [
        f"This run: {cfg.tasks} tasks, {steps} of {cfg.batch} images, {cfg.runs}, {tested}",
        "; ".join(packing[method] for method in cfg.methods if method in packing),
        f"SGD has a momentum of {cfg.momentum:g}" if cfg.momentum else "",
        f"Training images are moved by up to {cfg.shift} pixels and half of them mirrored" if cfg.shift else "",
        *(precision_note(cfg.precision) if cfg.model == "mlp" else [passes] if cfg.precision != "float32" else []),
    ]
    return " ".join(f"{each}." for each in notes if each)


def main_table(cfg: Config, measured: Sequence[MethodRows], story: Story, lost: int) -> Table:
    """One row per method, then the paper's; the scenario of every number is in the heading."""
    group, single, known = max(cfg.groups), 1 in cfg.groups, cfg.matrix and cfg.tasks > 1
    columns: Columns = [
        ("", lambda m: m.method.label), ("lr", lambda m: f"{m.lr:.3g}"),
        (Percent(TASK, "max", 2), lambda m: m.given),
        (Percent("worst task", "max", 2), lambda m: m.mean(lambda row: min(row["accuracy"]))),
        (Percent(f"{CLASS}, {group} images", "max", 2), lambda m: m.inferred(group)),
        *([(Percent(f"{CLASS}, 1 image", "max", 1), lambda m: m.inferred(1))] if single else []),
        *([
            (Percent("forgetting", digits=2), lambda m: m.earlier(Accuracies.forgetting)),
            (Percent("backward transfer", digits=2), lambda m: m.earlier(Accuracies.backward_transfer)),
        ] if known else []),
        (Percent("weights used", "min", 1), lambda m: m.used),
    ]  # fmt: skip
    caption = (
        "Average test accuracy over all tasks after the last, in percent. Task-incremental: the task is given. "
        "Worst task: the lowest accuracy of a task, the task given. "
        "Class-incremental: it is inferred from so many images by the default method, which compares them with stored "
        "mean inputs, unlike the paper's, and must be right; other methods are below."
    )
    if not cfg.matrix:
        caption += (
            f" It is measured on {cfg.probe_images} images of each of {min(cfg.probe_tasks, cfg.tasks)} tasks, evenly "
            "spaced, and may come out above the average over all tasks."
        )
    if known:
        caption += (
            " Forgetting: the best accuracy that a task ever had minus its last; backward transfer: its last minus the "
            "one right after it was learned; means over all tasks but the last, the task given."
        )
    ours = table("All tasks, after the last", columns, measured, caption + (f" {lost} runs diverged." if lost else ""))
    theirs = []
    for label, scenario, value in paper_rows(story):
        shown = [str(value) if scenario == each else "" for each in (TASK, "", CLASS)]
        theirs.append([f"{label} (paper)", "", *shown, *[""] * (len(ours.columns) - 5)])
    return replace(ours, rows=[*ours.rows, *theirs])


def curves_section(measured: Sequence[MethodRows], table: Table) -> Section:
    """Average accuracy and used weights against the number of tasks."""
    text = (
        "First the average over all tasks learned so far, each with its own sub-network. Nothing changes once it is "
        "learned: the logits of earlier tasks are compared bit for bit during the run. Then the fraction of weights "
        "that some task uses, and the accuracy of every task by itself."
    )

    specs: list[tuple[str, Any, str, str, str]] = [
        ("average", averages, f"Average accuracy ({TASK})", "tasks learned", "accuracy"),
        ("used", "used", "Weights in use", "tasks learned", "fraction of weights"),
        ("tasks", "accuracy", f"Accuracy of each task ({TASK})", "task", "accuracy"),
    ]
    pictures = [
        Figure(name, lines, [m.curve(of) for m in measured], title=title, xlabel=x, ylabel=y, percent=True)
        for name, of, title, x, y in specs
    ]
    return Section("Accuracy and capacity", text, pictures, [table])


def averages(row: Row) -> list[float]:
    """The mean accuracy of the first task, of the first two, …"""
    return [fmean(row["accuracy"][: i + 1]) for i in range(len(row["accuracy"]))]


def matrix_section(m: MethodRows) -> Section:
    """The accuracy matrix and which task was inferred, of the first seed of a method."""
    row = m.rows[0]
    found, title = row["class_incremental"], f"Accuracy on every task ({TASK})"
    labels = {"xlabel": "inferred task", "ylabel": "true task", "label": "images"}
    pictures = [
        Figure("matrix", heatmap, Accuracies(TASK, row["matrix"]).matrix(), title=title),
        Figure("confusion", heatmap, found["confusion"], title=f"Task inferred from {found['group']} images", **labels),
    ]
    return Section("Task by task", f"{m.method.label}, first seed.", pictures)


def inference_section(cfg: Config, m: MethodRows) -> Section:
    """How often the task is inferred rightly against the size of the group, and at several numbers of tasks."""
    text = (
        f"{m.method.label}. `exhaustive` asks every sub-network; `shortlist` (the default) compares inputs "
        "with the mean input stored for each task, which the paper's method does not have, and asks the four most "
        "alike; `oneshot` and `binary` follow the gradient of a mixture of all masks. "
        f"Probed on {cfg.probe_images} test images of up to {cfg.probe_tasks} tasks."
    )
    probes, group = m.rows[0]["inference"], max(cfg.groups)
    curves = inference_curves([row["inference"][-1]["rates"] for row in m.rows], lambda pair: pair[0])
    picture = Figure(
        "inference", lines, curves, xlabel="images", ylabel="right task", percent=True, logx=True,
        title="Right task against the number of images judged together", wide=True,
    )  # fmt: skip
    columns = [
        (Percent(f"{probe['tasks']} tasks", "max"), partial(right_at, m, group, at)) for at, probe in enumerate(probes)
    ]
    found = table(f"Right task from {group} images", [("", str), *columns], probes[-1]["rates"], "In percent.")
    return Section("Task inference", text, [picture], [found])


def right_at(m: MethodRows, group: int, at: int, method: str) -> Mean:
    """How often a method infers the right task in a probe."""
    return m.mean(lambda row: row["inference"][at]["rates"][method][str(group)][0])


def verdict_of(cfg: Config, measured: Sequence[MethodRows], story: Story) -> tuple[list[Stat], Headline | None]:
    """The numbers at the top, of the best method; the headline is of Powerprop if it was run.

    Where the paper prints class-incremental accuracy that, else the average with the task given.
    """
    if not measured:
        return [], None
    best, ours, group = (
        best_of(measured),
        best_of([m for m in measured if m.method.alpha > 1] or measured),
        max(cfg.groups),
    )
    stats = [
        Stat("task given", f"{best.given.mean:.2%}", f"{best.method.label}, {TASK}"),
        Stat("task inferred", f"{best.inferred(group).mean:.2%}", f"from {group} images, {CLASS}"),
        Stat("weights used", f"{best.used.mean:.1%}", f"after {cfg.tasks} tasks"),
    ]
    what, value, known = f"{TASK} accuracy after {cfg.tasks} tasks", ours.given, str(story.printed)
    if rows := paper_rows(story):
        what, known = f"{CLASS} accuracy after {cfg.tasks} tasks, inferred from {group} images", str(rows[-1][2])
        value = ours.inferred(group)
    here, full = (f"{each.steps:,} + {each.retrain_steps:,} steps" for each in (cfg, story.full))
    shown, printed = f"{100 * value.mean:.2f} ({here} per task)", f"{known} ({full})" if known else ""
    return stats, Headline(f"{ours.method.label}, {what}", shown, printed)


def best_of(measured: Sequence[MethodRows]) -> MethodRows:
    """The method with the highest average accuracy, the task given."""
    return max(measured, key=lambda m: m.given.mean)


TABLE, FIGURE = "table of class-incremental learning, section 5.3", "figure of long task sequences, section 5.3"
COLUMN = 'Section 5.3.2, table "Class-incremental learning results", column'
NETWORK = "learned one after the other in one network of 784-1000-1000-10 units"
ABOUT = 'figure "Powerpropagation on extremely long task sequences": about 86% on average after 300 tasks.'
LONG_STORY = Story(
    "Extremely long task sequences: Permuted-MNIST", f"Section 5.3.1, {ABOUT}",
    "One network of 784-1000-1000-10 units learns task after task, each with the pixels in another order. The weights "
    "that a task takes never change again, and later tasks may use them.",
    LONG["paper"], "about 86 after 300 tasks",
)  # fmt: skip
STORIES = {
    "split-mnist": Story(
        "Class-incremental Split-MNIST", f"{COLUMN} Split-MNIST.",
        f"Five tasks of two digits, {NETWORK}. Every task gets a sub-network; at test time the task is given, or found "
        "out from the images.",
        SPLIT["paper"], ("split-mnist", *OURS),
    ),
    "permuted-mnist": Story(
        "Class-incremental Permuted-MNIST", f"{COLUMN} Permuted-MNIST.",
        f"Ten tasks, each with the pixels in another order, {NETWORK}. Every task gets a sub-network; at test time the "
        "task is given, or found out from images.",
        PERMUTED["paper"], ("permuted-mnist", *OURS),
    ),
    "rotated-mnist": Story(
        "Rotated MNIST", "No experiment of the paper; network and settings are those of its Permuted-MNIST.",
        f"Ten tasks, each with all digits at another angle between 0° and 180°, {NETWORK}. Neighbouring tasks resemble "
        "each other, so that reuse of weights could pay.",
        ROTATED["paper"],
    ),
    "split-cifar100": Story(
        "Split-CIFAR100 with an output layer per task", f"{COLUMN} 10-task Split-CIFAR100.",
        "Ten tasks of ten classes, learned one after the other in one AlexNet-like network; every task has an output "
        "layer of its own. The training is shortened: the paper's has 75,000 steps and as many of retraining per task, "
        "and five seeds. Where the training set at hand is not complete a note says so.",
        CIFAR["paper"], ("split-cifar100", "EWC", "HAT", "GPM", OURS[-1]),
    ),
}  # fmt: skip
EXPERIMENTS = {
    name: Experiment(name, title, paper, presets, partial(main, story=STORIES.get(name, LONG_STORY)))
    for name, title, paper, presets in (
        ("split-mnist", "five tasks of two digits, task given and task inferred", TABLE, SPLIT),
        ("permuted-mnist", "ten orders of the pixels, task given and task inferred", TABLE, PERMUTED),
        ("rotated-mnist", "ten angles, task given and task inferred", "no figure of the paper", ROTATED),
        ("split-cifar100", "ten tasks of ten classes in a convolutional network", TABLE, CIFAR),
        ("long-permuted-mnist", "100 tasks in one network: accuracy and weights in use", FIGURE, LONG),
        ("long-permuted-mnist-300", "300 tasks in one network", FIGURE, LONGER),
        ("endless-permuted-mnist", "tasks that go on when the network is full", FIGURE, ENDLESS),
    )
}
