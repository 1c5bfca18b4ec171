"""Ten characters in one variational autoencoder, one after the other: table 3 and appendix C of the paper.

Every task, one digit or letter, has an encoder and a decoder head of its own; the last layers of the decoder are shared
(the networks of Nguyen et al., Variational Continual Learning, 2018). What is learned later may spoil them for the
characters of before: the methods differ in how they prevent it, and act on the shared decoder alone.

First every power, strength and damping that a method may have learns the first tasks with one seed, and validation
images choose; then all tasks are learned with what was chosen, from all seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from powerprop.continual import STRATEGIES, VCL, Elbo, Packing, Strategy
from powerprop.continual.data import derived_seed
from powerprop.eval_mode import evaluating
from powerprop.files import replacing
from powerprop.optim import Rate
from powerprop_paper import data
from powerprop_paper.experiments import Columns, best, learn_tasks, lost_runs, table
from powerprop_paper.likelihood import log_likelihood
from powerprop_paper.models import TaskVAE, task_vae
from powerprop_paper.pages import Column, Figure, Headline, Page, Percent, Section, Stat, Table
from powerprop_paper.report import Curve, Grid, Mean, image_grids, lines, panels
from powerprop_paper.run import Experiment, Progress, Rows, Run, RunError
from powerprop_paper.settings import Count, EachOnce, Natural, NonNegative, Positive, Range, Seeds, Settings, require
from powerprop_paper.train import local_device, matmul_precision, precision_note

POWERPROP = "Powerprop+"
MethodName = Literal[
    "Naive", "Laplace", "EWC", "SI", "VCL", "EfficientPackNet",
    "Powerprop+Laplace", "Powerprop+EWC", "Powerprop+EfficientPackNet",
]  # fmt: skip
METHODS: tuple[MethodName, ...] = get_args(MethodName)
"""The rows of the paper's table."""
PAPER: dict[str, dict[str, float]] = {
    "mnist": {
        "Naive": -258.40, "Laplace": -108.06, "EWC": -105.78, "SI": -111.47, "VCL": -94.27, "EfficientPackNet": -94.50,
        "Powerprop+Laplace": -96.72, "Powerprop+EWC": -95.79, "Powerprop+EfficientPackNet": -92.15,
    },
    "notmnist": {
        "Naive": -797.88, "Laplace": -225.54, "EWC": -212.62, "SI": -190.48, "VCL": -187.34,
        "EfficientPackNet": -177.08, "Powerprop+Laplace": -196.87, "Powerprop+EWC": -188.56,
        "Powerprop+EfficientPackNet": -174.54,
    },
}  # fmt: skip
"""Its log-likelihoods."""
DAMPED = ("EWC", "Laplace")
"""Methods whose penalty rests on Fisher information."""

TASKS = 10
LR, MOMENTUM = 1e-3, 0.9
"""The rate of Adam; the momentum of SGD where it is used."""
GAMMA = 0.95
"""What a sub-network must keep of the validation ELBO: it may be lower by 1 - γ of its size."""
PUBLISHED_LOG_VARIANCE = -12.0
"""Of VCL's weights at first: the published code has log σ = -6."""
PIXELS = 784
SHARED, SHARED_WEIGHTS = "shared.*", "shared.*.weight"
WEIGHTS, CHOSEN, NOISE, IMAGES = range(4)
"""Purposes of random numbers: first weights, test images that are measured, likelihoods, samples of the pictures."""
CURVE, USED = "curve", "used"
"""What a learner's records keep of the tasks that it knows."""
SAMPLES = "samples.safetensors"
CHARACTERS = {"mnist": list("0123456789"), "notmnist": list("ABCDEFGHIJ")}
SPANS = {"mnist": 40.0, "notmnist": 80.0}
"""Nats below the best that a panel shows."""


class Choice(NamedTuple):
    """The power of the shared decoder's weights, and strength and damping of a penalty; no strength is no penalty."""

    alpha: float = 1.0
    strength: float | None = None
    damping: float = 0.0


