"""A network several times wider in the same training time: `wide-sparse`, beyond the paper.

A dense MLP, and others of several times its width of which one weight in fifty or a hundred is there, computed sparsely
(`powerprop.sparse_compute`). One job measures what a step of each takes, all in turn in one process; each then trains
for as many steps as fit into the processor time of the dense training. Accuracy is drawn against that time. The
learning rate of each is chosen on validation images. Counts of steps come from a row that is measured once: a run that
is resumed goes on with the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import powerprop as pp
from powerprop.allocate import at_most
from powerprop_paper import data, models
from powerprop_paper.pages import Column, Figure, Headline, Page, Percent, Section, Table, Value
from powerprop_paper.report import Curve, lines
from powerprop_paper.run import Experiment, Progress, Rows, Run
from powerprop_paper.settings import Count, EachOnce, Positive, Power, Seeds, Settings, require
from powerprop_paper.train import MetricsLog, evaluate, fit, read_metrics

DENSE = "dense"
LABELS = {DENSE: "Dense", "static": "Static", "rigl": "RigL"}
"""Names in figures."""
HEADS = {"fc3.weight": at_most(0.8)}
"""Output layers are at most 80% sparse, as in the paper."""


class Network(NamedTuple):
    """A network of the comparison: how much wider than the dense one, how sparse, and by which method."""

    wider: int
    sparsity: float
    method: str

    @property
    def label(self) -> str:
        return "Dense" if self.method == DENSE else f"{self.wider}x, {self.sparsity:g}, {LABELS[self.method]}"


def parse(text: str) -> Network:
    """ "dense", or such as "4x 0.98 rigl"."""
    if text == DENSE:
        return Network(1, 0.0, DENSE)
    try:
        wider, sparsity, method = text.split()
        found = Network(int(wider.removesuffix("x")), float(sparsity), method)
    except ValueError:
        found = Network(0, 0.0, "")
    good = found.wider >= 1 and 0 < found.sparsity < 1 and found.method in ("static", "rigl")
    require(good, f"a network must look like {DENSE!r} or '4x 0.98 rigl' or '8x 0.99 static', got {text!r}")
    return found


@dataclass(frozen=True)
class Config(Settings):
    """The settings of the comparison."""

    task: Literal["mnist", "cifar10"] = "mnist"
    """images, flattened"""
    networks: Annotated[tuple[str, ...], EachOnce()] = (
        "4x 0.98 static", "4x 0.98 rigl", "8x 0.99 static", "8x 0.99 rigl"
    )  # fmt: skip
    """beside the dense one: how much wider, how sparse, by which method"""
    hidden: Count = 300
    """units in each of two hidden layers of the dense network"""
    alpha: Power = 2.0
    """the power of Powerprop; every network is also trained without"""
    lrs: Annotated[tuple[Positive, ...], EachOnce()] = (3e-3, 1e-2)
    """learning rates of Adam; the best on validation images, with the first seed, is taken"""
    seeds: Seeds = 3
    """runs of each"""
    steps: Count = 2_000
    """of the dense network; all others have as many as fit into its time"""
    batch: Count = 64
    """images per step"""
    regrow_every: Count = 100
    """steps between the mask updates of RigL"""
    validation: Count = 5_000
    """training images held back, by which rates are chosen"""
    points: Count = 10
    """of each curve"""
    rounds: Count = 5
    """in which steps are timed; the fastest counts"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for text in self.networks:
            require(parse(text).method != DENSE, f"networks are those beside the dense one, got {text!r} among them")

    @property
    def every(self) -> list[tuple[str, float]]:
        """All networks with and without Powerprop."""
        return [(name, alpha) for name in (DENSE, *self.networks) for alpha in (1.0, self.alpha)]


PRESETS = {
    "smoke": Config(
        networks=("2x 0.9 rigl",), hidden=20, lrs=(3e-3,), seeds=2, steps=20, regrow_every=4, points=2, rounds=1
    ),
    "cpu": Config(networks=("4x 0.98 static", "4x 0.98 rigl"), seeds=2, steps=1_500, points=6, rounds=3),
    "full": Config(),
}
CIFAR = {
    "smoke": Config(
        task="cifar10", networks=("2x 0.9 static",), hidden=20, lrs=(3e-3,), seeds=1, steps=10, points=2, rounds=1,
        validation=500,
    ),
    "cpu": Config(task="cifar10", networks=("4x 0.98 static", "4x 0.98 rigl"), lrs=(1e-3, 3e-3)),
}  # fmt: skip


# The jobs.


