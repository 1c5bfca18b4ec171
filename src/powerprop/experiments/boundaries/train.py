"""Permuted-MNIST as one unbroken stream of batches: nobody says where a task ends and the next begins.

The paper (section 5.3) leaves this to change-point detection. A `BoundaryFinder` watches the loss of every batch that
arrives; beside it the same learner, on the same batches, is told. Tasks last a random number of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powerprop import data
from powerprop.continual import BoundaryFinder, ChangePointDetector, EfficientPackNet
from powerprop.continual.boundaries.finder import check_finding
from powerprop.continual.task import derived_seed
from powerprop.experiments.boundaries.measure import match, measure, overlaps
from powerprop.experiments.boundaries.report import ARMS, compose
from powerprop.experiments.continual import train as continual
from powerprop.experiments.harness.experiment import Experiment, Findings, Job, Results
from powerprop.experiments.harness.parallel import Progress
from powerprop.train import MetricsLog

LENGTHS, BATCHES = range(2)
"""Purposes of random numbers."""
HEARD_EVERY = 50


@dataclass(frozen=True)
class Config:
    """The settings of the experiment.

    Args:
        tasks: how many.
        shortest, longest: a task lasts any number of batches between them, drawn from the seed.
        alpha: the power of Powerpropagation.
        lr: learning rate.
        seeds: runs of each arm: first weights, order of pixels, lengths, batches.
        retrain_steps: after pruning, on what is kept of a task.
        gamma: fraction of the dense validation accuracy that a sub-network must keep.
        decay: let the learning rate fall to zero along these phases; of a stream only "retraining" has a known end.
        spread, clip, batch, width: as in the other continual-learning experiments.
        delay: batches that wait before they are trained on, and within which a change must be found.
        confirm: batches that a change must last.
        certainty: the probability from which on a change is believed.
        least: a task has at least so many batches.
        memory: batches that are kept of the current task, to pack it.
        images: only the last so many training images of the data are used; 0 means all.
        test: the first so many test images of a task are measured; 0 means all.
        group: so many test images have their task inferred together.
    """

    tasks: int
    shortest: int
    longest: int
    alpha: float
    lr: float
    seeds: int
    retrain_steps: int
    gamma: float
    decay: tuple[str, ...] = ("retraining",)
    spread: float = 0.5
    clip: float = 1.0
    batch: int = 64
    width: int = 1000
    delay: int = 5
    confirm: int = 3
    certainty: float = 0.9
    least: int = 100
    memory: int = 200
    images: int = 0
    test: int = 0
    group: int = 128

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"expected 1 <= shortest <= longest, got {self.shortest} and {self.longest}")
        if self.least > self.shortest:
            raise ValueError(f"least must be at most {self.shortest} (the shortest task), got {self.least}")
        if self.group < 1:
            raise ValueError(f"group must be at least 1, got {self.group}")
        check_finding(self.delay, self.confirm, self.certainty, self.least, self.memory)
        if 0 < self.images < self.batch:
            raise ValueError(f"images must be at least {self.batch} (the batch), or 0 for all, got {self.images}")
        learning(self)


def learning(config: Config) -> continual.Config:
    """The settings that this experiment shares with those whose tasks have boundaries."""
    return continual.Config(
        data="mnist", stream="permuted", tasks=config.tasks, alphas=(config.alpha,), lr=config.lr, seeds=config.seeds,
        steps=config.longest, retrain_steps=config.retrain_steps, gamma=config.gamma, scale_lr=False,
        decay=config.decay, spread=config.spread, clip=config.clip, batch=config.batch, width=config.width,
        search="binary", images=config.images, validation=0, test=config.test,
    )  # fmt: skip


PRESETS = {
    "smoke": Config(
        tasks=3, shortest=100, longest=140, alpha=1.5, lr=1.0, seeds=1, retrain_steps=10, gamma=0.5, width=64,
        least=40, memory=40, images=2_000, test=128, group=32,
    ),
    "cpu": Config(
        tasks=10, shortest=300, longest=600, alpha=1.5, lr=4.6, seeds=1, retrain_steps=200, gamma=0.9,
    ),
    "paper": Config(
        tasks=10, shortest=50_000, longest=50_000, alpha=1.5, lr=0.05, seeds=10, retrain_steps=50_000, gamma=0.9,
        decay=(), spread=1.0, memory=800,
    ),
}  # fmt: skip


def jobs(config: Config, results: Results) -> list[Job]:
    """Both arms from every seed."""
    return [Job(f"{arm}-seed{seed}", {"arm": arm, "seed": seed}) for seed in range(config.seeds) for arm in ARMS]


def prepare(config: Config) -> None:
    """Find the data, or download it."""
    continual.prepare(learning(config))


def run_job(config: Config, job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
    """Feed a learner the stream of a seed, then measure what it found and what it knows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings, seed = learning(config), job.settings["seed"]
    images = continual.load_images(settings)
    stream = continual.make_stream(settings, images.to(device), seed)
    arm = {"method": "efficient-packnet", "alpha": config.alpha, "seed": seed}
    learner = continual.make_learner(settings, arm, device)
    assert isinstance(learner, EfficientPackNet)
    lengths = task_lengths(config, seed)
    detector = Recorder()
    told = job.settings["arm"] == "told"
    finder = BoundaryFinder(
        learner, detector, delay=config.delay, confirm=config.confirm, certainty=config.certainty,
        least=sum(lengths) + 1 if told else config.least, memory=config.memory,
    )  # fmt: skip
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.rewind(0)  # a job that was stopped begins anew

        def heard(number: int, values: dict[str, float]) -> None:
            log.write(number, **values)
            progress(number / sum(lengths), values)

        found = feed(finder, detector, batches_of(config, stream, lengths, seed), told, heard)
    true = list(accumulate(lengths))[:-1]
    return {
        "note": images.note, "lengths": lengths, "true": true, "found": found,
        **match(true, [noticed for noticed, _ in found], config.delay)._asdict(),
        **measure(learner, stream, overlaps(lengths, [0, *(begun for _, begun in found)]), config.test, config.group),
        "losses": [round(loss, 4) for loss in detector.losses],
    }  # fmt: skip