@dataclass(frozen=True)
class Config(Settings):
    """The settings of continual generative modelling."""

    data: Literal["mnist", "notmnist"]
    """ten tasks, one character each"""
    seeds: Seeds
    """runs of each method: first weights, batches, noise"""
    steps: Count
    """of training per task"""
    retrain_steps: Natural
    """after pruning, of EfficientPackNet"""
    si_steps: Natural = 0
    """of training per task of SI; 0 means as many as the others have"""
    methods: Annotated[tuple[MethodName, ...], EachOnce()] = METHODS
    """rows of the table"""
    alphas: Annotated[tuple[Annotated[float, Range(1, above=True)], ...], EachOnce()] = (1.375,)
    """powers of the shared decoder's weights, to choose from on validation images for each method by itself"""
    momentum_lr: NonNegative = 0.0
    """rate of SGD with momentum 0.9 for EfficientPackNet and with Powerpropagation, as in the paper; 0 means Adam"""
    rate: Rate = "matched"
    """matched: the learning rate serves every power; paper: the update as printed"""
    init_scale: Positive = 1.0
    """the standard deviation of the shared decoder's first weights, and of those drawn again, in units of Glorot's"""
    search: Literal["linear", "binary", "taylor"] = "binary"
    """how the sparsest sub-network is looked for"""
    strengths: Annotated[tuple[Positive, ...], EachOnce()] = (10.0, 100.0, 1_000.0, 10_000.0)
    """penalties of EWC and Laplace to choose from likewise, together with the power"""
    dampings: Annotated[tuple[NonNegative, ...], EachOnce()] = (0.0,)
    """likewise, what they add to the importance of every weight, as a part of the mean; 0 is the published method"""
    si_strengths: Annotated[tuple[Positive, ...], EachOnce()] = (1.0, 10.0, 100.0, 1_000.0)
    """the same for SI"""
    tuning_tasks: Count = 3
    """powers, strengths and dampings are chosen on the first so many tasks, with the first seed"""
    vcl_samples: Count = 1
    """networks that VCL draws in each step"""
    batch: Count = 50
    """images per step"""
    width: Count = 500
    """units of a hidden layer"""
    latent: Count = 50
    """numbers in z"""
    samples: Count = 5_000
    """of each test image in its log-likelihood after the last task"""
    curve_samples: Count = 50
    """of each image in the log-likelihoods after every task and in those that choices are made on"""
    test: Natural = 0
    """so many test images of each task are measured, drawn at random; 0 means all"""
    validation: Count = 5_000
    """the last so many training images, of all tasks together, are for choices"""
    images: Natural = 0
    """only the last so many training images of the data are used; 0 means all"""
    tasks: Annotated[int, Range(1, TASKS)] = TASKS
    """the first so many of the ten"""
    shown: Count = 6
    """samples of each task in the pictures"""
    matmul_precision: Literal["float32", "bfloat16"] = "float32"
    """of the factors in products of matrices while training; all else, and every likelihood, is float32"""

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.tasks
        require(self.tuning_tasks <= most, f"tuning_tasks must be at most the {most} tasks, got {self.tuning_tasks}")
        self.check_held_back()


SMOKE: dict[str, Any] = {
    "seeds": 1, "steps": 12, "retrain_steps": 4, "alphas": (1.5,), "strengths": (1.0, 10.0), "si_strengths": (1.0,),
    "dampings": (0.0, 0.5), "tuning_tasks": 1, "width": 12, "latent": 4, "samples": 8, "curve_samples": 4, "test": 5,
    "validation": 200, "images": 1_200, "tasks": 3, "shown": 3, "batch": 16, "init_scale": 0.5,
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "alphas": (1.125, 1.25, 1.375, 1.5, 2.0), "strengths": (1.0, 10.0, 100.0), "si_strengths": (1.0, 10.0, 100.0),
    "tuning_tasks": TASKS, "search": "linear", "rate": "paper", "vcl_samples": 10, "curve_samples": 500,
}  # fmt: skip
"""What the paper chooses from, and how."""
MNIST = {
    "smoke": Config("mnist", **SMOKE),
    "cpu": Config(
        "mnist", seeds=2, steps=900, retrain_steps=300, alphas=(2.0,), init_scale=0.5, samples=500,
        test=200, matmul_precision="bfloat16",
    ),
    "paper": Config(
        "mnist", seeds=5, steps=21_600, retrain_steps=10_800, si_steps=43_200, momentum_lr=1e-3, **PUBLISHED,
    ),
}  # fmt: skip
NOTMNIST = {
    "smoke": Config("notmnist", **SMOKE),
    "cpu": Config(
        "notmnist", seeds=2, steps=900, retrain_steps=300, alphas=(1.5,), init_scale=0.5, samples=500,
        strengths=(3.0, 10.0, 30.0), dampings=(0.0, 0.03, 0.1), si_strengths=(1.0, 10.0, 100.0), tuning_tasks=5,
        test=150, validation=1_500, matmul_precision="bfloat16",
    ),
    "paper": Config(
        "notmnist", seeds=5, steps=12_000, retrain_steps=6_000, momentum_lr=2.5e-3, validation=1_500, **PUBLISHED,
    ),
}  # fmt: skip


