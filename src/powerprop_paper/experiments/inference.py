"""Task inference told straight: every method, at several sizes of groups, on tasks that differ in several ways.

`shortlist` compares inputs with mean inputs that were stored for every task, one or one per class, which the paper's
method does not have; `exhaustive`, `oneshot` and `binary` know the sub-networks alone. Besides: which inputs of no task
are noticed, at how many false alarms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.optim import SGD

from powerprop.continual import EfficientPackNet, infer
from powerprop.continual.packing.subnetworks import SAMPLED, InputStats, Sample
from powerprop.continual.packing.task_inference import entropies
from powerprop_paper import data, models
from powerprop_paper.data.streams import pixel_order
from powerprop_paper.experiments import Columns, learn_tasks, table
from powerprop_paper.packing import PackingSettings, fraction, inference_curves, make_stream
from powerprop_paper.pages import Figure, Headline, Page, Percent, Section, Table
from powerprop_paper.report import Mean, lines
from powerprop_paper.run import Experiment, Progress, Rows, Run
from powerprop_paper.settings import Count, EachOnce, Natural, Power, Range
from powerprop_paper.train import local_device

BY_CLASS = "shortlist, means per class"
METHODS = ("exhaustive", "shortlist", BY_CLASS, "oneshot", "binary")
SUPERFLUOUS = ("oneshot-superfluous", "binary-superfluous")
"""Methods that need outputs which stand for no class."""
FOREIGN = ("notMNIST", "uniform noise", "inverted digits", "another order of the pixels")
"""Inputs of no task."""
MIN_VARIANCE = 0.01
"""Added to the variance of a pixel, so that those which hardly vary are not blown up."""
BATCH = 64
"""Images per step."""
BY_DISTANCE, BY_ENTROPY = "distance to the mean of a {}", "entropy of the surest"
FLAGS = (BY_DISTANCE.format("task"), BY_DISTANCE.format("class"), BY_ENTROPY)
"""By what an input is flagged as unknown."""
FALSE_ALARMS = 0.05
"""The rate that the flag of unknown inputs is allowed."""


@dataclass(frozen=True, kw_only=True)
class Config(PackingSettings):
    """The settings of the experiment on task inference."""

    streams: Annotated[tuple[Literal["permuted", "rotated", "split"], ...], EachOnce()]
    """of MNIST"""
    superfluous: Annotated[tuple[Natural, ...], EachOnce()]
    """numbers of outputs beyond the classes"""
    tasks: Annotated[int, Range(2)]
    """of the permuted and rotated streams; the split one has five"""
    alpha: Power
    """the power of Powerpropagation"""
    steps: Count
    """of training per task"""
    inputs: Annotated[tuple[Literal["plain", "standardised"], ...], EachOnce()] = ("plain", "standardised")
    """pixels in [0, 1], or every pixel of a task with mean 0 and variance 1"""
    groups: Annotated[tuple[Count, ...], EachOnce()] = (1, 8, 128)
    """sizes of the groups of images whose task is inferred together"""
    probe_images: Count = 512
    """test images of each task"""
    probe_single: Count = 48
    """so many of them for the gradient methods at one image, a pass back and forth each"""
    validation: Natural = 5000
    """the last so many training images of the data decide the sparsity and the limit of unknown inputs"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_prunings()
        self.check_held_back()


PRESETS = {
    "smoke": Config(
        streams=("permuted", "split"), superfluous=(0, 5), tasks=3, alpha=1.25, lr=0.5, seeds=1, steps=20,
        retrain_steps=6, prunings=1, pruning_steps=2, gamma=0.5, width=32, groups=(1, 16), probe_images=32,
        probe_single=4, images=2_000, validation=500,
    ),
    "cpu": Config(
        streams=("permuted", "rotated", "split"), superfluous=(0, 90), tasks=10, alpha=1.25, lr=1.0, seeds=1,
        steps=400, retrain_steps=250, pruning_steps=50, gamma=0.97, width=300,
    ),
    "paper": Config(
        streams=("permuted", "rotated", "split"), superfluous=(0, 90), tasks=10, alpha=1.375, lr=0.05, seeds=5,
        steps=50_000, retrain_steps=50_000, pruning_steps=5_000, gamma=0.99, rate="paper",
    ),
}  # fmt: skip