class Recorder(ChangePointDetector):
    """The default detector, which also keeps all it was shown: the loss of every batch when it arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def update(self, x: float) -> Any:
        self.losses.append(x)
        return super().update(x)


def task_lengths(config: Config, seed: int) -> list[int]:
    """How many batches each task lasts."""
    generator = torch.Generator().manual_seed(derived_seed(seed, LENGTHS))
    return torch.randint(config.shortest, config.longest + 1, (config.tasks,), generator=generator).tolist()


def batches_of(
    config: Config, stream: data.Stream, lengths: Sequence[int], seed: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The unbroken stream, with the task of each batch for the arm that is told."""
    for task, length in zip(stream, lengths, strict=True):
        generator = torch.Generator().manual_seed(derived_seed(seed, BATCHES, task.index))
        batches = data.Batches(*task.train(), config.batch, generator)
        for _ in range(length):
            yield task.index, *next(batches)


def feed(
    finder: BoundaryFinder, detector: Recorder, batches: Iterator[tuple[int, Tensor, Tensor]], told: bool,
    heard: Callable[[int, dict[str, float]], None],
) -> list[tuple[int, int]]:  # fmt: skip
    """Show the finder every batch; returns where new tasks were noticed and with which batch they had begun."""
    found, before = [], 0
    for number, (task, x, y) in enumerate(batches):
        if told and task != before:
            finder.finish()
            found.append((number, number))
            before = task
        if finder.observe(x, y):
            found.append((number, number + 1 - finder.seen))
        if (number + 1) % HEARD_EVERY == 0:
            heard(number + 1, {"tasks": len(found) + 1, "loss": detector.losses[-1]})
    finder.finish()
    return found


def report(config: Config, results: Results, out: Path) -> Findings:
    """What both arms found, seed by seed."""
    runs = {arm: [results[job.key] for job in jobs(config, results) if job.settings["arm"] == arm] for arm in ARMS}
    return compose(config, runs, out)


EXPERIMENT = Experiment(
    name="unknown-boundaries",
    title="tasks whose boundaries are found, not told",
    paper="section 5.3 mentions change-point detection; no figure",
    config=Config,
    presets=PRESETS,
    prepare=prepare,
    jobs=jobs,
    run_job=run_job,
    report=report,
)
