"""Can α be left to itself? `choosing-alpha`: fixed powers against rules that move α while a network trains.

The paper leaves the choice of α for future work (section 6). α may change at any step without changing the function,
and with matched rates without changing how far a layer moves. The rules:

* rising: one α for all, from 1 to the number given, along a line; falling: from there to 1
* share: up while the tenth of a layer's weights that is largest has less than this share of its energy Σw², else down
* hypergradient: up where a larger α in the last step would have lowered the loss of this one, at this speed
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

import powerprop as pp
from powerprop_paper.experiments.stability import MAKERS, NETWORKS, NetworkName, Optimiser, in_nats
from powerprop_paper.pages import Column, Headline, Page, Percent, Section, Table, Value
from powerprop_paper.report import Mean
from powerprop_paper.run import Experiment, Progress, Row, Rows, Run
from powerprop_paper.settings import EachOnce, Positive, Range, Seeds, Settings, require

MOST = 5.0
"""No rule takes α beyond."""
LARGEST = 0.1
"""The fraction of a layer's weights whose share of the energy is looked at."""
EVERY = 20
"""Steps between two looks at it."""


DEFAULT = "fixed 2"
KINDS = ("fixed", "rising", "falling", "share", "hypergradient")
SETTINGS: dict[NetworkName, tuple[Optimiser, float]] = {
    "LeNet": ("SGD", 0.3), "GPT": ("AdamW", 6e-3), "ResNet": ("momentum", 0.03)
}  # fmt: skip
"""The optimiser of each network, at the rate of `rate-stability` for α = 1."""


def parse(rule: str) -> tuple[str, float]:
    """`fixed 2` as its parts."""
    kind, _, value = rule.partition(" ")
    if kind not in KINDS or not value.replace(".", "", 1).isdigit():
        raise ValueError(f"a rule must be one of {', '.join(KINDS)} and a number, such as 'fixed 2', got {rule!r}")
    return kind, float(value)


@dataclass(frozen=True)
class Config(Settings):
    """The settings of the comparison."""

    networks: Annotated[tuple[Literal["LeNet", "GPT", "ResNet"], ...], EachOnce()] = ("LeNet", "GPT")
    """those of `rate-stability`"""
    rules: Annotated[tuple[str, ...], EachOnce()] = (
        "fixed 1", "fixed 1.5", DEFAULT, "fixed 3", "fixed 5", "rising 3", "falling 3", "share 0.9",
        "hypergradient 0.3",
    )  # fmt: skip
    """a kind and its number; the fixed ones are the sweep that the others are measured by"""
    sparsities: Annotated[tuple[Annotated[float, Range(0, 1, above=True, below=True)], ...], EachOnce()] = (
        0.7, 0.8, 0.9,
    )  # fmt: skip
    """each pruned at once from the dense network"""
    seeds: Seeds = 3
    """runs of each"""
    length: Positive = 1.0
    """of the trainings, times those of `rate-stability`"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for rule in self.rules:
            parse(rule)
        require(DEFAULT in self.rules, f"rules must have {DEFAULT!r} among them, got {self.rules}")

    def steps_of(self, network: NetworkName) -> int:
        """Of a training."""
        return max(1, round(self.length * NETWORKS[network].steps))


PRESETS = {
    "smoke": Config(networks=("GPT",), length=0.01, seeds=2, sparsities=(0.5,), rules=(DEFAULT, "share 0.9")),
    "cpu": Config(),
}


# The rules.


class Choice:
    """A rule for α, called before and after every step; the powers stand in the optimiser's groups, one a layer."""

    def __init__(self, optimizer: pp.Powerprop, start: float) -> None:
        self.optimizer, self.step = optimizer, 0
        self.groups = [g for g in optimizer.param_groups if any(g["params"][0] is m.param for m in _weights(optimizer))]
        for group in self.groups:
            group["alpha"] = start
        optimizer.register_step_pre_hook(lambda *_: self.before())
        optimizer.register_step_post_hook(lambda *_: self.after())

    def before(self) -> None:
        """The gradients are there."""

    def after(self) -> None:
        """The weights have moved."""


def _weights(optimizer: pp.Powerprop) -> list[Any]:
    return list(optimizer.masters.values())


