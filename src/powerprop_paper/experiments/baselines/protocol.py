"""The protocols of the benchmarks as data: stream, network, optimiser, and what each method needs to know of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

from powerprop.continual import STRATEGIES, Scenario
from powerprop_paper.experiments.baselines.published import CLASS, DOMAIN, TASK
from powerprop_paper.experiments.baselines.published_settings import SETTINGS

HEADS, SHARED, STREAM = "heads", "shared", "stream"
"""Outputs of a network: a head for each task; one output layer for the classes of any task; one for all classes."""

BY_SCENARIO: dict[Scenario, str] = {TASK: HEADS, DOMAIN: SHARED, CLASS: STREAM}


@dataclass(frozen=True)
class Protocol:
    """How a benchmark is learned.

    data: name of the data set.
    stream: "split" (some classes per task) or "permuted" (the pixels of every task in an order of its own).
    tasks: in the whole stream.
    model: "mlp" with two hidden layers of `width` units, or "alexnet".
    optimizer, lr, batch: of every method that has none of its own.
    outputs: what the network answers with, by scenario; scenarios with the same outputs share a training.
    among: the outputs that a class of the stream is told from: "all", or those "seen" so far.
    carry: the optimiser is made once and remembers from task to task, in methods that allow it.
    own: optimiser and learning rate of methods that the reference, or their own paper, trains otherwise.
    steps: of methods whose published values are van de Ven & Tolias's: so many steps per task, whatever the epochs,
        on pixels in [0, 1]. Others see images with mean 0 and variance 1.
    reference: where the protocol is from.
    """

    data: str
    stream: str
    tasks: int
    model: str
    width: int
    optimizer: str
    lr: float
    batch: int
    outputs: Mapping[Scenario, str]
    among: Literal["all", "seen"]
    carry: bool
    own: Mapping[str, tuple[str, float]]
    steps: Mapping[str, int]
    reference: str


PROTOCOLS: dict[str, Protocol] = {
    "split-mnist": Protocol(
        data="mnist", stream="split", tasks=5, model="mlp", width=400, optimizer="Adam", lr=1e-3, batch=128,
        outputs=BY_SCENARIO, among="seen", carry=True, own={"GEM": ("SGD", 0.01), "HAT": ("SGD", 0.05)},
        steps={"DGR": 2_000, "RtF": 2_000, "LwF": 2_000},
        reference="Hsu et al., 2018: 400-400 units, Adam with 1e-3, batches of 128, four epochs, one optimiser for "
        "all tasks",
    ),
    "permuted-mnist": Protocol(
        data="mnist", stream="permuted", tasks=10, model="mlp", width=1000, optimizer="Adam", lr=1e-4, batch=128,
        outputs=BY_SCENARIO, among="seen", carry=True, own={"GEM": ("SGD", 0.1), "HAT": ("SGD", 0.05)},
        steps={"DGR": 5_000, "RtF": 5_000, "LwF": 5_000},
        reference="Hsu et al., 2018: 1000-1000 units, Adam with 1e-4, batches of 128, ten epochs, one optimiser for "
        "all tasks",
    ),
    "split-cifar100": Protocol(
        data="cifar100", stream="split", tasks=10, model="alexnet", width=2048, optimizer="SGD", lr=0.01, batch=64,
        outputs={TASK: HEADS, CLASS: HEADS}, among="all", carry=False, own={"HAT": ("SGD", 0.05)}, steps={},
        reference="Saha et al., 2021: an AlexNet-like network with a head per task, SGD with 0.01, batches of 64, "
        "200 epochs",
    ),
}  # fmt: skip

TASK_GIVEN_ONLY = {"HAT"}
"""Methods that cannot answer without the task: their other columns stay empty."""
NEEDS_PIXELS = {"DGR", "RtF"}
"""Methods that generate pixels in [0, 1] with fully connected networks: they have no row where images are in colour."""
TRAINING = ("optimizer", "lr", "batch_size", "epochs", "steps", "reference")
"""Published settings that are no arguments of a method: here the benchmark's protocol decides on them."""