# The streams, plain or standardised, and inputs that are of none of their tasks.


def tasks_of(cfg: Config, kind: str, inputs: str, seed: int, images: data.Images) -> data.Stream:
    """The tasks of a seed."""
    stream = make_stream(kind, images, 5 if kind == "split" else cfg.tasks, seed, cfg.validation)
    return stream if inputs == "plain" else standardised(stream)


def standardised(stream: data.Stream) -> data.Stream:
    """Every pixel of every task with mean 0 and variance 1 in its training images."""

    @cache
    def moments(index: int) -> tuple[Tensor, Tensor]:
        x = stream[index].train().x
        return x.mean(0), (x.var(0) + MIN_VARIANCE).sqrt()

    def make(index: int) -> data.Task:
        task = stream[index]
        return replace(task, view=partial(_standardised, task, *moments(index)))

    return data.Stream(len(stream), make)


def _standardised(task: data.Task, mean: Tensor, std: Tensor, part: data.Part) -> data.Part:
    x, y = task.view(part)
    return data.Part((x - mean) / std, y)


def foreign(cfg: Config, task: data.Task, images: data.Images, seed: int) -> dict[str, Tensor]:
    """Images of no task, as the first task's preparation shows them to the network, by kind."""
    shown = data.to_float(images.test_x[-cfg.probe_images :])
    found = (
        data.to_float(data.load("notmnist").test_x[: cfg.probe_images]),
        torch.rand(shown.shape, generator=torch.Generator().manual_seed(seed)),
        1 - shown,
        shown.flatten(2)[:, :, pixel_order(784, seed, 10_000)].view_as(shown),
    )
    view = task.view
    if isinstance(view, partial) and view.func is _standardised:
        _, mean, std = view.args
        found = tuple((x - mean) / std for x in found)
    return dict(zip(FOREIGN, found, strict=True))


def find_data(cfg: Config) -> None:
    """Have digits and letters at hand, and refuse settings that they do not fit."""
    data.load("mnist").split_validation(cfg.validation)
    data.load("notmnist")


# One job: learn all tasks, then ask every method.


def ask(
    cfg: Config, folder: Path, progress: Progress, stream: str, inputs: str, superfluous: int, seed: int
) -> dict[str, Any]:
    """A job that was stopped goes on after the last task it learned."""
    images = data.load_last("mnist", cfg.images).to(local_device())
    tasks = tasks_of(cfg, stream, inputs, seed, images)
    learner = make_learner(cfg, len(tasks[0].classes or ()) + superfluous, seed)
    learn_tasks(folder, progress, learner, tasks, cfg.steps + cfg.retrain_steps, lambda task: {})
    accuracy = [fraction(learner.predict(task.test().x, task.index).label == task.test().y) for task in tasks]
    signatures = {kind: make_signatures(kind, tasks) for kind in ("task", "class")}
    methods = METHODS + (SUPERFLUOUS if superfluous else ())
    return {
        "note": images.note, "accuracy": fmean(accuracy), "used": learner.used(),
        "rates": right_tasks(cfg, learner, tasks, signatures, methods),
        "unknown": flagged(cfg, learner, tasks, signatures, foreign(cfg, tasks[0], images, seed)),
    }  # fmt: skip