class Line(Choice):
    """α along a line from first to last."""

    def __init__(self, optimizer: pp.Powerprop, first: float, last: float, steps: int) -> None:
        super().__init__(optimizer, first)
        self.first, self.last, self.steps = first, last, steps

    def before(self) -> None:
        for group in self.groups:
            group["alpha"] = self.first + (self.last - self.first) * self.step / self.steps
        self.step += 1


class Share(Choice):
    """α of a layer goes up by a tenth while its largest weights have less than this share of the energy, else down."""

    def __init__(self, optimizer: pp.Powerprop, target: float) -> None:
        super().__init__(optimizer, 2.0)
        self.target = target

    @torch.no_grad()
    def after(self) -> None:
        self.step += 1
        if self.step % EVERY:
            return
        for group in self.groups:
            (weight,) = group["params"]
            up = share(weight) < self.target
            group["alpha"] = min(max(group["alpha"] + (0.1 if up else -0.1), 1.0), MOST)


def share(weight: Tensor) -> float:
    """How much of Σw² the largest tenth of the weights has: 0.44 for a normal distribution."""
    energy = weight.detach().flatten().square()
    largest = energy.topk(max(1, round(LARGEST * energy.numel()))).values
    return (largest.sum() / energy.sum()).item()


class Hypergradient(Choice):
    """α ← α - speed · cos(∂L/∂w, ∂Δ/∂α), with the move Δ of the step before (Baydin et al. 2018, of the rate).

    Under matched rates Δ ∝ s²p/ρ with ρ = Σs²p²/Σp², so that ∂Δ/∂α = Δ·2/α²·(log|w| - its mean, weighted by Δ²/s²).
    """

    def __init__(self, optimizer: pp.Powerprop, speed: float) -> None:
        super().__init__(optimizer, 2.0)
        self.speed = speed
        self.old: list[Tensor] = []
        self.turned: list[Tensor] = []

    @torch.no_grad()
    def before(self) -> None:
        for group, turned in zip(self.groups, self.turned, strict=False):
            gradient = group["params"][0].grad
            cosine = float((gradient * turned).sum() / (gradient.norm() * turned.norm()).clamp(min=1e-30))
            group["alpha"] = min(max(group["alpha"] - self.speed * cosine, 1.0), MOST)
        self.old = [group["params"][0].detach().clone() for group in self.groups]

    @torch.no_grad()
    def after(self) -> None:
        self.turned = []
        for group, old in zip(self.groups, self.old, strict=True):
            moved, size = group["params"][0] - old, old.abs().clamp(min=1e-30)
            weights = moved.square() / size.pow(2 - 2 / group["alpha"])
            self.turned.append(moved * (size.log() - (weights * size.log()).sum() / weights.sum().clamp(min=1e-30)))


# One training.


def train(cfg: Config, folder: Path, progress: Progress, network: NetworkName, rule: str, seed: int) -> dict[str, Any]:
    """The same seed gives every rule the same initial weights and batches; measured dense and pruned at once."""
    problem, steps = NETWORKS[network].make(seed), cfg.steps_of(network)
    groups: Any = [{"params": [p]} for p in problem.model.parameters()]
    optimizer = pp.Powerprop(MAKERS[SETTINGS[network][0]](groups, SETTINGS[network][1]), problem.model)
    kind, value = parse(rule)
    choice = choose(optimizer, kind, value, steps)
    problem.train(optimizer, steps, progress)
    found, dense = [problem.measure(problem.model)], problem.model.state_dict()
    dense = {name: value.clone() for name, value in dense.items()}
    for sparsity in cfg.sparsities:
        pp.prune(problem.model, sparsity, where=problem.prune[1])
        found.append(problem.measure(problem.model))
        problem.model.load_state_dict(dense)
    return {
        "validation": [each["validation"] for each in found], "test": [each["test"] for each in found],
        "alphas": [group["alpha"] for group in choice.groups],
    }  # fmt: skip


def choose(optimizer: pp.Powerprop, kind: str, value: float, steps: int) -> Choice:
    """The rule at work."""
    if kind == "share":
        return Share(optimizer, value)
    if kind == "hypergradient":
        return Hypergradient(optimizer, value)
    first, last = {"fixed": (value, value), "rising": (1.0, value), "falling": (value, 1.0)}[kind]
    return Line(optimizer, first, last, steps)


