"""The tables of methods: three benchmarks, and Powerpropagation with EWC and Laplace.

`powerprop run split-mnist --strategy all` leads here. The presets `cpu` follow the protocols with fewer epochs where
these would take hours, and with fewer methods; the presets `paper` are the protocols.
"""

from __future__ import annotations

from typing import Any

from powerprop.experiments.continual.baselines.arms import jobs
from powerprop.experiments.continual.baselines.config import Config
from powerprop.experiments.continual.baselines.report import Story, findings
from powerprop.experiments.continual.baselines.train import prepare, run_job
from powerprop.experiments.harness.experiment import Experiment

TABLE = "table of class-incremental learning, section 5.3"
SMALL: dict[str, Any] = {
    "seeds": 1,
    "tasks": 2,
    "images": 1_200,
    "validation": 200,
    "test": 100,
    "group": 16,
    "economy": True,
}


def table_experiment(name: str, title: str, paper: str, presets: dict[str, Config], story: Story) -> Experiment:
    """A table of methods on one benchmark."""
    return Experiment(
        name=name, title=title, paper=paper, presets=presets, prepare=prepare, jobs=jobs, run_job=run_job,
        report=lambda config, results, out: findings(config, results, out, story),
    )  # fmt: skip


SPLIT_MNIST = table_experiment(
    "split-mnist-strategies",
    "every method of continual learning on five tasks of two digits",
    TABLE,
    {
        "smoke": Config("split-mnist", epochs=0.5, width=16, **SMALL),
        "cpu": Config("split-mnist", epochs=4, seeds=3, economy=True, generator_steps=2_000, precision="bfloat16"),
        "paper": Config("split-mnist", epochs=4, seeds=10),
    },
    Story(
        "Split-MNIST: every method, every scenario",
        'Section 5.3.2, table "Class-incremental learning results", column Split-MNIST.',
        "Five tasks of two digits, learned one after the other in a network of 784-400-400 units by every method of "
        "the library. Task-incremental: a head for each task, and the task is given. Domain-incremental: first or "
        "second digit of the task, which is not given. Class-incremental: which of ten digits.",
    ),
)
PERMUTED_MNIST = table_experiment(
    "permuted-mnist-strategies",
    "every method of continual learning on ten orders of the pixels",
    TABLE,
    {
        "smoke": Config("permuted-mnist", epochs=0.2, width=16, strategy=("Naive", "SI", "EWC"), **SMALL),
        "cpu": Config(
            "permuted-mnist",
            epochs=2,
            seeds=3,
            strategy=("Naive", "EWC", "Laplace", "MAS", "SI"),
            powerprop=(),
            scenarios=("class-incremental",),
            strengths=(0.25, 0.5, 1.0, 2.0),
            si_strengths=(32.0, 64.0),
            tuning_seeds=3,
            test=2_000,
            economy=True,
            precision="bfloat16",
        ),
        "paper": Config("permuted-mnist", epochs=10, seeds=10),
    },
    Story(
        "Permuted-MNIST: every method, every scenario",
        'Section 5.3.2, table "Class-incremental learning results", column Permuted-MNIST.',
        "Ten tasks, each with the pixels in another order, learned one after the other in a network of 784-1000-1000 "
        "units. Task-incremental: a head for each task, and the task is given. Domain-incremental: which of ten "
        "digits. Class-incremental: which of a hundred, ten for each order.",
    ),
)
SPLIT_CIFAR100 = table_experiment(
    "split-cifar100-strategies",
    "every method of continual learning on ten tasks of ten classes",
    TABLE,
    {
        "smoke": Config("split-cifar100", epochs=0.1, strategy=("Naive", "GPM"), powerprop=(), **SMALL),
        "cpu": Config(
            "split-cifar100",
            epochs=3,
            seeds=1,
            test=2_000,
            validation=2_500,
            magnitude=0.02,
            alpha=1.75,
            economy=True,
            strategy=("Naive", "OWM", "AGEM", "EWC", "ER", "HAT", "GPM", "EfficientPackNet"),
        ),
        "paper": Config("split-cifar100", epochs=200, seeds=5, validation=2_500, magnitude=0.02, alpha=1.75),
    },
    Story(
        "Split-CIFAR100: every method, with a head for each task",
        'Section 5.3.2, table "Class-incremental learning results", column 10-task Split-CIFAR100.',
        "Ten tasks of ten classes in an AlexNet-like network with a head for each task, which is given, or found out "
        "(class-incremental: the surest of all heads, or the task that a method infers).",
    ),
)
PENALTIES: dict[str, Any] = {
    "strategy": ("EWC", "Laplace"),
    "powerprop": ("EWC", "Laplace"),
    "scenarios": ("task-incremental",),
}
POWERPROP_EWC = table_experiment(
    "powerprop-ewc",
    "EWC and Laplace with and without Powerpropagation, strengths and rates tuned for both",
    "section 5.2: Powerpropagation improves EWC and Laplace",
    {
        "smoke": Config(
            "permuted-mnist", epochs=0.2, width=16, strengths=(0.1, 1.0), rates=(1.0, 3.0), **PENALTIES, **SMALL
        ),
        "cpu": Config(
            "permuted-mnist",
            epochs=2,
            seeds=3,
            images=25_000,
            test=2_000,
            alpha=1.5,
            strengths=(0.01, 0.1, 1.0),
            rates=(3.0, 10.0, 30.0),
            precision="bfloat16",
            **PENALTIES,
        ),
        "paper": Config(
            "permuted-mnist",
            epochs=10,
            seeds=10,
            alpha=1.5,
            strengths=(0.01, 0.1, 1.0, 10.0),
            rates=(1.0, 3.0, 10.0),
            **PENALTIES,
        ),
    },
    Story(
        "Powerpropagation with EWC and Laplace",
        'Section 5.2, table "Deep generative models": Powerprop. + EWC and Powerprop. + Laplace improve on both; '
        "here on task-incremental Permuted-MNIST.",
        "Ten tasks, each with the pixels in another order, a head for each. The strength of the penalty and the "
        "learning rate are chosen on validation data for every row by itself.",
        twins=True,
    ),
)