def make_learner(cfg: Config, outputs: int, seed: int) -> EfficientPackNet:
    """The learner of all jobs, with the first weights of its seed."""
    model = models.mlp([784, cfg.width, cfg.width, outputs], generator=torch.Generator().manual_seed(seed))
    return EfficientPackNet(
        model.to(local_device()), partial(SGD, lr=cfg.lr), alpha=cfg.alpha, rate=cfg.rate, gamma=cfg.gamma,
        steps=cfg.steps, retrain_steps=cfg.retrain_steps, prunings=cfg.prunings, clip=1.0, seed=seed,
        pruning_steps=cfg.pruning_steps, reuse="output", batch_size=BATCH,
    )  # fmt: skip


def make_signatures(kind: Any, stream: data.Stream) -> InputStats:
    """What a learner made with these means keeps of its tasks; it trains alike, so that one is trained for both."""
    signatures = InputStats(kind)
    for task in stream:
        x, y = task.train()
        stride = max(1, len(x) // SAMPLED)
        signatures.add(Sample(x[::stride], y[::stride], task.validation().x))
    return signatures


def right_tasks(
    cfg: Config, learner: EfficientPackNet, stream: data.Stream, signatures: Mapping[str, InputStats],
    methods: tuple[str, ...],
) -> dict[str, dict[str, float]]:  # fmt: skip
    """rates[method][group]: the fraction of test images whose task is inferred rightly, the mean over tasks."""
    found: dict[str, dict[str, list[float]]] = {}
    for task in stream:
        x = task.test().x[: cfg.probe_images]
        for group, method in product(cfg.groups, methods):
            single = group == 1 and method.startswith(("oneshot", "binary"))
            learner.nets.stats = signatures["class" if method == BY_CLASS else "task"]
            asked, name = x[: cfg.probe_single if single else None], method.partition(",")[0]
            right = infer(learner.nets, asked, learner.objective, name, group) == task.index
            found.setdefault(method, {}).setdefault(str(group), []).append(fraction(right))
    return {method: {group: fmean(each) for group, each in of.items()} for method, of in found.items()}


def flagged(
    cfg: Config, learner: EfficientPackNet, stream: data.Stream, signatures: Mapping[str, InputStats],
    strange: Mapping[str, Tensor],
) -> dict[str, dict[str, float]]:  # fmt: skip
    """unknown[by][kind]: the fraction of single images that is flagged, "known" being those of the tasks' test sets.

    By the distance to means, and by the entropy of the surest sub-network with a limit from validation images too.
    """
    known = torch.cat([task.test().x[: cfg.probe_images] for task in stream])
    held = torch.cat([task.validation().x[: cfg.probe_images] for task in stream])
    kinds, found = {"known": known, **strange}, {}
    for kind, each in signatures.items():
        learner.nets.stats = each
        unknown = {name: learner.predict(x, unknown=FALSE_ALARMS).task == -1 for name, x in kinds.items()}
        found[BY_DISTANCE.format(kind)] = {name: fraction(each) for name, each in unknown.items()}
    surest = {name: entropies(learner.nets, x, learner.objective).amin(0) for name, x in kinds.items()}
    limit = entropies(learner.nets, held, learner.objective).amin(0).quantile(1 - FALSE_ALARMS)
    found[BY_ENTROPY] = {name: fraction(each > limit) for name, each in surest.items()}
    return found


# The page.

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
    f"images so that {FALSE_ALARMS:.0%} of them exceed it; `known` are test images of the tasks, which must not be "
    "flagged: the rate of false alarms. The entropy is that of the surest sub-network, with a limit set likewise."
)


