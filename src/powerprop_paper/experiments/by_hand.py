"""Matched rates beside learning rates that were scaled for each power by hand: `rate`.

The update as printed moves a weight s² = α²|w|^(2-2/α) times as far as the base optimiser proposed. Before there were
matched rates, experiments made up for it with a factor that a typical weight w of each setting decides:

    lr(α) = lr(1) · |w|^(2/α-2) / α²

Here small trainings of these experiments stand side by side: α = 1, and a power at the same learning rate matched, with
that factor, and as printed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, NamedTuple

from powerprop.continual import accuracy_on
from powerprop.optim import Rate
from powerprop_paper import data
from powerprop_paper.experiments import sparse, split
from powerprop_paper.packing import make_learner, make_stream
from powerprop_paper.pages import Column, Headline, Page, Percent, Section, Table, Value
from powerprop_paper.run import Experiment, Progress, Rows, Run
from powerprop_paper.settings import EachOnce, Seeds, Settings, Share
from powerprop_paper.train import local_device

Way = Literal["plain", "matched", "by hand", "as printed"]
WAYS: dict[Way, str] = {
    "plain": "α = 1", "matched": "matched", "by hand": "as printed, rate scaled by hand",
    "as printed": "as printed, rate of α = 1",
}  # fmt: skip
SettingName = Literal["split-mnist", "permuted-mnist", "sparse-training", "sparse-training-cifar"]


class Setting(NamedTuple):
    """A small training of an experiment.

    train: of (power, rule of the rate, learning rate, length, folder, progress, seed); gives what `measured` names.
    weight: the size of a typical weight, as the experiment had it.
    """

    about: str
    train: Callable[..., dict[str, float]]
    alpha: float
    lr: float
    weight: float
    measured: tuple[str, ...] = ("accuracy",)


def pack(
    stream: Any, method: str, alpha: float, rate: Rate, lr: float, length: float, folder: Path, progress: Progress,
    seed: int,
) -> dict[str, float]:  # fmt: skip
    """Tasks packed into one small network: accuracy on all after the last, and the weights that they use."""
    cfg = split.Config(
        tasks=5, alphas=(alpha,), lr=lr, rate=rate, seeds=1, steps=max(1, round(300 * length)), gamma=0.98, width=200,
        retrain_steps=max(1, round(150 * length)), stream=stream, clip=1.0, decay=("retraining",), init_scale=0.5,
        search="binary", frugal_gamma=0.98, prunings=2, pruning_steps=max(1, round(50 * length)), images=12_000,
        validation=2_000,
    )  # fmt: skip
    learner = make_learner(cfg, method, alpha, seed, local_device())
    images = data.load_last("mnist", cfg.images).to(local_device())
    tasks = make_stream(stream, images, cfg.tasks, seed, cfg.validation)
    for number, task in enumerate(tasks):
        learner.learn(task)
        progress((number + 1) / len(tasks), {})
    return {
        "accuracy": fmean(accuracy_on(learner, task, "task-incremental") for task in tasks),
        "weights used": learner.used(),
    }


def prune(
    preset: str, alpha: float, rate: Rate, lr: float, length: float, folder: Path, progress: Progress, seed: int
) -> dict[str, float]:
    """Iterative pruning to 98%."""
    cfg = {"mnist": sparse.MNIST, "cifar": sparse.CIFAR}[preset]["cpu"]
    steps = {"mnist": 1_500, "cifar": 240}[preset]
    cfg = replace(cfg, alpha=alpha, rate=rate, steps=max(1, round(steps * length)), test=5_000, checkpoint_every=500)
    return {"accuracy": sparse.train(cfg, folder, progress, "pp-iterative", "uniform 0.98", lr, 1, seed)["test"]}


SETTINGS: dict[SettingName, Setting] = {
    "split-mnist": Setting(
        "EfficientPackNet on Split-MNIST, 5 tasks of 300 + 150 steps in 784-200-200-10, γ = 0.98",
        partial(pack, "split", "efficient-packnet"),
        1.375,
        1.0,
        0.03,
        ("accuracy", "weights used"),
    ),
    "permuted-mnist": Setting(
        "the frugal EfficientPackNet on Permuted-MNIST, 5 tasks of 300 + 150 steps in 784-200-200-10, γ = 0.98",
        partial(pack, "permuted", "frugal-packnet"),
        1.5,
        1.0,
        0.03,
        ("accuracy", "weights used"),
    ),
    "sparse-training": Setting(
        "iterative pruning of LeNet-300-100 on MNIST to 98%, 1,500 steps", partial(prune, "mnist"), 1.5, 0.1, 0.03
    ),
    "sparse-training-cifar": Setting(
        "iterative pruning of a fast network on CIFAR-10 to 98%, 240 steps", partial(prune, "cifar"), 1.5, 0.4, 0.1
    ),
}


@dataclass(frozen=True)
class Config(Settings):
    """The settings of the comparison."""

    settings: Annotated[tuple[SettingName, ...], EachOnce()] = ("split-mnist", "permuted-mnist", "sparse-training")
    """what is trained"""
    seeds: Seeds = 2
    """runs of each"""
    length: Share = 1.0
    """of the trainings, as a fraction of the usual"""


PRESETS = {
    "smoke": Config(settings=("split-mnist", "sparse-training"), seeds=1, length=0.01),
    "cpu": Config(),
    "full": Config(settings=("split-mnist", "permuted-mnist", "sparse-training", "sparse-training-cifar"), seeds=3),
}


def train(cfg: Config, folder: Path, progress: Progress, setting: SettingName, way: Way, seed: int) -> dict[str, float]:
    """The same seed gives every way the same initial weights and the same data."""
    it = SETTINGS[setting]
    alpha, lr = (1.0 if way == "plain" else it.alpha), it.lr
    if way == "by hand":
        lr *= it.weight ** (2 / alpha - 2) / alpha**2
    rate: Rate = "paper" if way in ("by hand", "as printed") else "matched"
    return it.train(alpha, rate, lr, cfg.length, folder, progress, seed)


def main(cfg: Config, run: Run) -> Page:
    """Every way in every setting, one seed of all after the other."""
    jobs = [{"setting": s, "way": w, "seed": seed} for s in cfg.settings for seed in range(cfg.seeds) for w in WAYS]
    found = run.map(train, jobs)
    return Page(
        "Matched rates and rates scaled by hand",
        "Small trainings of experiments whose learning rate used to be scaled for each power, by the factor "
        "|w|^(2/α-2)/α² of a typical weight w. Matched rates need no such weight.",
        [section(name, found.where(setting=name)) for name in cfg.settings],
        "The paper tunes the learning rate; this is beyond it.",
        headline=headline(cfg, found),
    )


def section(name: SettingName, rows: Rows) -> Section:
    """The table of a setting."""
    it = SETTINGS[name]
    columns: list[str | Column] = [
        "",
        *(Percent(each, "max" if each == "accuracy" else None, 2) for each in it.measured),
    ]
    values: list[list[Value]] = [
        [label, *(rows.where(way=way).mean(each) for each in it.measured)] for way, label in WAYS.items()
    ]
    text = f"{it.about}; α = {it.alpha:g}, learning rate {it.lr:g} under α = 1, |w| = {it.weight:g}."
    return Section(name, text, tables=[Table(f"{name}: test accuracy", columns, values)])


def headline(cfg: Config, found: Rows) -> Headline:
    """The differences of matched rates to those by hand."""
    said = []
    for name in cfg.settings:
        means = [found.where(setting=name, way=way).mean("accuracy") for way in ("matched", "by hand")]
        said += [f"{name} {100 * (means[0].mean - means[1].mean):+.2f}"] if means[0] and means[1] else []
    return Headline("matched against rates scaled by hand, points of accuracy", ", ".join(said), "")


EXPERIMENTS = {
    "rate": Experiment("rate", "matched rates beside rates scaled by hand", "beyond the paper", PRESETS, main)
}
