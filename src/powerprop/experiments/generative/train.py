"""One learner of ten characters: its training, task by task, and what is measured after each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from powerprop import data
from powerprop.continual import VCL, Packing, Strategy
from powerprop.experiments.continual.tasklog import TaskLog
from powerprop.experiments.generative.config import Config
from powerprop.experiments.generative.learner import load_images, make_learner, make_stream
from powerprop.experiments.generative.measure import draw, likelihoods, validation
from powerprop.experiments.harness.experiment import Job
from powerprop.experiments.harness.parallel import Progress
from powerprop.tensorfiles import write_tensors
from powerprop.train import MetricsLog, NonFiniteError
from powerprop.train.distributed import local_device
from powerprop.train.precision import products_in

CURVE, USED, SECONDS = "curve", "used", "seconds"
"""What a learner's records keep of the tasks that it knows."""
SAMPLES, SAMPLES_FORMAT = "samples.safetensors", "powerprop samples"


def prepare(config: Config) -> None:
    """Find the data, or download it, and refuse settings that it does not fit, before a job runs."""
    stream = make_stream(config, load_images(config), config.tasks)
    for task in stream:
        for what, part in (("training", task.train()), ("validation", task.validation()), ("test", task.test())):
            if not len(part.x):
                raise ValueError(f"{config.dataset}: no {what} image is of {task.name}; use more images")


def run_job(config: Config, job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
    """Learn the tasks, from the saved learner in the folder if there is one, and measure."""
    device, images = local_device(), load_images(config)
    tuning = job.settings["tuning"]
    stream = make_stream(config, images.to(device), config.tuning_tasks if tuning else config.tasks)
    learner = make_learner(config, job.settings, device)
    with MetricsLog(folder / "metrics.jsonl") as log:
        try:
            learn_all(config, learner, stream, folder / "learner.safetensors", log, progress, tuning)
        except NonFiniteError as error:
            return {"diverged": f"task {learner.current}: {error}", "note": images.note}
    if tuning:
        return {"validation": validation(learner, stream, config.test, config.curve_samples), "note": images.note}
    started = time.monotonic()
    final = likelihoods(learner, stream, config.test, config.samples)
    drawn = draw(learner, len(stream), config.shown)
    write_tensors(folder / SAMPLES, SAMPLES_FORMAT, {"drawn": drawn})
    return {
        CURVE: learner.records[CURVE], "final": final, USED: learner.records.get(USED),
        "memory_bytes": learner.memory_bytes(),
        SECONDS: sum(learner.records[SECONDS]) + time.monotonic() - started, "note": images.note,
    }  # fmt: skip


def learn_all(
    config: Config, learner: Strategy, stream: list[data.Task], checkpoint: Path, log: MetricsLog, progress: Progress,
    tuning: bool,
) -> None:  # fmt: skip
    """Every task that is left; the learner is saved after each, and goes on from there bit for bit."""
    if checkpoint.exists():
        learner.load(checkpoint)
    lines = TaskLog(log, learner, learner.steps)

    def heard(phase: str, step: int, loss: float) -> None:
        step = step if phase == "training" else learner.steps
        lines.write(step, loss=loss)
        progress((learner.current + step / learner.steps) / len(stream), {"task": learner.current + 1, "loss": loss})

    for task in stream[learner.current :]:
        started = time.monotonic()
        if isinstance(learner, VCL):
            learner.examples = len(task.train().x)
        with products_in(config.precision):
            learner.learn(task, heard)
        values = {} if tuning else note_task(config, learner, stream)
        learner.records.setdefault(SECONDS, []).append(time.monotonic() - started)
        lines.end_task(**values)
        learner.save(checkpoint)


def note_task(config: Config, learner: Strategy, stream: list[data.Task]) -> dict[str, float]:
    """Measure all tasks learned so far and keep it with the learner; returns what the log says of it."""
    row = likelihoods(learner, stream, config.test, config.curve_samples)
    learner.records.setdefault(CURVE, []).append(row)
    values = {"log_likelihood": sum(row) / len(row)}
    if isinstance(learner, Packing):
        learner.records.setdefault(USED, []).append(learner.used())
        values[USED] = learner.used()
    return values