@dataclass(frozen=True)
class Plan:
    """What methods may need to know of the stream before it is learned.

    examples: training images of a task, on average.
    """

    tasks: int
    steps: int
    epochs: float
    examples: int
    width: int


def _packing(plan: Plan) -> dict[str, Any]:
    """A third of the steps retrain the sub-network, so that all methods have the same number of steps."""
    retrain = plan.steps // 3
    return {"steps": max(1, plan.steps - retrain), "retrain_steps": retrain}


OF_THE_STREAM: dict[str, Callable[[Plan], dict[str, Any]]] = {
    "DGR": lambda plan: {"hidden": (plan.width, plan.width)},
    "EfficientPackNet": lambda plan: {**_packing(plan), "gamma": 0.99, "search": "binary", "when_full": "train"},
    "HAT": lambda plan: {"periods": max(1, round(plan.epochs))},
    "PackNet": lambda plan: {**_packing(plan), "total_tasks": plan.tasks},
    "VCL": lambda plan: {"examples": plan.examples, "likelihood_steps": plan.steps // 2},
}
"""Arguments that follow from the stream."""

ECONOMY: dict[str, dict[str, Any]] = {
    "GEM": {"rehearsed": 128},
    "VCL": {"samples": 2},
}
"""Cheaper settings of methods that would take most of the time: GEM's gradients from 128 examples of each task instead
of all in its memory, VCL's from two networks instead of ten."""


def names_of(strategy: tuple[str, ...], benchmark: str) -> list[str]:
    """The methods that are asked for, in the order of the registry; "all" is all that the benchmark has a place for."""
    fits = PROTOCOLS[benchmark].model == "mlp"
    possible = [name for name in STRATEGIES if fits or name not in NEEDS_PIXELS]
    return [name for name in possible if "all" in strategy or name in strategy]


def outputs_of(benchmark: str, name: str, scenarios: tuple[Scenario, ...]) -> dict[str, tuple[Scenario, ...]]:
    """The trainings of a method: the kind of outputs, and the scenarios that it is evaluated in."""
    found: dict[str, tuple[Scenario, ...]] = {}
    for scenario, outputs in PROTOCOLS[benchmark].outputs.items():
        if scenario in scenarios and (scenario == TASK or name not in TASK_GIVEN_ONLY):
            found[outputs] = (*found.get(outputs, ()), scenario)
    return found


def arguments(benchmark: str, name: str, scenario: Scenario, plan: Plan, economy: bool) -> dict[str, Any]:
    """What a method is made with: its published settings, what follows from the stream, and what saves time."""
    known = SETTINGS.get(name, {})
    found = known.get(f"{benchmark}/{scenario}", known.get(benchmark, {}))
    settings = {key: value for key, value in found.items() if key not in TRAINING}
    stream = OF_THE_STREAM[name](plan) if name in OF_THE_STREAM else {}
    return {**settings, **stream, **(ECONOMY.get(name, {}) if economy else {})}


def optimiser_of(benchmark: str, name: str) -> tuple[str, float]:
    """The optimiser of a method and its learning rate at α = 1."""
    protocol = PROTOCOLS[benchmark]
    return protocol.own.get(name, (protocol.optimizer, protocol.lr))


def steps_of(benchmark: str, name: str, scenario: Scenario, steps: int, generator_steps: int | None) -> int:
    """Steps of a task: those of the epochs, unless the method is published with another number.

    generator_steps: to save time, RtF has this many (0: those of the epochs) in the class-incremental scenario, which
        needs them most, DGR three quarters of them, and no method the published number elsewhere.
    """
    if generator_steps is None:
        return PROTOCOLS[benchmark].steps.get(name, steps)
    if scenario != CLASS or name not in NEEDS_PIXELS or not generator_steps:
        return steps
    return generator_steps if name == "RtF" else max(1, 3 * generator_steps // 4)


def strength_of(name: str, settings: Mapping[str, Any]) -> float:
    """The strength of a method's penalty: the published one, or the default of the class that takes it."""
    if "strength" in settings:
        return float(settings["strength"])
    taken = (signature(kind).parameters.get("strength") for kind in STRATEGIES[name].__mro__[:-1])
    return float(next(each.default for each in taken if each is not None))