def make(cfg: Config, name: str, alpha: float, lr: float, steps: int, seed: int) -> tuple[nn.Module, pp.Powerprop]:
    """A network and its optimiser; which layers are sparse is fixed, so that a resumed run has the same bits."""
    network, inputs = parse(name), 784 if cfg.task == "mnist" else 3072
    wide = cfg.hidden * network.wider
    model = models.mlp([inputs, wide, wide, 10], generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():  # the weights that are there have the variance of a layer with so many inputs
        for key, weight in model.named_parameters():
            if weight.dim() == 2 and key not in HEADS:
                weight.mul_((1 - network.sparsity) ** -0.5)
    masks = masks_of(cfg, network, steps, seed)
    optimizer = pp.Powerprop(torch.optim.Adam(model.parameters(), lr), model, alpha, sparsify=masks)
    if masks is not None:
        pp.sparse_compute(model, optimizer, batch=cfg.batch, layers=["*"])
    return model, optimizer


def masks_of(cfg: Config, network: Network, steps: int, seed: int) -> pp.sparsify.Method | None:
    """What makes the masks, and moves them."""
    if network.method == DENSE:
        return None
    if network.method == "static":
        return pp.Static(network.sparsity, steps=steps, layers=HEADS, seed=seed)
    return pp.RigL(network.sparsity, steps=steps, layers=HEADS, seed=seed, interval=cfg.regrow_every)


def load_splits(cfg: Config) -> data.Splits:
    """CIFAR's images standardised."""
    return data.load_splits(cfg.task, "unit" if cfg.task == "mnist" else "standard", cfg.validation)


def time_steps(cfg: Config, folder: Path, progress: Progress) -> dict[str, Any]:
    """Seconds of a step of each, mask updates with their share: processor time, the networks in turn."""
    splits, found = load_splits(cfg), dict.fromkeys(map(named, cfg.every), math.inf)
    training = {named(each): batch_by_batch(cfg, splits, *each) for each in cfg.every}
    for number in range(cfg.rounds + 1):
        for name, steps in training.items():
            start = time.thread_time()
            for _ in range(cfg.regrow_every):
                next(steps)
            if number:  # the first step of an optimiser makes its memory
                found[name] = min(found[name], (time.thread_time() - start) / cfg.regrow_every)
        progress(number / (cfg.rounds + 1), {})
    return {"seconds": found}


def named(each: tuple[str, float]) -> str:
    """A network and its power in one word."""
    return f"{each[0]}, α = {each[1]:g}"


def batch_by_batch(cfg: Config, splits: data.Splits, name: str, alpha: float) -> Iterator[None]:
    """Steps of training without end."""
    model, optimizer = make(cfg, name, alpha, cfg.lrs[0], 100 * cfg.regrow_every * (cfg.rounds + 1), 0)
    for x, y in data.Batches(*splits.train, cfg.batch, torch.Generator().manual_seed(0)):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield


def train(
    cfg: Config, folder: Path, progress: Progress, network: str, alpha: float, steps: int, lr: float, seed: int
) -> dict[str, Any]:
    """A network for its number of steps, with a learning rate that falls along a cosine."""
    splits = load_splits(cfg)
    model, optimizer = make(cfg, network, alpha, lr, steps, seed)
    batches = data.Batches(*splits.train, cfg.batch, torch.Generator().manual_seed(seed))
    with MetricsLog(folder / "metrics.jsonl") as log:
        fit(
            model, optimizer, batches, steps, schedule=lambda step: (1 + math.cos(math.pi * step / steps)) / 2,
            checkpoint=folder / "checkpoint.pt", log=log, eval_every=math.ceil(steps / cfg.points),
            evaluate=lambda model: {"accuracy": evaluate(model, *splits.test, batch=data.AT_ONCE).accuracy},
            progress=lambda step, values: progress(step / steps, {"step": step, **values}),
        )  # fmt: skip
    measured = [each for each in read_metrics(folder / "metrics.jsonl") if "accuracy" in each]
    return {
        "at": [each["step"] for each in measured], "accuracies": [each["accuracy"] for each in measured],
        "validation": evaluate(model, *splits.validation, batch=data.AT_ONCE).accuracy,
        "test": evaluate(model, *splits.test, batch=data.AT_ONCE).accuracy,
        "weights": sum(int(mask.count_nonzero()) for mask in optimizer.active.values()),
        "dense": sum(mask.numel() for mask in optimizer.active.values()),
    }  # fmt: skip


# The script.


def main(cfg: Config, run: Run) -> Page:
    """What a step takes; every rate with one seed; the best with all."""
    run.prepare(lambda: data.load(cfg.task))
    (timing,) = run.map(time_steps, [{}])
    seconds = {each: timing["seconds"][named(each)] for each in cfg.every}
    steps = {each: equal_steps(cfg.steps, seconds[DENSE, 1.0], seconds[each]) for each in cfg.every}
    tried = run.map(train, [job(each, steps[each], lr, 0) for each in cfg.every for lr in cfg.lrs])
    best = {each: best_rate(of(tried, each)) for each in cfg.every}
    found = run.map(train, [job(e, steps[e], best[e], seed) for e in cfg.every for seed in range(cfg.seeds)])
    return page(cfg, found, seconds, best)


def equal_steps(steps: int, dense: float, own: float) -> int:
    """As many as fit into the time of the dense training, to three digits."""
    return max(1, int(float(f"{steps * dense / own:.3g}")))


def job(each: tuple[str, float], steps: int, lr: float, seed: int) -> dict[str, Any]:
    """The settings of a training."""
    return {"network": each[0], "alpha": each[1], "steps": steps, "lr": lr, "seed": seed}


def of(rows: Rows, each: tuple[str, float]) -> Rows:
    """The rows of a network with one power."""
    return rows.where(network=each[0], alpha=each[1])


def best_rate(rows: Rows) -> float:
    """The rate with the best accuracy on validation images."""
    return float(max(rows, key=lambda row: row.get("validation", 0.0))["lr"])


# The page.

Seconds = dict[tuple[str, float], float]


def page(cfg: Config, found: Rows, seconds: Seconds, best: dict[tuple[str, float], float]) -> Page:
    """Accuracy against time for each width, and the numbers."""
    whole = cfg.steps * seconds[DENSE, 1.0]
    inputs = {"mnist": "784", "cifar10": "3072"}[cfg.task]
    text = (
        f"The dense network is {inputs}-{cfg.hidden}-{cfg.hidden}-10; each training has the {whole:.3g} seconds of one "
        f"core that {cfg.steps:,} dense steps take. Times are the processor's, a step is the fastest of {cfg.rounds} "
        "rounds in one process. Thick lines are with Powerprop, thin ones without; bands are one standard deviation."
    )
    caption = f"Adam, batch {cfg.batch}, {cfg.seeds} seed(s); each at the rate that is best on validation images."
    return Page(
        f"Wide and sparse in the time of narrow and dense: {cfg.task}",
        "Networks several times as wide, one weight in fifty or a hundred computed, trained as long as a dense one.",
        [
            Section(
                "At equal training time",
                text,
                figures(cfg, found, seconds),
                [table(cfg, found, seconds, best, caption)],
            )
        ],
        "The paper counts FLOPs; this is beyond it.",
        headline=headline(cfg, found),
    )


def figures(cfg: Config, found: Rows, seconds: Seconds) -> list[Figure]:
    """One for each width and sparsity, with the dense network in all."""
    shapes = dict.fromkeys(parse(name)[:2] for name in cfg.networks)
    drawn = []
    for wider, sparsity in shapes:
        names = [name for name in (DENSE, *cfg.networks) if name == DENSE or parse(name)[:2] == (wider, sparsity)]
        every = [(name, alpha) for name in names for alpha in (1.0, cfg.alpha)]
        curves = [curve(each, of(found, each), seconds[each]) for each in every if of(found, each).finished]
        title = f"{wider} times as wide, {sparsity:.0%} sparse"
        drawn.append(
            Figure(
                f"wide-{wider}", lines, curves, title=title, xlabel="seconds of training", ylabel="test accuracy",
                percent=True, wide=True,
            )
        )  # fmt: skip
    return drawn


def curve(each: tuple[str, float], rows: Rows, seconds: float) -> Curve:
    """Accuracy against the processor time of training."""
    label = LABELS[parse(each[0]).method]
    where = [seconds * step for step in rows.finished[0]["at"]]
    return Curve(label, None, where, rows.values("accuracies"), method=label, plain=each[1] == 1)


def table(cfg: Config, found: Rows, seconds: Seconds, best: dict[tuple[str, float], float], caption: str) -> Table:
    """Every network in figures."""
    values: list[list[Value]] = []
    for each in cfg.every:
        rows = of(found, each).finished
        if rows:
            row = rows[0]
            values.append([
                parse(each[0]).label, f"{each[1]:g}", row["dense"], row["weights"], 1e3 * seconds[each], row["steps"],
                f"{best[each]:g}", rows.mean("test"),
            ])  # fmt: skip
    columns: list[str | Column] = [
        "network", "α", "weights as dense", "weights", Column("ms per step", digits=2), "steps", "rate",
        Percent("test accuracy", "max", digits=2),
    ]  # fmt: skip
    return Table("At the end", columns, values, caption)


def headline(cfg: Config, found: Rows) -> Headline | None:
    """The best wide network with Powerprop against the dense one without."""
    means = [(mean.mean, name) for name in cfg.networks if (mean := of(found, (name, cfg.alpha)).mean("test"))]
    dense = of(found, (DENSE, 1.0)).mean("test")
    if not means or dense is None:
        return None
    top, name = max(means)
    what = f"{cfg.task}: {parse(name).label}, α = {cfg.alpha:g}, and the dense network, at equal training time"
    return Headline(what, f"{top:.2%} and {dense.mean:.2%}", "not measured")


EXPERIMENTS = {
    name: Experiment(name, title, "beyond the paper", presets, main)
    for name, title, presets in (
        ("wide-sparse", "wide sparse networks in the training time of a dense one, MNIST", PRESETS),
        ("wide-sparse-cifar", "wide sparse networks in the training time of a dense one, CIFAR-10", CIFAR),
    )
}
