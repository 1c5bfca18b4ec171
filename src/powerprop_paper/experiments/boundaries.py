"""Permuted-MNIST as one unbroken stream of batches: nobody says where a task ends and the next begins.

The paper (section 5.3) leaves this to change-point detection. A `BoundaryFinder` watches the loss of every batch that
arrives; beside it the same learner, on the same batches, is told. Tasks last a random number of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from powerprop.continual import BoundaryFinder, ChangePointDetector, Packing
from powerprop.continual.boundaries import check_finding
from powerprop.continual.data import derived_seed
from powerprop_paper import data
from powerprop_paper.experiments import Columns, lost_runs, split, table
from powerprop_paper.packing import PackingSettings, fraction, make_learner, make_stream
from powerprop_paper.pages import Column, Figure, Headline, Page, Percent, Section, Stat, Table
from powerprop_paper.report import Curve, Mean, lines
from powerprop_paper.run import Experiment, Progress, Row, Rows, Run, RunError
from powerprop_paper.settings import Count, Natural, Positive, Power, Share, require
from powerprop_paper.train import MetricsLog, local_device, matmul_precision, precision_note

METHODS = {"found": "boundaries found", "told": "boundaries told", "frugal": "boundaries found, packed frugally"}
"""How a learner gets to know of boundaries, and how it packs."""
DELAY, CONFIRM, CERTAINTY = 5, 3, 0.9
"""Batches that wait before they are trained on, and within which a change must be found; batches that a change must
last; the probability from which on it is believed."""
BATCH, CLIP = 64, 1.0
"""Images per batch, and the largest norm of a gradient."""
LENGTHS, BATCHES = range(2)
"""Purposes of random numbers."""
LOG_EVERY = 50
AROUND = 20
"""Batches before and after a change in the figure of the average change."""


@dataclass(frozen=True, kw_only=True)
class Config(PackingSettings):
    """The settings of the experiment without told boundaries."""

    shortest: Count
    """a task lasts any number of batches from this one to the longest, drawn from the seed"""
    longest: Count
    """the most batches of a task"""
    alpha: Power = 1.5
    """the power of Powerprop"""
    frugal_gamma: Share = 0.96
    """the gamma of the learner that packs frugally"""
    decay: tuple[Literal["training", "retraining"], ...] = ("retraining",)
    """let the learning rate fall to zero along these phases; of a stream only retraining has a known end"""
    init_scale: Positive = 0.5
    """the standard deviation of the first weights, and of those that are initialised again, in units of Glorot's"""
    min_length: Count = 100
    """a task has at least so many batches"""
    memory: Count = 200
    """batches that are kept of the current task, to pack it"""
    test: Natural = 0
    """the first so many test images of a task are measured; 0 means all"""
    group: Count = 128
    """so many test images have their task inferred together"""
    matmul_precision: Literal["float32", "bfloat16"] = "float32"
    """of the factors in products of matrices; all else is float32"""

    def __post_init__(self) -> None:
        super().__post_init__()
        shortest, longest = self.shortest, self.longest
        require(shortest <= longest, f"expected shortest <= longest, got {shortest} and {longest}")
        fits = self.min_length <= shortest
        require(fits, f"min_length must be at most {shortest} (the shortest task), got {self.min_length}")
        check_finding(DELAY, CONFIRM, CERTAINTY, self.min_length, self.memory)
        fits = self.images == 0 or self.images >= BATCH
        require(fits, f"images must be at least {BATCH} (the batch), or 0 for all, got {self.images}")
        self.told()

    def told(self) -> split.Config:
        """The settings of the same learner where tasks have boundaries."""
        common = {each.name: getattr(self, each.name) for each in fields(PackingSettings)}
        return split.Config(
            **common, alphas=(self.alpha,), steps=self.longest, decay=self.decay, clip=CLIP,
            init_scale=self.init_scale, batch=BATCH, search="binary", validation=0, frugal_gamma=self.frugal_gamma,
            methods=("efficient-packnet", "frugal-packnet"), precision=self.matmul_precision,
        )  # fmt: skip


