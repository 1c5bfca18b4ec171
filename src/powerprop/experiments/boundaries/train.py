"""Permuted-MNIST as one unbroken stream of batches: nobody says where a task ends and the next begins.

The paper (section 5.3) leaves this to change-point detection. A `BoundaryFinder` watches the loss of every batch that
arrives; beside it the same learner, on the same batches, is told. Tasks last a random number of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powerprop import data
from powerprop.continual import BoundaryFinder, ChangePointDetector, EfficientPackNet
from powerprop.continual.seeds import derived_seed
from powerprop.experiments.boundaries.config import PRESETS, Config, learning
from powerprop.experiments.boundaries.measure import match, measure, overlaps
from powerprop.experiments.boundaries.report import ARMS, findings, read_runs
from powerprop.experiments.continual import train as continual
from powerprop.experiments.harness.experiment import Experiment, Findings, Job, Results
from powerprop.experiments.harness.parallel import Progress
from powerprop.train import MetricsLog
from powerprop.train.distributed import local_device
from powerprop.train.precision import products_in

LENGTHS, BATCHES = range(2)
"""Purposes of random numbers."""
HEARD_EVERY = 50


def jobs(config: Config, results: Results) -> list[Job]:
    """All arms from every seed."""
    return [Job(f"{arm}-seed{seed}", {"arm": arm, "seed": seed}) for seed in range(config.seeds) for arm in ARMS]


def prepare(config: Config) -> None:
    """Find the data, or download it."""
    continual.prepare(learning(config))


def run_job(config: Config, job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
    """Feed a learner the stream of a seed, then measure what it found and what it knows."""
    device = local_device()
    settings, seed = learning(config), job.settings["seed"]
    images = continual.load_images(settings)
    stream = continual.make_stream(settings, images.to(device), seed)
    method = "frugal-packnet" if job.settings["arm"] == "frugal" else "efficient-packnet"
    arm = {"method": method, "alpha": config.alpha, "seed": seed}
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

        with products_in(config.precision):
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
    """What the arms found, seed by seed."""
    return findings(config, read_runs(jobs(config, results), results), out)


EXPERIMENT = Experiment(
    name="unknown-boundaries",
    title="tasks whose boundaries are found, not told",
    paper="section 5.3 mentions change-point detection; no figure",
    presets=PRESETS, prepare=prepare, jobs=jobs, run_job=run_job, report=report,
)  # fmt: skip
