"""The experiments of the paper, a file for each family, and what families share: training, choices, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from powerprop.continual import Scenario, Strategy, learn_stream
from powerprop.optim import Rate
from powerprop_paper import data
from powerprop_paper.report import Column, Table, Value
from powerprop_paper.run import Progress, Rows, RunError
from powerprop_paper.settings import Below1, Count, Natural, NonNegative, Seeds, Settings
from powerprop_paper.train import (
    MetricsLog,
    NonFiniteError,
    Precision,
    StepCount,
    TaskLog,
    accuracy_in,
    fit,
    local_device,
    matmul_precision,
)

C = TypeVar("C")
Columns = Iterable[tuple[str | Column, Callable[[Any], Value]]]


class Story(NamedTuple):
    """The words of a page.

    full: the settings of the paper, where a run is held against them.
    printed: what the paper reports: a sentence, or a benchmark and methods of its table of class-incremental learning.
    """

    title: str
    paper: str
    intro: str
    full: Any = None
    printed: Any = ""


@dataclass(frozen=True, kw_only=True)
class ImageSettings(Settings):
    """How networks are trained on images, and on which."""

    seeds: Seeds = 5
    """runs of each method with what was chosen for it"""
    steps: Count = 20_000
    """training steps"""
    batch: Count = 60
    """images per step"""
    rate: Rate = "matched"
    """of virtual targets; matched: the learning rate serves every power; paper: the update as printed"""
    nesterov: bool = False
    """look ahead along the momentum"""
    weight_decay: NonNegative = 0.0
    """of the optimiser"""
    label_smoothing: Below1 = 0.0
    """of the cross-entropy"""
    shift: Natural = 0
    """training images are moved by up to so many pixels, and half of them mirrored; 0 leaves them as they are"""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """of the forward and backward pass, and of the passes by which a training is watched"""
    train: Natural = 0
    """the first so many training images are trained on; 0 means all that are not held back"""
    validation: Count = 5_000
    """the last so many training images are for choices"""
    test: Natural = 0
    """the first so many test images are measured; 0 means all"""
    checkpoint_every: Count = 1_000
    """steps between checkpoints"""

    @property
    def tested(self) -> str:
        """The test images in words."""
        return f"the first {self.test:,} test images" if self.test else "all test images"


def train_images(
    cfg: ImageSettings, folder: Path, progress: Progress, model: nn.Module, optimizer: Optimizer, splits: data.Splits,
    seed: int, steps: int, convolutions: bool, **options: Any,
) -> None:  # fmt: skip
    """The same seed gives every network the same batches; accuracy on validation images is in the log."""
    precision = Precision(cfg.precision, local_device().type)
    augment = data.random_shift_flip(cfg.shift) if convolutions else None
    batches = data.Batches(*splits.train, cfg.batch, torch.Generator().manual_seed(seed), augment)
    fit_in(
        folder, progress, model, optimizer, batches, steps, checkpoint_every=cfg.checkpoint_every, precision=precision,
        loss=partial(cross_entropy, label_smoothing=cfg.label_smoothing), eval_every=cfg.checkpoint_every,
        evaluate=lambda model: {"accuracy": accuracy_in(precision, model, splits.validation)}, **options,
    )  # fmt: skip


def fit_in(
    folder: Path, progress: Progress, model: nn.Module, optimizer: Optimizer, batches: Any, steps: int, **options: Any
) -> None:
    """`fit` with log and checkpoint in the folder of a job, from where it goes on."""
    with MetricsLog(folder / "metrics.jsonl") as log:
        fit(
            model, optimizer, batches, steps, checkpoint=folder / "checkpoint.pt", log=log,
            progress=lambda step, values: progress(step / steps, {"step": step, **values}), **options,
        )  # fmt: skip


def learn_tasks(
    folder: Path, progress: Progress, learner: Strategy, stream: Sequence[data.Task], steps: int,
    after_task: Callable[[data.Task], dict[str, float]], scenarios: Sequence[Scenario] = (), precision: str = "float32",
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """`learn_stream` with log and checkpoint in the folder of a job, from where it goes on; the learner's records.

    steps: of one task, all its phases together.
    after_task: measures; what it returns is logged and shown.
    precision: of the factors in products of matrices.
    """
    with matmul_precision(precision), MetricsLog(folder / "metrics.jsonl") as file:
        log, count, shown = TaskLog(file, learner, steps), StepCount(), dict[str, float]()

        def on_step(phase: str, step: int, loss: float) -> None:
            done = count.after(phase, step)
            log.write(done, loss=loss)
            progress(
                (learner.current + done / steps) / len(stream), {"task": learner.current + 1, "loss": loss, **shown}
            )

        def ended(task: data.Task) -> None:
            shown.update(after_task(task))
            log.end_task(**shown)

        try:
            learn_stream(
                learner, stream, scenarios, checkpoint=folder / "learner.safetensors", after_task=ended,
                progress=on_step, **options,
            )  # fmt: skip
        except NonFiniteError as error:
            raise NonFiniteError(f"task {learner.current}: {error}") from None
        return log.other_records()


def best(
    what: str, tried: Mapping[C, Rows], score: Callable[[Rows], float], *, dense: Callable[[Rows], float] | None = None,
    tolerance: float = 0.0, top: float | None = None,
) -> C:  # fmt: skip
    """The candidate with the highest score among those whose dense score is within `tolerance` of the best dense one.

    One with a run that diverged is passed over; with one candidate there is no choice, and nothing need be tried.
    top: the best dense score of a whole table, in place of that of these candidates; if none is near it, the best dense
        one is taken.
    """
    if len(tried) == 1:
        return next(iter(tried))
    whole = {each: rows for each, rows in tried.items() if rows and not rows.lost}
    if not whole:
        raise RunError(f"{what} diverged with everything that was tried: {', '.join(map(str, tried))}")
    if dense is not None:
        known = {each: dense(rows) for each, rows in whole.items()}
        own = max(known.values())
        limit = min(own, (own if top is None else top) - tolerance)
        whole = {each: rows for each, rows in whole.items() if known[each] >= limit}
    return max(whole, key=lambda each: score(whole[each]))


def table(title: str, columns: Columns, items: Iterable[Any], caption: str = "") -> Table:
    """A row for each item; a column is its heading, and a function that gives what it shows of an item."""
    columns = list(columns)
    return Table(title, [name for name, _ in columns], [[of(each) for _, of in columns] for each in items], caption)


def lost_runs(rows: Rows, name: Callable[[Mapping[str, Any]], str]) -> list[str]:
    """Which trainings left the finite numbers, and how: `EWC, seed 0: the loss is nan`."""
    return [f"{name(row)}, seed {row['seed']}: {row['diverged']}" for row in rows if "diverged" in row]


def listed(values: Sequence[float]) -> str:
    """`0.1, 0.2`."""
    return ", ".join(f"{each:g}" for each in values)