PRESETS = {
    "smoke": Config(
        tasks=3, shortest=100, longest=140, lr=1.0, seeds=1, retrain_steps=10, gamma=0.5, width=64, frugal_gamma=0.5,
        prunings=1, pruning_steps=5, min_length=40, memory=40, images=2_000, test=128, group=32,
    ),
    "cpu": Config(
        tasks=10, shortest=300, longest=600, lr=1.0, seeds=2, retrain_steps=200, gamma=0.9, prunings=2,
        pruning_steps=50, matmul_precision="bfloat16",
    ),
    "paper": Config(
        tasks=10, shortest=50_000, longest=50_000, lr=0.05, seeds=10, retrain_steps=50_000, gamma=0.9, prunings=2,
        pruning_steps=50, rate="paper", decay=(), init_scale=1.0, memory=800,
    ),
}  # fmt: skip


# One job: feed a learner the stream of a seed, then measure what it found and what it knows.


def learn(cfg: Config, folder: Path, progress: Progress, method: str, seed: int) -> dict[str, Any]:
    """A job that was stopped begins anew."""
    device, told, told_cfg = local_device(), method == "told", cfg.told()
    images = data.load_last("mnist", cfg.images)
    stream = make_stream("permuted", images.to(device), cfg.tasks, seed, validation=0)
    packing = "frugal-packnet" if method == "frugal" else "efficient-packnet"
    learner = make_learner(told_cfg, packing, cfg.alpha, seed, device)
    lengths, detector = task_lengths(cfg, seed), Recorder()
    finder = BoundaryFinder(
        learner, detector, delay=DELAY, confirm=CONFIRM, certainty=CERTAINTY, memory=cfg.memory,
        least=sum(lengths) + 1 if told else cfg.min_length,
    )  # fmt: skip
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.rewind(0)

        def on_step(number: int, values: dict[str, float]) -> None:
            log.write(number, **values)
            progress(number / sum(lengths), values)

        with matmul_precision(cfg.matmul_precision):
            found = feed(finder, detector, batches_of(stream, lengths, seed), told, on_step)
    true = list(accumulate(lengths))[:-1]
    shared = overlaps(lengths, [0, *(begun for _, begun in found)])
    return {
        "note": images.note, "lengths": lengths, "true": true, "found": found,
        **match(true, [noticed for noticed, _ in found], DELAY)._asdict(),
        **measure(learner, stream, shared, cfg.test, cfg.group),
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


def task_lengths(cfg: Config, seed: int) -> list[int]:
    """How many batches each task lasts."""
    generator = torch.Generator().manual_seed(derived_seed(seed, LENGTHS))
    return torch.randint(cfg.shortest, cfg.longest + 1, (cfg.tasks,), generator=generator).tolist()


def batches_of(stream: data.Stream, lengths: Sequence[int], seed: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The unbroken stream, with the task of each batch for the learner that is told."""
    for task, length in zip(stream, lengths, strict=True):
        generator = torch.Generator().manual_seed(derived_seed(seed, BATCHES, task.index))
        batches = data.Batches(*task.train(), BATCH, generator)
        for _ in range(length):
            yield task.index, *next(batches)


def feed(
    finder: BoundaryFinder, detector: Recorder, batches: Iterator[tuple[int, Tensor, Tensor]], told: bool,
    on_step: Callable[[int, dict[str, float]], None],
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
        if (number + 1) % LOG_EVERY == 0:
            on_step(number + 1, {"tasks": len(found) + 1, "loss": detector.losses[-1]})
    finder.finish()
    return found


class Match(NamedTuple):
    """Which changes were found: delays of those found, those missed, and alarms where nothing changed."""

    delays: list[int]
    missed: list[int]
    false: list[int]


def match(true: Sequence[int], found: Sequence[int], delay: int) -> Match:
    """A change counts as found by the first alarm from its first batch to `delay` batches later."""
    left, delays, missed = list(found), [], []
    for change in true:
        hit = next((alarm for alarm in left if change <= alarm <= change + delay), None)
        if hit is None:
            missed.append(change)
        else:
            delays.append(hit - change)
            left.remove(hit)
    return Match(delays, missed, left)


def overlaps(lengths: Sequence[int], starts: Sequence[int]) -> Tensor:
    """(true tasks, found tasks): the number of batches that they share, for found tasks with these first batches."""
    ends = torch.tensor(list(accumulate(lengths)))
    begins, first = ends - torch.tensor(lengths), torch.tensor(starts)
    last = torch.cat([first[1:], ends[-1:]])
    return (torch.minimum(ends[:, None], last) - torch.maximum(begins[:, None], first)).clamp(min=0)


def measure(learner: Packing, stream: data.Stream, shared: Tensor, test: int, group: int) -> dict[str, Any]:
    """Accuracy on every true task: with the found task that shares most batches with it, and with the task inferred.

    An inferred task is right if, of all true tasks, it shares most batches with the one the images are of.

    shared: (true tasks, found tasks), see `overlaps`.
    """
    matched, owner = shared.argmax(1).tolist(), shared.argmax(0)
    given, inferred = [], []
    for task in stream:
        x, y = data.first(task.test(), test)
        given.append(fraction(learner.predict(x, matched[task.index]).label == y))
        guess = learner.predict(x, group=group)
        inferred.append(fraction((owner.to(guess.task.device)[guess.task] == task.index) & (guess.label == y)))
    return {"matched": matched, "given": given, "inferred": inferred, "used": learner.nets.masks.used()}


# The page.


def main(cfg: Config, run: Run) -> Page:
    """All ways from every seed, and the loss with its change points."""
    run.prepare(lambda: data.load_last("mnist", cfg.images))
    rows = run.map(learn, [{"method": method, "seed": seed} for seed in range(cfg.seeds) for method in METHODS])
    if any("diverged" in row for row in rows):
        raise RunError("; ".join(lost_runs(rows, lambda row: f"boundaries {row['method']}")))
    runs = {method: rows.where(method=method).finished for method in METHODS}
    span = f"{cfg.shortest:,}" if cfg.shortest == cfg.longest else f"{cfg.shortest:,} to {cfg.longest:,}"
    intro = (
        "Ten digits, the pixels of every task in an order of its own, in one unbroken stream of batches. One learner "
        "finds out by itself when the task changes, packs what it has learned and begins a new task; another, on the "
        "same batches, is told; a third finds out too and packs frugally.\n\n"
        f"This run: {cfg.tasks} tasks of {span} batches of {BATCH} images, Powerprop + EPN, "
        f"α = {cfg.alpha:g}, γ = {cfg.gamma:g}, {cfg.retrain_steps:,} retraining steps on the latest "
        f"{cfg.memory:,} batches, {cfg.runs}. Packed frugally: γ = {cfg.frugal_gamma:g}, pruned at most "
        f"{cfg.prunings} times more, {cfg.pruning_steps} steps apart, reusing the output layer of earlier tasks "
        f"alone.{''.join(f' {each}.' for each in precision_note(cfg.matmul_precision))} {rows.notes}"
    )
    return Page(
        "Permuted-MNIST without task boundaries", intro.strip(),
        [changes_section(cfg, runs["found"]), accuracy_section(cfg, runs)],
        "Section 5.3 mentions change-point detection as the way to do without task boundaries; it shows no numbers.",
        *verdict_of(runs),
    )  # fmt: skip


def changes_section(cfg: Config, rows: Rows) -> Section:
    """The stream of the first seed, and the average change."""
    first = rows[0]
    whole = Curve("loss", cfg.alpha, range(len(first["losses"])), first["losses"])
    changes = (first["true"], [noticed for noticed, _ in first["found"]])
    look: dict[str, Any] = {"ylabel": "cross-entropy", "wide": True}
    title = "Loss of each batch when it arrives"
    pictures = [Figure("stream", lines, [whole], title=title, xlabel="batch", changes=changes, **look)]
    if windows := around_changes(rows):
        mean = Curve("loss", cfg.alpha, range(-AROUND, AROUND + 1), windows)
        title, xlabel = "The average change", "batches after the change"
        pictures.append(Figure("change", lines, [mean], title=title, xlabel=xlabel, **look))
    begun = [start in row["true"] for row in rows for _, start in row["found"]]
    text = (
        "The first seed: dashed lines are the true changes, triangles the batches at which they were noticed. A change "
        f"must be certain, upwards and last {CONFIRM} batches; the batches that wait meanwhile are trained on as part "
        f"of the task they belong to. Of {len(begun)} alarms, {sum(begun)} named the very first batch of the new task. "
        "The average change is one over all changes and seeds."
    )
    return Section("Change points", text, pictures)


def around_changes(rows: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """The losses around every true change that has enough of them on both sides."""
    places = [(row["losses"], change) for row in rows for change in row["true"]]
    windows = [losses[max(0, change - AROUND) : change + AROUND + 1] for losses, change in places]
    return [window for window in windows if len(window) == 2 * AROUND + 1]


def accuracy_section(cfg: Config, runs: Mapping[str, Rows]) -> Section:
    """What the tasks are worth."""
    text = (
        "The learner that is told packs a task when its last batch has been trained on. The one that packs frugally "
        "prunes gradually and leaves the hidden weights of earlier tasks out while a new one is trained. Everything "
        "else is the same: first weights, batches, and the batches kept for packing."
    )
    return Section("Found, told and packed frugally", text, tables=[main_table(cfg, runs)])


def main_table(cfg: Config, runs: Mapping[str, Rows]) -> Table:
    """One row for each way; where boundaries were told, no number says how well they were found."""

    def count(of: Callable[[Row], float | None]) -> Callable[[str], Mean | None]:
        def value(method: str) -> Mean | None:
            found = [each for row in runs[method] if (each := of(row)) is not None]
            return Mean.of(found) if found and method != "told" else None

        return value

    columns: Columns = [
        ("", METHODS.get),
        (Column(f"found, of {cfg.tasks - 1}", digits=1), count(lambda row: len(row["delays"]))),
        (Column("missed", digits=1), count(lambda row: len(row["missed"]))),
        (Column("false alarms", digits=1), count(lambda row: len(row["false"]))),
        (Column("delay, batches", digits=1), count(lambda row: fmean(row["delays"]) if row["delays"] else None)),
        (Percent("task-incremental", "max", 2), lambda method: accuracy(runs[method], "given")),
        (Percent(f"class-incremental, {cfg.group} images", "max", 2), lambda name: accuracy(runs[name], "inferred")),
        (Percent("weights used", "min"), lambda method: runs[method].mean("used")),
    ]  # fmt: skip
    caption = (
        f"A change counts as found if it is noticed within {DELAY} batches. The delay is the number of batches "
        "of the new task before the one that revealed it. Average test accuracy over all true tasks after the stream, "
        "in percent. Task-incremental: with the found task that shares most batches with the "
        "true one. Class-incremental: the task is inferred from so many images, and must be right."
    )
    return table("Boundaries and accuracy", columns, METHODS, caption)


def accuracy(rows: Rows, how: str) -> Mean:
    """The average over all tasks, the task "given" or "inferred"."""
    return Mean.of(rows.values(lambda row: fmean(row[how])))


def verdict_of(runs: Mapping[str, Rows]) -> tuple[list[Stat], Headline]:
    """The numbers at the top; changes found, and the accuracy that this costs nothing of."""
    changes, found, false = (sum(map(len, runs["found"].values(what))) for what in ("true", "delays", "false"))
    ours, told, frugal = ([accuracy(runs[method], how).mean for how in ("given", "inferred")] for method in METHODS)
    stats = [
        Stat("changes found", f"{found} of {changes}", f"{false} false alarms"),
        Stat("task-incremental", f"{ours[0]:.2%}", f"{told[0]:.2%} with boundaries told"),
        Stat("class-incremental", f"{ours[1]:.2%}", f"{told[1]:.2%} with boundaries told"),
        Stat("packed frugally", f"{frugal[0]:.2%}", f"with {fmean(runs['frugal'].values('used')):.1%} of the weights"),
    ]
    what = "changes of task found; task-incremental accuracy, in brackets with boundaries told"
    here = f"{found} of {changes}, {false} false alarms; {100 * ours[0]:.2f} ({100 * told[0]:.2f})"
    return stats, Headline(what, here, "no numbers")


EXPERIMENTS = {
    "unknown-boundaries": Experiment(
        "unknown-boundaries", "tasks whose boundaries are found, not told",
        "section 5.3 mentions change-point detection; no figure", PRESETS, main,
    )
}  # fmt: skip