# One job: a learner of the characters, saved after each, from where it goes on bit for bit.


def find_data(cfg: Config) -> None:
    """Have the data at hand, and refuse settings that it does not fit."""
    for task in stream_of(cfg, data.load_last(cfg.data, cfg.images), cfg.tasks):
        for what, part in (("training", task.train()), ("validation", task.validation()), ("test", task.test())):
            require(len(part.x), f"{cfg.data}: no {what} image is of {task.name}; use more images")


def stream_of(cfg: Config, images: data.Images, tasks: int) -> list[data.Task]:
    """A task for each of the first characters, pixels in [0, 1]."""
    return data.split(images, 1, validation=cfg.validation)[:tasks]


def tune(cfg: Config, folder: Path, progress: Progress, **settings: Any) -> dict[str, Any]:
    """Learn the first tasks; how well, on validation images."""
    learner, stream = learn_characters(cfg, folder, progress, cfg.tuning_tasks, settings)
    parts = [(task.index, some(task.validation(), cfg.test, task.index)) for task in stream]
    return {"validation": fmean(likelihood(learner, task, x, cfg.curve_samples) for task, x in parts)}


def learn(cfg: Config, folder: Path, progress: Progress, **settings: Any) -> dict[str, Any]:
    """Learn all tasks, and measure.

    `curve[i][j]` is the average test log-likelihood of task j after task i, with few samples of each image; `final` the
    same of every task after the last, with many; `used` the fraction of the shared weights in use after each task, or
    None for methods that share them all.
    """
    learner, stream = learn_characters(cfg, folder, progress, cfg.tasks, settings, note_task)
    with replacing(folder / SAMPLES) as file:
        file.write(to_safetensors({"drawn": draw(learner, len(stream), cfg.shown)}))
    known = {CURVE: learner.records[CURVE], USED: learner.records.get(USED), "memory_bytes": learner.memory_bytes()}
    return {**known, "final": likelihoods(cfg, learner, stream, cfg.samples)}


def learn_characters(
    cfg: Config, folder: Path, progress: Progress, tasks: int, settings: dict[str, Any],
    measure: Callable[[Config, Strategy, list[data.Task]], dict[str, float]] = lambda *_: {},
) -> tuple[Strategy, list[data.Task]]:  # fmt: skip
    """A learner of so many tasks, and the tasks; it is saved after each, with what `measure` notes."""
    stream = stream_of(cfg, data.load_last(cfg.data, cfg.images).to(local_device()), tasks)
    learner = make_learner(cfg, local_device(), **settings)

    def prepare(task: int) -> None:
        if isinstance(learner, VCL) and task < tasks:
            learner.examples = len(stream[task].train().x)

    def after_task(task: data.Task) -> dict[str, float]:
        prepare(task.index + 1)
        with matmul_precision("float32"):
            return measure(cfg, learner, stream)

    prepare(0)
    steps = learner.steps + getattr(learner, "retrain_steps", 0)
    learn_tasks(folder, progress, learner, stream, steps, after_task, precision=cfg.matmul_precision)
    return learner, stream


def note_task(cfg: Config, learner: Strategy, stream: list[data.Task]) -> dict[str, float]:
    """Measure all tasks learned so far and keep it with the learner; returns what the log says of it."""
    row = likelihoods(cfg, learner, stream, cfg.curve_samples)
    learner.records.setdefault(CURVE, []).append(row)
    values = {"log_likelihood": sum(row) / len(row)}
    if isinstance(learner, Packing):
        learner.records.setdefault(USED, []).append(learner.used())
        values[USED] = learner.used()
    return values


