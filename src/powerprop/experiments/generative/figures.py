"""The figures of continual generative modelling: likelihoods task by task, and what is left of every character."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from powerprop.experiments.generative.config import Config
from powerprop.experiments.generative.learner import load_images, make_stream
from powerprop.experiments.generative.measure import some
from powerprop.experiments.generative.measured import Measured
from powerprop.experiments.generative.train import SAMPLES, SAMPLES_FORMAT
from powerprop.report import Curve, Grid, Image, image_grids, lines, panels
from powerprop.report.labels import Array
from powerprop.tensorfiles import read_tensors

SIDE = 28
SPANS = {"mnist": 40.0, "notmnist": 80.0}
"""Nats below the best that a panel shows."""


def names(config: Config) -> list[str]:
    """What the characters are called."""
    return list("ABCDEFGHIJ" if config.dataset == "notmnist" else "0123456789")[: config.tasks]


def figure_of_averages(config: Config, measured: Sequence[Measured], figures: Path) -> Image:
    """The average over the tasks so far; without naive training, beside which all others are one line."""
    shown = [m for m in measured if m.runs and m.arm.strategy != "Naive"] or [m for m in measured if m.runs]
    curves = [_curve(m, [[fmean(row) for row in run.curve] for run in m.runs], 1) for m in shown]
    caption = "Naive training is left out: beside it all others would be one line; its numbers are in the table."
    return lines(
        curves, figures / "average.svg", "Average over all tasks so far", "tasks learned", "test log-likelihood (nats)",
        wide=True, caption=caption if len(shown) < len(measured) else "",
    )  # fmt: skip


def figure_of_tasks(config: Config, measured: Sequence[Measured], figures: Path) -> Image:
    """A panel for each task: its likelihood from the moment it was learned (appendix C of the paper)."""
    shown = [m for m in measured if m.runs]
    found = {
        f"task {task + 1}: {name}": [_curve(m, [_of_task(run.curve, task) for run in m.runs], task + 1) for m in shown]
        for task, name in enumerate(names(config))
    }
    span = SPANS[config.dataset]
    caption = f"Each panel shows {span:g} nats below its best value; methods that forget more leave it."
    return panels(
        found, figures / "tasks.svg", "Every task, from when it was learned", "tasks learned", "log-likelihood", span,
        caption,
    )  # fmt: skip


def _of_task(curve: list[list[float]], task: int) -> list[float]:
    return [row[task] for row in curve[task:]]


def _curve(m: Measured, values: list[list[float]], first: int) -> Curve:
    x = range(first, first + len(values[0]))
    return Curve(m.arm.label, None, list(x), values, method=m.arm.strategy, plain=not m.arm.powerprop)


def figure_of_samples(config: Config, measured: Sequence[Measured], out: Path) -> Image:
    """What each method draws of every character after the last task, from the same noise; test images beside them."""
    stream = make_stream(config, load_images(config), config.tasks)
    real = torch.stack([some(task.test(), config.shown, task.index).flatten(1) for task in stream])
    grids = [Grid("test images", _squares(real), "for comparison")]
    for m in measured:
        if m.runs:
            drawn = read_tensors(out / "jobs" / m.keys[0] / SAMPLES, SAMPLES_FORMAT)[0]["drawn"]
            grids.append(Grid(m.arm.label, _squares(drawn / 255), f"{fmean(m.runs[0].final):.1f} nats"))
    caption = (
        "Means of p(x|z), the same z for every method, first seed. A row is a task; the last one was learned last."
    )
    path = out / "figures" / "samples.svg"
    return image_grids(grids, names(config), path, "What is left of every character", caption=caption)


def _squares(images: Tensor) -> Array:
    return np.asarray(images.reshape(*images.shape[:2], SIDE, SIDE), np.float64)
