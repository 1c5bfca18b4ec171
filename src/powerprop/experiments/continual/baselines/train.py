"""One method on one benchmark: learn the stream, save after every task, measure in the scenarios asked for."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.optim import Optimizer

from powerprop import data
from powerprop.continual import STRATEGIES, Accuracies, Classification, Scenario, Strategy, accuracy_on, learn_stream
from powerprop.experiments.continual.baselines.config import Config
from powerprop.experiments.continual.baselines.network import build
from powerprop.experiments.continual.baselines.protocol import (
    HEADS,
    PROTOCOLS,
    STREAM,
    Plan,
    arguments,
    optimiser_of,
    outputs_of,
    steps_of,
    strength_of,
)
from powerprop.experiments.continual.baselines.published import CLASS
from powerprop.experiments.continual.tasklog import TaskLog
from powerprop.experiments.harness.experiment import Job
from powerprop.experiments.harness.parallel import Progress
from powerprop.experiments.harness.rates import equal_rate
from powerprop.train import MetricsLog, NonFiniteError
from powerprop.train.distributed import local_device
from powerprop.train.precision import products_in

SECONDS = "seconds"
"""Where a learner keeps how long its tasks took, one number each."""


def prepare(config: Config) -> None:
    """Find the data, and refuse settings that it does not fit, before a job runs."""
    load_images(config).split_validation(config.validation)


def run_job(config: Config, job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
    """Learn all tasks, from the saved learner in the folder if there is one, and measure."""
    with products_in(config.precision):
        return _run_job(config, job, folder, progress)


def _run_job(config: Config, job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
    device = local_device()
    images = load_images(config)
    stream = make_stream(config, images.to(device), job.settings["strategy"], job.settings["seed"])
    scenarios = outputs_of(config.benchmark, job.settings["strategy"], config.columns())[job.settings["outputs"]]
    learner = make_learner(config, job.settings, images, device)
    with MetricsLog(folder / "metrics.jsonl") as log:
        lines, started = TaskLog(log, learner, learner.steps), [time.monotonic()]

        def heard(phase: str, step: int, loss: float) -> None:
            step = step if phase == "training" else learner.steps
            lines.write(step, loss=loss)
            progress(
                (learner.current + step / learner.steps) / len(stream), {"task": learner.current + 1, "loss": loss}
            )

        def learned(task: data.Task) -> None:
            started.append(time.monotonic())
            learner.records.setdefault(SECONDS, []).append(started[-1] - started[-2])
            rows = learner.records["accuracies"]
            lines.end_task(**{each: Accuracies(each, rows[each]).average() for each in scenarios})

        try:
            found = learn_stream(
                learner, stream, scenarios, checkpoint=folder / "learner.safetensors", after_task=learned,
                progress=heard, **one_by_one(learner),
            )  # fmt: skip
        except NonFiniteError as error:
            return {"diverged": f"task {learner.current}: {error}", "note": images.note}
    return {
        "accuracies": {scenario: accuracies.rows for scenario, accuracies in found.items()},
        "validation": {each: validation(learner, stream, each) for each in scenarios if config.tunes()},
        "memory_bytes": learner.memory_bytes(),
        SECONDS: sum(learner.records[SECONDS]),
        "together": together(config, learner, stream) if CLASS in scenarios else None,
        "note": images.note,
    }


def load_images(config: Config) -> data.Images:
    """The data set, or the last part of its training images and the first of its test images."""
    images = data.load(PROTOCOLS[config.benchmark].data)
    last, first = slice(-config.images, None), slice(config.test or None)
    return data.Images(
        images.name, images.train_x[last], images.train_y[last], images.test_x[first], images.test_y[first],
        images.class_names, images.note,
    )  # fmt: skip


def make_stream(config: Config, images: data.Images, name: str, seed: int) -> list[data.Task]:
    """The tasks of a seed as a method sees them; their images are made when they are asked for."""
    protocol, transform = PROTOCOLS[config.benchmark], data.to_float
    if name not in protocol.steps:
        mean, std = data.mean_std(images.train_x)
        transform = partial(data.normalise, mean=mean, std=std)
    options: dict[str, Any] = {"validation": config.validation, "transform": transform}
    if protocol.stream == "permuted":
        stream = data.permuted(images, protocol.tasks, seed, **options)
    else:
        stream = data.split(images, images.classes // protocol.tasks, **options)
    return stream[: config.tasks or None]


def plan_of(config: Config, images: data.Images) -> Plan:
    """How long a task is trained, and on how many images."""
    protocol = PROTOCOLS[config.benchmark]
    examples = (len(images.train_x) - config.validation) // (protocol.tasks if protocol.stream == "split" else 1)
    steps = max(1, round(config.epochs * examples / protocol.batch))
    return Plan(config.tasks or protocol.tasks, steps, config.epochs, examples, config.width or protocol.width)


def make_learner(config: Config, settings: dict[str, Any], images: data.Images, device: torch.device) -> Strategy:
    """The learner of a job, with the first weights of its seed."""
    name, outputs, seed = settings["strategy"], settings["outputs"], settings["seed"]
    protocol, plan = PROTOCOLS[config.benchmark], plan_of(config, images)
    scenario = outputs_of(config.benchmark, name, config.columns())[outputs][0]
    generator_steps = config.generator_steps if config.economy else None
    plan = replace(plan, steps=steps_of(config.benchmark, name, scenario, plan.steps, generator_steps))
    own = arguments(config.benchmark, name, scenario, plan, config.economy)
    if settings["strength"] != 1:
        own["strength"] = settings["strength"] * strength_of(name, own)
    kind, lr = optimiser_of(config.benchmark, name)
    lr = equal_rate(settings["rate"] * lr, config.magnitude, settings["alpha"])

    def optimizer(params: Any) -> Optimizer:
        fused = device.type in ("cpu", "cuda")  # one pass over the weights: a third of the time of a step on a CPU
        return getattr(torch.optim, kind)(params, lr=lr, fused=fused)  # type: ignore[no-any-return]

    options = {
        "steps": plan.steps, "batch_size": protocol.batch, "seed": seed, "alpha": settings["alpha"],
        "objective": Classification("stream", among=protocol.among) if outputs == STREAM else Classification(),
        "heads": "heads" if outputs == HEADS else None, "carry": protocol.carry and STRATEGIES[name].carries, **own,
    }  # fmt: skip
    return STRATEGIES[name](build(config, name, outputs, images.classes, seed).to(device), optimizer, **options)


def infers(learner: Strategy) -> bool:
    """True if the learner finds out tasks, from one image or several."""
    return "group" in signature(learner.predict).parameters


def one_by_one(learner: Strategy) -> dict[str, Any]:
    """Arguments of `predict` by which every image is judged by itself, as other methods do."""
    return {"group": 1} if infers(learner) else {}


def validation(learner: Strategy, stream: list[data.Task], scenario: Scenario) -> float:
    """The average over all tasks on the images that choices are made on."""
    return fmean(accuracy_on(learner, task, scenario, part=task.validation(), **one_by_one(learner)) for task in stream)


def together(config: Config, learner: Strategy, stream: list[data.Task]) -> float | None:
    """Class-incremental accuracy with tasks inferred from groups of images; None where none are inferred."""
    if not infers(learner):
        return None
    return fmean(accuracy_on(learner, task, CLASS, group=config.group) for task in stream)