def make_learner(
    cfg: Config, device: torch.device, strategy: str, alpha: float, strength: float | None, damping: float, seed: int
) -> Strategy:
    """The learner of a job, with the first weights of its seed."""
    generator = torch.Generator().manual_seed(derived_seed(seed, WEIGHTS))
    model = task_vae(PIXELS, cfg.width, cfg.latent, generator=generator).to(device)
    with torch.no_grad():
        for parameter in model.shared.parameters():
            parameter.mul_(cfg.init_scale)  # biases are 0
    momentum_lr = cfg.momentum_lr if strategy == "EfficientPackNet" or alpha > 1 else 0.0
    names: dict[str, Any] = {"heads": "parts", "where": SHARED_WEIGHTS}
    options = {"alpha": alpha, "rate": cfg.rate, "steps": cfg.steps, "batch_size": cfg.batch, "seed": seed, **names}
    options |= own_options(cfg, strategy, strength, damping)
    return STRATEGIES[strategy](model, partial(make_optimizer, momentum_lr), objective=Elbo(), **options)


def own_options(cfg: Config, strategy: str, strength: float | None, damping: float) -> dict[str, Any]:
    """What a method has beyond what all have: only the shared decoder is held, distributed or packed."""
    if strategy == "EfficientPackNet":  # the published algorithm, which goes on with what is free
        return {"gamma": GAMMA, "search": cfg.search, "retrain_steps": cfg.retrain_steps, "when_full": "train"}
    if strategy == "VCL":  # its examples are set to the images of every task before it begins
        own = {"samples": cfg.vcl_samples, "log_variance": PUBLISHED_LOG_VARIANCE, "examples": 1}
        return {"protect": SHARED, **own}
    steps = {"steps": cfg.si_steps} if strategy == "SI" and cfg.si_steps else {}
    damped = {"damping": damping} if damping else {}
    return {} if strength is None else {"strength": strength, "protect": SHARED, **steps, **damped}