# What is said.


def main(cfg: Config, run: Run) -> Page:
    """Every rule on every network, one seed of all after the other."""
    found = run.map(
        train, [{"network": n, "rule": r, "seed": s} for n in cfg.networks for s in range(cfg.seeds) for r in cfg.rules]
    )
    return Page(
        "α left to itself",
        f"Matched rates, {cfg.runs}. Best is the fixed power with the best score on validation data, the mean over the "
        "dense network and all sparsities; the last column is the difference to it, seed by seed.",
        [section(cfg, name, found.where(network=name)) for name in cfg.networks],
        "The paper leaves the choice of α to future work (section 6).",
        headline=headline(cfg, found),
    )


def score(row: Row) -> float:
    """The mean over the dense network and all sparsities, on validation data."""
    return fmean(row["validation"])


def best_fixed(cfg: Config, network: NetworkName, rows: Rows) -> str:
    """The fixed power that a sweep would choose."""
    fixed = [rule for rule in cfg.rules if rule.startswith("fixed") and rows.where(rule=rule).finished]
    scores = {rule: fmean(map(score, rows.where(rule=rule).finished)) for rule in fixed}
    return (min if in_nats(network) else max)(fixed, key=scores.__getitem__)


def difference(network: NetworkName, rows: Rows, best: Rows) -> Mean | None:
    """How much a rule is above the best fixed power, in points or nats, with the spread over the seeds."""
    ahead = {row["seed"]: fmean(row["test"]) for row in best.finished}
    sign = -1 if in_nats(network) else 100
    apart = [sign * (fmean(row["test"]) - ahead[row["seed"]]) for row in rows.finished if row["seed"] in ahead]
    return Mean.of(apart) if apart else None


def section(cfg: Config, network: NetworkName, rows: Rows) -> Section:
    """The table of a network."""
    best = best_fixed(cfg, network, rows)
    nats, values = in_nats(network), []
    for rule in cfg.rules:
        of = rows.where(rule=rule)
        cells: list[Value] = [of.mean(partial(tested, place=i)) for i in range(1 + len(cfg.sparsities))]
        values.append([rule, ended(of), *cells, difference(network, of, rows.where(rule=best))])
    names = ["dense", *(f"{s:.0%}" for s in cfg.sparsities)]
    columns: list[str | Column] = [Column(n, "min", 3) if nats else Percent(n, "max", 2) for n in names]
    optimiser, lr = SETTINGS[network]
    text = f"{NETWORKS[network].make.__doc__} {optimiser} at {lr:g}, {cfg.steps_of(network)} steps. Best: {best}."
    ahead = Column("above the best, nats" if nats else "above the best, points", digits=3 if nats else 2)
    table = Table(
        f"{network}: nats" if nats else f"{network}: accuracy", ["rule", "α at the end", *columns, ahead], values
    )
    return Section(network, text, tables=[table])


def tested(row: Row, place: int) -> float:
    """On test data."""
    return float(row["test"][place])


def ended(rows: Rows) -> str:
    """Where the powers of the layers ended."""
    powers = [alpha for row in rows.finished for alpha in row["alphas"]]
    if not powers:
        return "diverged"
    low, high = min(powers), max(powers)
    return f"{low:.3g}" if high - low < 0.05 else f"{low:.3g} to {high:.3g}"


def headline(cfg: Config, found: Rows) -> Headline:
    """What the fixed default loses to the best power of each network."""
    parts = []
    for name in cfg.networks:
        rows = found.where(network=name)
        lost = difference(name, rows.where(rule=DEFAULT), rows.where(rule=best_fixed(cfg, name, rows)))
        unit = "nats" if in_nats(name) else "points"
        parts += [f"{name} {lost.mean:+.{3 if unit == 'nats' else 2}f} {unit}"] if lost else []
    return Headline("α = 2 against the power that a sweep chooses, mean over all sparsities", ", ".join(parts), "")


EXPERIMENTS = {
    "choosing-alpha": Experiment(
        "choosing-alpha", "fixed powers against rules that choose α", "future work of section 6", PRESETS, main
    )
}