def main(cfg: Config, run: Run) -> Page:
    """Every stream, plain and standardised, with and without superfluous outputs, from every seed."""
    run.prepare(lambda: find_data(cfg))
    every = product(range(cfg.seeds), cfg.streams, cfg.inputs, cfg.superfluous)
    names = ("seed", "stream", "inputs", "superfluous")
    rows = run.map(ask, [dict(zip(names, values, strict=True)) for values in every]).finished
    steps = f"{cfg.steps:,} + {cfg.retrain_steps:,} steps per task, width {cfg.width}, α = {cfg.alpha:g}"
    sections = [stream_section(cfg, stream, found) for stream, found in rows.by("stream").items()]
    sections.append(Section("Inputs of no task", UNKNOWN, tables=[unknown_table(cfg, rows)]))
    return Page(
        "Task inference, every method", f"{ABOUT}\n\nThis run: {steps}. {rows.notes}".strip(), sections,
        "Section 4.2 describes the inference; no table compares its forms.",
        headline=headline(cfg, rows) if rows else None,
    )  # fmt: skip


def stream_section(cfg: Config, stream: str, rows: Rows) -> Section:
    """The table of one stream, and a picture of its plain form without superfluous outputs."""
    groups = rows.by("inputs", "superfluous")
    (inputs, _), first = next(iter(groups.items()))
    every = [(*key, method, found) for key, found in groups.items() for method in found[0]["rates"]]
    images = [(Percent(f"{size} image{'s' if size > 1 else ''}", "max"), partial(right, size)) for size in cfg.groups]
    columns: Columns = [
        ("inputs", lambda each: each[0]), ("superfluous", lambda each: str(each[1])), ("method", lambda each: each[2]),
        *images,
    ]  # fmt: skip
    picture = Figure(
        stream, lines, inference_curves(first.values("rates")), title=f"Right task, {stream} MNIST, {inputs} inputs",
        xlabel="images", ylabel="right task", percent=True, logx=True, wide=True,
    )  # fmt: skip
    accuracy = fmean(first.values("accuracy"))
    text = f"{len(first)} run{'s' if len(first) > 1 else ''}; the task given, accuracy is {accuracy:.1%}."
    shown = table(f"Right task, {stream}", columns, every, "In percent.")
    return Section(f"{stream.capitalize()} MNIST", text, [picture], [shown])


def right(group: int, each: tuple[Any, ...]) -> Mean:
    """How often a method, the last but one of these, inferred the right task from groups of this size in some rows."""
    *_, method, rows = each
    return Mean.of(row["rates"][method][str(group)] for row in rows)


def unknown_table(cfg: Config, rows: Rows) -> Table:
    """One row per stream, kind of inputs and flag; without superfluous outputs, or with the fewest."""
    groups = rows.where(superfluous=min(cfg.superfluous)).by("stream", "inputs").items()
    every = [(*key, by, found.values(lambda row: row["unknown"][by])) for key, found in groups for by in FLAGS]  # noqa: B023
    kinds = {"known": Percent("known (false alarms)", "min"), **{kind: Percent(kind, "max") for kind in FOREIGN}}
    columns = [(name, itemgetter(i)) for i, name in enumerate(("stream", "inputs", "flagged by"))]
    means = [(column, partial(flagged_of, kind)) for kind, column in kinds.items()]
    return table("Flagged as unknown, single images", [*columns, *means], every, "In percent.")


def flagged_of(kind: str, each: tuple[Any, ...]) -> Mean:
    """The mean of what was flagged of a kind of inputs."""
    return Mean.of(found[kind] for found in each[-1])


def headline(cfg: Config, rows: Rows) -> Headline:
    """One number of the first stream, with that of the method which stores nothing beside it."""
    group = max(cfg.groups)
    (stream, *_), found = next(iter(rows.by("stream", "inputs", "superfluous").items()))
    values = [right(group, (method, found)).mean for method in ("shortlist", "exhaustive")]
    what = f"right task, {stream} MNIST, {group} images: with stored means, and without (exhaustive)"
    return Headline(what, f"{values[0]:.1%}, {values[1]:.1%}", "no numbers")


EXPERIMENTS = {
    "task-inference": Experiment(
        "task-inference", "every way to infer tasks, and inputs of no task",
        "section 4.2 describes the inference; no table compares its forms", PRESETS, main,
    )
}  # fmt: skip