def make_optimizer(momentum_lr: float, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Adam, or SGD with momentum where a rate for it is given."""
    own = list(parameters)
    fused = own[0].device.type in ("cpu", "cuda")  # one pass over the weights
    if momentum_lr:
        return SGD(own, lr=momentum_lr, momentum=MOMENTUM, fused=fused)
    return Adam(own, lr=LR, fused=fused)


# What a learner is measured by: likelihoods of test images, and images of its own.


def some(part: data.Part, count: int, task: int) -> Tensor:
    """So many images at random, the same ones for every method and seed; all for 0."""
    generator = torch.Generator().manual_seed(derived_seed(0, CHOSEN, task))
    order = torch.randperm(len(part.x), generator=generator)
    return part.x[order[: count or None].to(part.x.device)]


def likelihoods(cfg: Config, learner: Strategy, stream: list[data.Task], samples: int) -> list[float]:
    """Of the test images of every task learned so far."""
    parts = [(task.index, some(task.test(), cfg.test, task.index)) for task in stream[: learner.current]]
    return [likelihood(learner, task, x, samples) for task, x in parts]


def likelihood(learner: Strategy, task: int, x: Tensor, samples: int) -> float:
    """The average log-likelihood of images of a task; the noise is the same whenever it is asked for.

    Methods that have a distribution over weights are measured at its mean, as in the published code of VCL.
    """
    model, generator = learner.model, torch.Generator().manual_seed(derived_seed(learner.seed, NOISE, task))
    assert isinstance(model, TaskVAE)
    with learner.viewing(task), evaluating(model):
        encode, decode = partial(model.encode, task=task), partial(model.decode, task=task)
        return float(log_likelihood(encode, decode, x.to(learner.device), samples, generator=generator).mean())


@torch.no_grad()
def draw(learner: Strategy, tasks: int, count: int) -> Tensor:
    """Images of every task as bytes (tasks, count, pixels): the means of p(x|z), the same z for every method."""
    model, found = learner.model, []
    assert isinstance(model, TaskVAE)
    for task in range(tasks):
        generator = torch.Generator().manual_seed(derived_seed(0, IMAGES, task))
        z = torch.randn(count, model.latent, generator=generator).to(learner.device)
        with learner.viewing(task), evaluating(model):
            found.append(model.decode(z, task).sigmoid())
    return torch.stack(found).mul(255).round().byte().cpu()


# The rows of the table, and the choice of powers, strengths and dampings.


@dataclass(frozen=True)
class Method:
    """A row: a strategy, with or without Powerpropagation, by its name among `METHODS`."""

    name: str

    @property
    def strategy(self) -> str:
        """The class of the method."""
        return self.name.removeprefix(POWERPROP)

    @property
    def powerprop(self) -> bool:
        """True if it is trained with a power above 1."""
        return self.name.startswith(POWERPROP)

    @property
    def label(self) -> str:
        """What the paper's table calls it."""
        return self.name.replace("EfficientPackNet", "EPN").replace("+", " + ")

    def job(self, choice: Choice, seed: int) -> dict[str, Any]:
        """The settings of a training."""
        return {"strategy": self.strategy, **choice._asdict(), "seed": seed}

    def rows(self, rows: Rows) -> Rows:
        """Its own among the rows of all methods."""
        return Rows(each for each in rows.where(strategy=self.strategy) if (each["alpha"] > 1) == self.powerprop)

    def choices(self, cfg: Config) -> list[Choice]:
        """What it may be trained with: every power, strength and damping that it has, each with each."""
        penalties = {"SI": cfg.si_strengths, **dict.fromkeys(DAMPED, cfg.strengths)}
        strengths: tuple[float | None, ...] = penalties.get(self.strategy, (None,))
        dampings = cfg.dampings if self.strategy in DAMPED else (0.0,)
        return [Choice(*each) for each in product(cfg.alphas if self.powerprop else (1.0,), strengths, dampings)]


def choose(cfg: Config, method: Method, tried: Rows) -> Choice:
    """The choice with the best validation log-likelihood."""
    choices = {each: tried.where(**each._asdict()) for each in method.choices(cfg)}
    return best(method.label, choices, lambda rows: float(rows[0]["validation"]))


@dataclass(frozen=True)
class MethodRows:
    """A method with what it was trained with, and its seeds."""

    method: Method
    choice: Choice
    rows: Rows

    @property
    def average(self) -> Mean | None:
        """The log-likelihood over all tasks after the last."""
        return self.rows.mean(lambda row: fmean(row["final"]))

    def score(self) -> float:
        """Its mean over the seeds; nothing is worse than none."""
        return self.average.mean if self.average else -math.inf

    @property
    def learned(self) -> Mean | None:
        """The same of every task right after it was learned."""
        return self.rows.mean(lambda row: fmean(each[-1] for each in row[CURVE]))

    @property
    def forgotten(self) -> Mean | None:
        """By how much it has fallen since: mean over the tasks before the last of curve[j][j] - curve[T][j]."""
        if not self.rows.finished or len(self.rows.finished[0]["final"]) < 2:
            return None
        return self.rows.mean(lambda r: fmean(r[CURVE][j][j] - last for j, last in enumerate(r[CURVE][-1][:-1])))

    @property
    def unchanged(self) -> bool:
        """True if no likelihood of any task has changed by a bit since it was learned."""
        curves = self.rows.values(CURVE)
        return bool(curves) and all(x == curve[j][j] for curve in curves for row in curve for j, x in enumerate(row))

    @property
    def used(self) -> Mean | None:
        """The fraction of the shared weights in use after the last task."""
        found = [row[USED][-1] for row in self.rows.finished if row[USED]]
        return Mean.of(found) if found else None

    def curve(self, values: list[list[float]], first: int) -> Curve:
        """A number of each seed after every task from one on."""
        x = list(range(first, first + len(values[0])))
        return Curve(self.method.label, None, x, values, method=self.method.strategy, plain=not self.method.powerprop)


# The page.

TITLES = {"mnist": "Ten digits in one autoencoder (MNIST)", "notmnist": "Ten letters in one autoencoder (notMNIST)"}
INTRO = (
    "Ten tasks, one character each, learned one after the other by a variational autoencoder: an encoder "
    "784-500-500-500-100 and a decoder head 50-500-500 for every task, and a decoder 500-500-784 that all share. What "
    "is learned later may spoil the shared decoder for earlier characters; the methods differ in how they prevent it."
)
DRAWN = (
    "Every method draws the characters of all tasks after it has learned the last one. Each task has kept its own "
    "part of the decoder; where the strokes are gone, the shared part has been overwritten."
)
CURVES = "The log-likelihood of the test images of a task when it has just been learned, and after every later task."
CHOICES = (
    "The power, and the strength and damping δ of a penalty, were chosen on validation images, on the first tasks with "
    "the first seed, for each method by itself. The log-likelihood with each; δ = 0 is the method as published."
)


def main(cfg: Config, run: Run) -> Page:
    """Tune, learn all tasks from all seeds with what was chosen, and say what was found."""
    run.prepare(lambda: find_data(cfg))
    methods = [Method(name) for name in METHODS if name in cfg.methods]
    tuned = [(method, found) for method in methods if len(found := method.choices(cfg)) > 1]
    tuning = run.map(tune, [method.job(each, 0) for method, found in tuned for each in found])
    chosen = {method: choose(cfg, method, method.rows(tuning)) for method in methods}
    rows = run.map(learn, [m.job(chosen[m], seed) for seed in range(cfg.seeds) for m in methods])
    measured = [MethodRows(method, choice, method.rows(rows)) for method, choice in chosen.items()]
    lost = [each for m in measured for each in lost_runs(m.rows, lambda row: m.method.label)]  # noqa: B023
    if not rows.finished:
        raise RunError(f"every run diverged: {'; '.join(lost)}")
    images, shown = data.load_last(cfg.data, cfg.images), [m for m in measured if m.rows.finished]
    sections = [
        Section("Test log-likelihood", likelihood_text(cfg, measured), tables=[main_table(cfg, measured)]),
        Section("What forgetting looks like", DRAWN, [figure_of_samples(cfg, images, shown)]),
        Section("Task by task", CURVES, [figure_of_averages(shown), figure_of_tasks(cfg, shown)]),
        *([Section("Choices", CHOICES, tables=[choice_table(chosen, tuning)])] if tuning else []),
        *Section.diverged(lost),
    ]
    return Page(
        TITLES[cfg.data], f"{INTRO}\n\n{run_note(cfg)} {images.note}".strip(), sections,
        "Section 5.2, table 3, and the figures of appendix C.", stats(shown), headline(cfg, shown),
    )  # fmt: skip


def run_note(cfg: Config) -> str:
    """What this run did, for a reader who will compare it with others."""
    momentum = f"; momentum 0.9 with {cfg.momentum_lr:g} for EPN and with Powerprop" if cfg.momentum_lr else ""
    test = f"{cfg.test} random test images of each character" if cfg.test else "all test images"
    slow = f", {cfg.si_steps:,} for SI" if cfg.si_steps else ""
    return (
        f"This run: {cfg.tasks} tasks, {cfg.steps:,} steps of {cfg.batch} images each{slow}, and "
        f"{cfg.retrain_steps:,} more for EPN after pruning; Adam with {LR:g}{momentum}; "
        f"α = {' or '.join(f'{each:g}' for each in cfg.alphas)}, γ = {GAMMA:g}; VCL samples {cfg.vcl_samples} a step; "
        f"{cfg.samples:,} importance samples, {test}; {cfg.runs}. The paper: 200 epochs (about 21,600 steps) a task on "
        "MNIST, 400 on notMNIST and for SI, VCL samples 10 a step, 5,000 importance samples, all test images."
        + "".join(f" While training: {each[0].lower()}{each[1:]}." for each in precision_note(cfg.matmul_precision))
    )


def likelihood_text(cfg: Config, measured: Sequence[MethodRows]) -> str:
    """How the numbers came about, and of which methods no task's likelihood has moved."""
    exact = [m.method.label for m in measured if m.unchanged and m.method.strategy == "EfficientPackNet"]
    kept = f" Of {' and '.join(exact)} every task's likelihood is, to the bit, what it was when the task was learned."
    return (
        f"Average over all tasks after the last, in nats, estimated with {cfg.samples:,} importance samples of each "
        f"image.{kept if exact else ''}"
    )


def main_table(cfg: Config, measured: Sequence[MethodRows]) -> Table:
    """One row per method, the paper's value beside ours."""
    columns: Columns = [
        ("", lambda m: m.method.label), ("α", lambda m: f"{m.choice.alpha:g}"),
        (Column("log-likelihood", "max", 2), lambda m: m.average),
        (Column("paper", paper=True, digits=2), lambda m: PAPER[cfg.data][m.method.name]),
        (Column("when learned", None, 1), lambda m: m.learned),
        (Column("forgotten since", None, 2), lambda m: m.forgotten),
        (Percent("shared weights in use"), lambda m: m.used),
    ]  # fmt: skip
    caption = (
        f"Test log-likelihood in nats. When learned, forgotten since: with {cfg.curve_samples:,} importance samples of "
        "each image, which is a lower bound of what more would give."
    )
    return table(f"All {cfg.tasks} tasks after the last", columns, measured, caption)


def choice_table(chosen: Mapping[Method, Choice], tuning: Rows) -> Table:
    """The validation log-likelihood with everything that was tried, and what was chosen."""
    every = [(method, row) for method in chosen for row in method.rows(tuning)]
    tried = [(method, Choice(*(row[name] for name in Choice._fields)), row) for method, row in every]
    columns: Columns = [
        ("", lambda each: each[0].label), ("α", lambda each: f"{each[1].alpha:g}"),
        ("strength", lambda each: "" if each[1].strength is None else f"{each[1].strength:g}"),
        ("δ", lambda each: f"{each[1].damping:g}" if each[0].strategy in DAMPED else ""),
        (Column("log-likelihood", digits=2), lambda each: each[2].get("validation")),
        ("", lambda each: "chosen" if each[1] == chosen[each[0]] else "diverged" if each[2].lost else ""),
    ]  # fmt: skip
    return table("Validation log-likelihood", columns, tried)


def figure_of_averages(found: Sequence[MethodRows]) -> Figure:
    """The average over the tasks so far; without naive training, beside which all others are one line."""
    shown = [m for m in found if m.method.strategy != "Naive"] or found
    curves = [m.curve([[fmean(each) for each in curve] for curve in m.rows.values(CURVE)], 1) for m in shown]
    caption = "Naive training is left out: beside it all others would be one line; its numbers are in the table."
    return Figure(
        "average", lines, curves, title="Average over all tasks so far", xlabel="tasks learned", wide=True,
        ylabel="test log-likelihood (nats)", caption=caption if len(shown) < len(found) else "",
    )  # fmt: skip


def figure_of_tasks(cfg: Config, found: Sequence[MethodRows]) -> Figure:
    """A panel for each task: its likelihood from the moment it was learned (appendix C of the paper)."""
    drawn = {
        f"task {i + 1}: {name}": [
            m.curve([[row[i] for row in c[i:]] for c in m.rows.values(CURVE)], i + 1) for m in found
        ]
        for i, name in enumerate(CHARACTERS[cfg.data][: cfg.tasks])
    }
    caption = f"Each panel shows {SPANS[cfg.data]:g} nats below its best value; methods that forget more leave it."
    return Figure(
        "tasks", panels, drawn, title="Every task, from when it was learned", xlabel="tasks learned",
        ylabel="log-likelihood", span=SPANS[cfg.data], caption=caption,
    )  # fmt: skip


def figure_of_samples(cfg: Config, images: data.Images, found: Sequence[MethodRows]) -> Figure:
    """What each method draws of every character after the last task, from the same noise; test images beside them."""
    stream = stream_of(cfg, images, cfg.tasks)
    real = torch.stack([some(task.test(), cfg.shown, task.index)[:, 0] for task in stream])
    grids = [Grid("test images", real.numpy(), "for comparison")]
    for m in found:
        first = m.rows.finished[0]
        drawn = load_file(first.file(SAMPLES))["drawn"].view(*real.shape).numpy() / 255
        grids.append(Grid(m.method.label, drawn, f"{fmean(first['final']):.1f} nats"))
    caption = "Means of p(x|z), the same z for every method, first seed. A row is a task; the last was learned last."
    title, rows = "What is left of every character", CHARACTERS[cfg.data][: cfg.tasks]
    return Figure("samples", image_grids, grids, rows, title=title, caption=caption)


def stats(found: Sequence[MethodRows]) -> list[Stat]:
    """The best method, the baseline, and what packing needs."""
    best = max(found, key=MethodRows.score)
    naive = "".join(f", {m.score():.1f} naively" for m in found if m.method.strategy == "Naive")
    used = [Stat("shared weights in use", f"{m.used.mean:.1%}", m.method.label) for m in found if m.used]
    return [Stat("best log-likelihood", f"{best.score():.2f}", f"{best.method.label}{naive}"), *used]


def headline(cfg: Config, found: Sequence[MethodRows]) -> Headline:
    """Powerprop + EfficientPackNet, or the best if it was not run."""
    ours = [m for m in found if m.method.name == "Powerprop+EfficientPackNet"]
    best = max(ours or found, key=MethodRows.score)
    here, printed = best.average, PAPER[cfg.data][best.method.name]
    return Headline(f"log-likelihood of {best.method.label}", here.format(2) if here else "", f"{printed:.2f}")


EXPERIMENTS = {
    name: Experiment(name, title, "table 3 and the figures of appendix C", presets, main)
    for name, title, presets in (
        ("generative", "ten digits in one variational autoencoder, one after the other", MNIST),
        ("generative-notmnist", "the same with the ten letters of notMNIST", NOTMNIST),
    )
}
