"""The settings of a table of continual-learning methods."""

from __future__ import annotations

from dataclasses import dataclass

from powerprop.continual import SCENARIOS, STRATEGIES, Scenario
from powerprop.experiments.continual.baselines.protocol import PROTOCOLS, names_of
from powerprop.experiments.harness.checks import check_positive, check_settings, require
from powerprop.train.precision import PRODUCTS


@dataclass(frozen=True)
class Config:
    """The settings of a table of continual-learning methods on one benchmark.

    Args:
        benchmark: "split-mnist", "permuted-mnist" or "split-cifar100"; its protocol says which stream, network and
            optimiser.
        epochs: passes through the images of every task; a part of one is possible.
        seeds: runs of each method: first weights, order of pixels, batches.
        strategy: names of methods, or all.
        scenarios: the columns of the table: task-incremental, domain-incremental, class-incremental; those that the
            benchmark has.
        powerprop: those of the methods that are run with Powerpropagation too.
        alpha: its power. The learning rate grows with it so that a weight of size `magnitude` learns equally fast.
        magnitude: a typical weight.
        strengths: factors of the published strength of a penalty, of which the best on validation data is taken, for
            each method, power and scenario; a single one is taken as it is.
        si_strengths: those of SI, whose importances grow with the steps of a task, so that published ones are too small
            for fewer; none means the same as of the others.
        rates: factors of the learning rate, chosen together with the strengths.
        tuning_seeds: runs of each strength and rate that are chosen from.
        tasks: the first so many of the stream; 0 means all.
        width: units of a hidden layer of a fully connected network; 0 means the protocol's.
        images: only the last so many training images of the data are used; 0 means all.
        validation: the last so many training images of the data are for choices: strengths, sparsities.
        test: the first so many test images of the data are measured; 0 means all.
        group: methods that infer the task do so from single images, and once more from so many that share it.
        economy: let the costliest methods rehearse and draw less than published, and have the steps of the epochs where
            they are published with more.
        generator_steps: with economy, steps per task of RtF in the class-incremental scenario, where it needs more than
            others; three quarters of them for DGR, which needs fewer; 0 means those of the epochs.
        precision: of the factors in products of matrices, "float32" or "bfloat16"; all else is float32.
    """

    benchmark: str
    epochs: float
    seeds: int
    strategy: tuple[str, ...] = ("all",)
    scenarios: tuple[str, ...] = SCENARIOS
    powerprop: tuple[str, ...] = ("EfficientPackNet",)
    alpha: float = 1.375
    magnitude: float = 0.03
    strengths: tuple[float, ...] = (1.0,)
    si_strengths: tuple[float, ...] = ()
    rates: tuple[float, ...] = (1.0,)
    tuning_seeds: int = 1
    tasks: int = 0
    width: int = 0
    images: int = 0
    validation: int = 5000
    test: int = 0
    group: int = 128
    economy: bool = False
    generator_steps: int = 0
    precision: str = "float32"

    def __post_init__(self) -> None:
        known = ("all", *STRATEGIES)
        choices = {
            "benchmark": PROTOCOLS, "strategy": known, "scenarios": SCENARIOS, "powerprop": STRATEGIES,
            "precision": PRODUCTS,
        }  # fmt: skip
        check_settings(self, {"group": 1, "validation": 1, "tuning_seeds": 1}, choices)
        check_positive(self, "epochs", "magnitude")
        require(self.alpha > 1, f"alpha must be above 1, the power of a method by itself, got {self.alpha}")
        for name in ("strategy", "scenarios", "strengths", "rates"):
            values = getattr(self, name)
            require(len(set(values)) == len(values) > 0, f"{name} must be some, each once, got {values}")
        for name in ("strengths", "rates", "si_strengths"):
            require(min(getattr(self, name), default=1.0) > 0, f"{name} must be above 0, got {getattr(self, name)}")
        distinct = len(set(self.si_strengths)) == len(self.si_strengths)
        require(distinct, f"si_strengths must be none or some, each once, got {self.si_strengths}")
        most, has = PROTOCOLS[self.benchmark].tasks, PROTOCOLS[self.benchmark].outputs
        require(self.tasks <= most, f"tasks must be at most the {most} of {self.benchmark}, got {self.tasks}")
        wanted = f"scenarios of {self.benchmark} are {', '.join(has)}"
        require(any(each in has for each in self.scenarios), f"{wanted}, got {', '.join(self.scenarios)}")
        fits = not self.width or PROTOCOLS[self.benchmark].model == "mlp"
        require(fits, f"width is of fully connected networks, which {self.benchmark} has none of, got {self.width}")
        possible = names_of(("all",), self.benchmark)
        for each in self.strategy:
            fits = each == "all" or each in possible
            require(fits, f"strategy on {self.benchmark} must be one of {', '.join(possible)}, got {each!r}")
        fits = self.economy or not self.generator_steps
        require(fits, f"generator_steps are the published ones without economy, got {self.generator_steps}")
        fits = not self.images or self.validation < self.images
        require(fits, f"validation must be below the {self.images} images, got {self.validation}")

    def tunes(self) -> bool:
        """True if strengths or rates are chosen on validation data."""
        return max(len(self.strengths), len(self.si_strengths), len(self.rates)) > 1

    def columns(self) -> tuple[Scenario, ...]:
        """The scenarios of the table, in their usual order."""
        has = PROTOCOLS[self.benchmark].outputs
        return tuple(each for each in SCENARIOS if each in has and each in self.scenarios)
