"""Sparse ResNet-50 on ImageNet: tables 1 and 2, the extreme-sparsity figure and figure 3 b and c of the paper.

The protocol is the paper's (section 5.2, appendix C and its table of hyper-parameters): SGD with Nesterov momentum 0.9,
label smoothing 0.1, weight decay 1e-4, 32,000 steps of 4,096 pictures over all ranks, η = η_b·4096/256, five epochs of
linear warm-up, drops by ten after epochs 30, 70 and 90; extended training stretches all of it. Readings of what the
paper leaves open are in docs/imagenet.md. `torchrun --nproc-per-node 8 -m powerprop run imagenet --preset paper` trains
on the GPUs of a machine. The preset `cpu` sends ten classes of Tiny ImageNet, 64x64, through the same code: it shows
that the pipeline works and how the methods compare there, nothing about ImageNet's accuracies.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import powerprop as pp
from powerprop.eval_mode import evaluating
from powerprop.files import replacing
from powerprop.select import select
from powerprop_paper import data, models
from powerprop_paper.data.imagenet import PictureBatches, Pictures, evaluation_batches, find_pictures
from powerprop_paper.experiments import Columns, lost_runs, table
from powerprop_paper.experiments.imagenet import cells as tables
from powerprop_paper.experiments.imagenet.cells import STEPS, TABLE_1, TABLE_2, Cell, Costs, chosen, read_cell
from powerprop_paper.pages import Column, Figure, Headline, Page, Percent, Section, Stat, Table, Value
from powerprop_paper.pruning import kept_grid, weights_of
from powerprop_paper.report import Curve, Mean, density, lines, pruning_curves
from powerprop_paper.run import Experiment, Progress, Rows, Run
from powerprop_paper.settings import Count, Natural, Range, Seeds, Settings, require
from powerprop_paper.sparse_methods import METHODS
from powerprop_paper.train import MetricsLog, Precision, Score, fit, local_device, read_metrics
from powerprop_paper.train.distributed import current_ranks

MODELS: dict[str, Any] = {"resnet18": models.resnet18, "resnet50": models.resnet50}
EPOCHS = STEPS * 4_096 / 1_281_167
"""The epochs of a single cycle, 102.3; the learning-rate schedule counts in them, also in shortened runs."""
WARMUP, DROPS = 5.0, (30.0, 70.0, 90.0)
"""Epochs in which the learning rate rises to its full value, and those after which it falls to a tenth."""
MOMENTUM, WEIGHT_DECAY, SMOOTHING = 0.9, 1e-4, 0.1
MIN_KEPT = 0.03
"""The smallest fraction kept in one-shot pruning."""
SMALLEST = 100_000
"""How many of the smallest weights figure 3c shows."""


@dataclass(frozen=True)
class Config(Settings):
    """The settings of an ImageNet run."""

    data: str
    """name of the picture set's folder, with train and val in it"""
    cells: tuple[str, ...]
    """the trainings, such as "dense" or "rigl erk 0.9 x5" """
    alphas: tuple[Annotated[float, Range(1, above=True)], ...]
    """powers of the one-shot figure; its baseline is "dense" """
    seeds: Seeds
    """runs of each"""
    only: tuple[str, ...] = ()
    """patterns of the trainings to run instead of all, where * stands for anything: "rigl * 0.9" """
    model: Literal["resnet18", "resnet50"] = "resnet50"
    """network"""
    width: Count = 64
    """channels of the first stage, a multiple of 8 (channels-last convolutions of 4 channels crash on a CPU)"""
    classes: Annotated[int, Range(2)] = 1_000
    """of the data"""
    crop: Count = 224
    """side of the square that the network sees"""
    resize: Count = 256
    """shorter side of the picture before the middle is cropped in evaluation"""
    steps: Count = STEPS
    """of a cycle of training"""
    batch: Count = 4_096
    """pictures per step, over all ranks"""
    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """of the forward and backward pass"""
    loaders: Natural = 8
    """worker processes of each rank that decode pictures; with them jobs run in turn, not side by side"""
    points: Annotated[int, Range(2)] = 16
    """size of the grid of fractions kept after one-shot pruning, evenly spaced on a log scale up to 1"""
    recalibrate: Count = 10
    """training batches that batch norms are measured on after one-shot pruning"""
    evaluations: Count = 20
    """how often accuracy is measured in a training"""
    checkpoint_every: Count = 1_000
    """steps between checkpoints"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.width % 8 == 0, f"width must be a multiple of 8, got {self.width}")
        require(self.crop <= self.resize, f"crop must be at most {self.resize}, the resize, got {self.crop}")
        names = ", ".join(each.name for each in chosen(self.cells, self.alphas, ()))
        require(self.trainings, f"only={self.only} matches none of the trainings: {names}")

    @property
    def trainings(self) -> list[Cell]:
        """The trainings that are asked for."""
        return chosen(self.cells, self.alphas, self.only)

    def length(self, this: Cell) -> int:
        """The steps of a cell."""
        return round(self.steps * this.times)

    @property
    def comparable(self) -> bool:
        """True if the run is the paper's, so that its numbers may be held against the printed ones."""
        return (self.data, self.model, self.width, self.crop) == ("imagenet", "resnet50", 64, 224)


TINY = Config(
    data="tiny-imagenet-10", cells=("dense",), alphas=(1.375,), seeds=1, model="resnet18", width=16, classes=10,
    crop=64, resize=64, batch=64, precision="float32", loaders=0, recalibrate=4, evaluations=8, checkpoint_every=100,
)  # fmt: skip
PRESETS = {
    "smoke": replace(
        TINY, cells=("dense", "rigl uniform 0.9", "pp-iterative uniform 0.9", "pp-topkast-0 erk 0.9 x2"), width=8,
        crop=32, resize=32, steps=6, batch=8, points=3, recalibrate=1, evaluations=2, checkpoint_every=2,
    ),
    "cpu": replace(
        TINY,
        cells=(
            "dense", "rigl uniform 0.9", "iterative uniform 0.9", "pp-iterative uniform 0.9", "topkast-0 uniform 0.9",
            "pp-topkast-0 uniform 0.9",
        ),
        steps=600, points=12,
    ),
    "paper": Config(data="imagenet", cells=tables.ALL_CELLS, alphas=tables.ONESHOT_ALPHAS, seeds=3),
}  # fmt: skip


# One job: train a cell, on all ranks if there are several, and measure it.


def find_data(cfg: Config) -> None:
    """Find the pictures, or download those sets that can be."""
    try:
        pictures(cfg)
    except data.DataNotFound:
        if cfg.data not in data.LOADERS:
            raise
        data.load(cfg.data)


def pictures(cfg: Config) -> tuple[Pictures, Pictures]:
    """Training and validation pictures, whose labels fit the network."""
    train, val = find_pictures(cfg.data)
    if (most := int(train.labels.max())) >= cfg.classes:
        raise ValueError(f"{cfg.data} has a label {most}, but the network has {cfg.classes} classes")
    return train, val


def train(cfg: Config, folder: Path, progress: Progress, cell: str, seed: int) -> dict[str, Any]:
    """The same seed gives every cell the same batches."""
    this, ranks, device = read_cell(cell), current_ranks(), local_device()
    model = build(cfg, this, seed).to(device)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer, steps = make_optimizer(cfg, this, seed, model), cfg.length(this)
    shown, val = pictures(cfg)
    batches = PictureBatches(shown, cfg.batch, cfg.crop, seed, device=device, ranks=ranks, loaders=cfg.loaders)
    with MetricsLog(folder / "metrics.jsonl") if ranks.main else nullcontext() as log:
        fit(
            model, optimizer, batches, steps, loss=partial(cross_entropy, label_smoothing=SMOOTHING),
            schedule=lambda step: rate_factor(step, steps), checkpoint=folder / "checkpoint.pt",
            checkpoint_every=cfg.checkpoint_every, log=log,
            evaluate=lambda model: {"accuracy": score(cfg, model, val).accuracy},
            eval_every=max(1, steps // cfg.evaluations),
            progress=lambda step, values: progress(step / steps, {"step": step, **values}),
            precision=Precision(cfg.precision, device.type), ranks=ranks,
        )  # fmt: skip
    return measure(cfg, this, model, shown, val, folder)


def build(cfg: Config, this: Cell, seed: int) -> nn.Module:
    """The network of a cell; the same seed gives every cell the same weights, but for a last layer of zeros."""
    generator = torch.Generator().manual_seed(seed)
    make = MODELS[cfg.model]
    model: nn.Module = make(cfg.classes, width=cfg.width, zero_init_last=this.zero_last, generator=generator)
    return model


def make_optimizer(cfg: Config, this: Cell, seed: int, model: nn.Module) -> pp.Powerprop:
    """SGD with Nesterov momentum at η = η_b·batch/256, the cell's method and its α.

    Weight decay acts on the weights of layers; Top-KAST does it itself, as part of its exploration.
    """
    method = METHODS[this.method]
    weights = select(model)
    rest = [p for name, p in model.named_parameters() if name not in weights]
    decay = 0.0 if method.kind == "topkast" else WEIGHT_DECAY
    groups = [{"params": list(weights.values()), "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
    base = torch.optim.SGD(groups, this.rate * cfg.batch / 256, momentum=MOMENTUM, nesterov=True)
    sparsify = method.make(this.sparsity, this.distribution, cfg.length(this), this.rules, seed)
    return pp.Powerprop(base, model, this.alpha, sparsify=sparsify, rate="paper")


def rate_factor(step: int, steps: int) -> float:
    """The learning rate at a step, relative to η: warm-up, then a tenth after each drop."""
    epoch, after = (EPOCHS * s / steps for s in (step, step + 1))
    return float(min(1.0, after / WARMUP) * 0.1 ** sum(epoch >= drop for drop in DROPS))


@torch.no_grad()
def score(cfg: Config, model: nn.Module, val: Pictures) -> Score:
    """Loss and top-1 accuracy on the validation pictures, which the ranks share out."""
    ranks, device = current_ranks(), local_device()
    batch = max(1, cfg.batch // ranks.world)
    batches = evaluation_batches(val, batch, cfg.crop, cfg.resize, device=device, ranks=ranks, loaders=cfg.loaders)
    precision, sums = Precision(cfg.precision, device.type), torch.zeros(2, dtype=torch.float64)
    with evaluating(model):
        for x, y in batches:
            with precision.autocast(device):
                logits = model(x).float()
            loss = cross_entropy(logits, y, reduction="sum")
            sums += torch.stack([loss, (logits.argmax(1) == y).sum()]).double().cpu()
    return Score(*(ranks.sum(sums.to(device)) / len(val)).tolist())


def measure(cfg: Config, this: Cell, model: nn.Module, train: Pictures, val: Pictures, folder: Path) -> dict[str, Any]:
    """Accuracy and the weights that are left; of a dense network also the one-shot curve and its smallest weights."""
    masks, final = pp.Masks.nonzero(model), score(cfg, model, val)
    kept = {name: mask.float().mean().item() for name, mask in masks.items()}
    found = {"accuracy": final.accuracy, "loss": final.loss, "sparsity": masks.sparsity(), "kept": kept}
    if this.dense:
        if current_ranks().main:
            save_smallest(model, folder / "smallest.safetensors")
        found |= oneshot_curves(cfg, model, train, val)
    return found


def save_smallest(model: nn.Module, path: Path) -> None:
    """The weights of smallest magnitude of all layers, with their signs."""
    weights = torch.cat([weight.flatten() for weight in weights_of(model).values()])
    rows = weights.abs().topk(min(SMALLEST, len(weights)), largest=False).indices
    with replacing(path) as file:
        file.write(to_safetensors({"smallest": weights[rows].cpu().float(), "all": Tensor([len(weights)])}))


def oneshot_curves(cfg: Config, model: nn.Module, train: Pictures, val: Pictures) -> dict[str, list[float]]:
    """Accuracy after pruning to each fraction of the grid: as it is, and with batch norms measured anew."""
    grid, ranks, device = kept_grid(cfg.points, MIN_KEPT), current_ranks(), local_device()
    plain, recalibrated = [], []
    for kept in grid:
        pruned = copy.deepcopy(model)
        pp.prune(pruned, 1 - kept, layers=tables.RULES)
        plain.append(score(cfg, pruned, val).accuracy)
        batches = PictureBatches(train, cfg.batch, cfg.crop, 0, device=device, ranks=ranks, loaders=cfg.loaders)
        pp.recalibrate(pruned, islice(batches, cfg.recalibrate))
        ranks.broadcast_buffers(pruned)  # every rank gets what rank 0 measured
        recalibrated.append(score(cfg, pruned, val).accuracy)
    return {"grid": grid, "oneshot": plain, "recalibrated": recalibrated}


# The page.

PAPER = (
    "Section 5.2: tables 1 and 2, the extreme-sparsity figure; section 5.1: figure 3 b and c. The paper's values are "
    "top-1 accuracies of ResNet-50 on ImageNet."
)
NOT_IMAGENET = (
    "This is not ImageNet: a small network and a small set of pictures go through the code of the paper's protocol, to "
    "show that it works from the JPEG files to the tables.",
    "Its accuracies say nothing about ImageNet's, and a few points between two rows are noise; the paper's values "
    "stand beside them for the shape of the table alone.",
)
NOTE = (
    "Top-1 validation accuracy in percent. Uniform sparsity leaves the first convolution dense and prunes the last "
    "layer to at most 80%; ERK prunes both. Top-KAST* has 0% backward sparsity, Top-KAST† 50%. Every method has the "
    "paper's base learning rate: 0.4 for Powerprop + Iterative pruning, 0.1 for all others."
)
EXTENDED = (
    "Training k times as long, the schedule stretched with it. FLOPs are those of ResNet-50 at 224x224, relative to "
    "dense training of a single length, counted as in docs/flops.md. The value printed for RigL at uniform 90% holds "
    "only if the first convolution is counted as sparse, although the protocol leaves it dense: hence both. The "
    "paper's row of iterative pruning is Gale et al.'s, with a pruning schedule of its own."
)
COSTS = "FLOPs of this run's network relative to the dense one; training includes the length of the cell."
ONESHOT = (
    "Trained densely, then pruned once by magnitude, without retraining. Thin lines and hollow markers: the network as "
    "it is. Thick and filled: the batch norms' statistics were measured anew after pruning (`powerprop.recalibrate`), "
    "which the paper does not mention."
)

Trained = dict[Cell, Rows]
"""The seeds of each cell."""


def main(cfg: Config, run: Run) -> Page:
    """Train every cell from every seed, and say what was found."""
    run.prepare(lambda: find_data(cfg))
    settings = [{"cell": this.name, "seed": seed} for this in cfg.trainings for seed in range(cfg.seeds)]
    rows = run.map(train, settings, distributed=cfg.loaders > 0)
    trained = {this: rows.where(cell=this.name) for this in cfg.trainings}
    sections = [
        Section("Sparse training (table 1)", NOTE, during_training(trained), [table_one(trained)]),
        *extreme(trained),
        Section("Extended training (table 2)", EXTENDED, (), [table_two(trained)]),
        *oneshot(trained),
        Section("Sparsity and cost", COSTS, (), [cost_table(cfg, trained)]),
        *Section.diverged(lost_runs(rows, lambda row: str(row["cell"]))),
    ]
    network = f"{cfg.model} with {cfg.width} channels in its first stage"
    intro = (
        f"This run: {network}, {cfg.crop}x{cfg.crop}, {cfg.steps:,} steps of {cfg.batch} pictures of {cfg.data}, "
        f"{cfg.classes} classes, {cfg.runs}, {cfg.precision}."
    )
    title = "Sparse training on ImageNet"
    if not cfg.comparable:
        title, intro = "The ImageNet pipeline on ten small classes", f"{NOT_IMAGENET[0]}\n\n{intro} {NOT_IMAGENET[1]}"
    return Page(title, intro, sections, PAPER, stats(trained), headline(cfg, trained))


def accuracy(rows: Rows) -> Mean | str:
    """Mean and standard deviation over the seeds."""
    return rows.mean("accuracy") or "diverged"


def curve(this: Cell, name: str, x: Any, y: Any) -> Curve:
    """A curve in the colour of the cell's method."""
    return Curve(name, None, x, y, method=this.family, plain=this.alpha == 1)


def during_training(trained: Trained) -> list[Figure]:
    """Accuracy during training, first seed; nothing if no training of a single length came to its end."""
    drawn = []
    for this, rows in trained.items():
        for row in rows.finished[:1] if this.times == 1 else ():
            measured = [each for each in read_metrics(row.file("metrics.jsonl")) if "accuracy" in each]
            name = this.label if this.dense else f"{this.label} {this.column}"
            drawn.append(curve(this, name, [m["step"] for m in measured], [m["accuracy"] for m in measured]))
    caption = (
        "Validation accuracy, first seed. Thick lines and filled markers: with Powerprop; thin and hollow: without."
    )
    labels = {"title": "Accuracy during training", "xlabel": "step", "ylabel": "accuracy", "caption": caption}
    return [Figure("training", lines, drawn, **labels, percent=True, wide=True)] if drawn else []


def extreme(trained: Trained) -> list[Section]:
    """Accuracy against sparsity from 95% on, for methods measured at two sparsities or more."""
    found: dict[str, list[Cell]] = {}
    for this, rows in trained.items():
        if this.sparsity >= 0.95 and this.distribution == "uniform" and this.times == 1 and rows.finished:
            found.setdefault(this.label, []).append(this)
    drawn = []
    for name, cells in found.items():
        means = [[trained[this].mean("accuracy").mean for this in cells]]  # type: ignore[union-attr]
        drawn += [curve(cells[0], name, [this.sparsity for this in cells], means)] if len(cells) > 1 else []
    labels = {"title": "Extreme sparsity", "xlabel": "sparsity", "ylabel": "accuracy"}
    picture = Figure("extreme", lines, drawn, **labels, percent=True, fractions=True, wide=True)
    return [Section("Extreme sparsity", "Means over the seeds.", [picture])] if drawn else []


def oneshot(trained: Trained) -> list[Section]:
    """Figure 3b: accuracy after one-shot pruning; figure 3c: density of the smallest weights."""
    dense = {this: rows.finished for this, rows in trained.items() if this.dense and rows.finished}
    drawn = []
    for this, rows in dense.items():
        name, grid = f"α = {this.alpha:g}", rows[0]["grid"]
        drawn += [
            Curve(name, this.alpha, grid, rows.values("oneshot"), plain=True),
            Curve(f"{name}, recalibrated", this.alpha, grid, rows.values("recalibrated")),
        ]
    figures = [Figure("oneshot", pruning_curves, drawn, title="One-shot pruning"), smallest(dense)] if dense else []
    return [Section("One-shot pruning (figure 3b, c)", ONESHOT, figures)] if dense else []


def smallest(dense: Trained) -> Figure:
    """The density of the smallest weights of the first seed, over the range of the baseline's."""
    weights = {c.alpha: load_file(rows[0].file("smallest.safetensors"))["smallest"] for c, rows in dense.items()}
    limit = max(float(np.abs(values).max()) for values in weights.values()) or 1.0
    grid = np.linspace(-0.9 * limit, 0.9 * limit, 201)  # the estimate falls off at the edges
    # A narrow kernel, the same for all, so that peaks are the weights' and not the estimate's.
    drawn = [Curve(f"α = {a:g}", a, grid, density(values, grid, limit / 50)) for a, values in weights.items()]
    count = f"{len(next(iter(weights.values()))):,}"
    caption = f"The {count} weights of smallest magnitude after dense training, first seed."
    labels = {"title": f"The {count} smallest weights", "xlabel": "weight", "ylabel": "density", "caption": caption}
    return Figure("smallest", lines, drawn, **labels, wide=True)


def table_one(trained: Trained) -> Table:
    """One row per method, two columns per sparsity: ours and the paper's."""
    at = {(c.label, c.distribution, c.sparsity): c for c in trained if c.times == 1 and c.method != "pp-dense"}
    names = list(dict.fromkeys(key[1:] for key in at))
    columns: list[str | Column] = [""]
    for distribution, sparsity in names:
        title = f"{100 * sparsity:g}%" + (" (ERK)" if distribution == "erk" else "") if sparsity else "dense"
        columns += [Percent(title, "max", 2), Column(f"{title}, paper", paper=True)]
    shown: list[list[Value]] = []
    for method in dict.fromkeys(key[0] for key in at):
        cells = [at.get((method, *name)) for name in names]
        values = [value for c in cells for value in ((accuracy(trained[c]), c.printed) if c else (None, None))]
        shown.append([method, *values])
    return Table("Accuracy of sparse networks", columns, shown)


def name_of(this: Cell) -> str:
    """A cell, and the length of its training unless it is a single one."""
    return this.label if this.times == 1 else f"{this.label} ({this.times:g}x)"


def table_two(trained: Trained) -> Table:
    """The paper's cells with their FLOPs, which need no training, and our accuracies where they were run."""
    costs = Costs(models.resnet50(), 224)
    printed: dict[str, tuple[str, float | None]] = {**TABLE_2}

    def sparse_stem(this: Cell) -> float | None:
        return costs.training(this, sparse_stem=True) if this.distribution == "uniform" else None

    columns: Columns = [
        ("", lambda this: f"{this.label} ({this.times:g}x)"), ("sparsity", lambda this: this.column),
        (Percent("accuracy", "max", 2), lambda this: accuracy(trained[this]) if this in trained else None),
        (Column("accuracy, paper", paper=True), lambda this: printed.get(this.name, ("", None))[0]),
        (Column("FLOPs", digits=2), costs.training),
        (Column("FLOPs, first convolution sparse", digits=2), sparse_stem),
        (Column("FLOPs, paper", digits=2, paper=True), lambda this: printed.get(this.name, ("", None))[1]),
    ]  # fmt: skip
    cells = dict.fromkeys([*map(read_cell, TABLE_2), *(each for each in trained if each.times != 1)])
    return table("Extended training", columns, cells)


def cost_table(cfg: Config, trained: Trained) -> Table:
    """Sparsity asked and measured, and FLOPs; of the first seed."""
    costs = Costs(MODELS[cfg.model](cfg.classes, width=cfg.width), cfg.crop)
    kept = {this: rows.finished[0]["kept"] for this, rows in trained.items() if rows.finished}
    columns: Columns = [
        ("", name_of), ("sparsity asked", lambda this: this.column),
        (Percent("measured", digits=2), lambda this: trained[this].mean("sparsity")),
        (Column("inference FLOPs", digits=3), lambda this: costs.flops.inference(kept[this])),
        (Column("training FLOPs", digits=3), lambda this: costs.training(this, kept[this])),
    ]  # fmt: skip
    note = "The sparsity asked is that of the layers without a rule of their own."
    return table("Sparsity and FLOPs", columns, kept, note)


def twins(trained: Trained) -> list[tuple[Cell, float, float]]:
    """The cells with Powerprop, their accuracy and that of the method alone, where both were run."""
    means = {c.name: found.mean for c, rows in trained.items() if (found := rows.mean("accuracy"))}
    pairs = [(c, c.name, c.name.removeprefix("pp-")) for c in trained if c.name.startswith("pp-")]
    return [(c, means[ours], means[alone]) for c, ours, alone in pairs if ours in means and alone in means]


def stats(trained: Trained) -> list[Stat]:
    """What Powerprop adds to the method alone."""
    both = "{:.2f} against {:.2f} at {}"
    return [
        Stat(c.label, f"{100 * (ours - alone):+.2f} points", both.format(100 * ours, 100 * alone, c.column))
        for c, ours, alone in twins(trained)
    ]


def headline(cfg: Config, trained: Trained) -> Headline | None:
    """What Powerprop adds to iterative pruning at the highest sparsity where both were run, ours and the paper's.

    A run on other images than the paper's proves that it runs.
    """
    pairs = [pair for pair in twins(trained) if pair[0].method == "pp-iterative" and pair[0].name in TABLE_1]
    if not pairs or not cfg.comparable:
        return None
    this, ours, alone = max(pairs, key=lambda pair: pair[0].sparsity)
    names = (this.name, this.name.removeprefix("pp-"))
    found = {c.name: mean.scaled(100).format(2) for c, rows in trained.items() if (mean := rows.mean("accuracy"))}
    printed = [TABLE_1[name].partition(" ")[0] for name in names]
    what = f"{this.label} against {this.family}, top-1 accuracy at {this.column}"
    gain = f"{100 * (ours - alone):+.2f} points ({' against '.join(found[name] for name in names)})"
    paper = f"{float(printed[0]) - float(printed[1]):+.1f} points ({printed[0]} against {printed[1]})"
    return Headline(what, gain, paper)


EXPERIMENTS = {
    "imagenet": Experiment(
        "imagenet", "sparse training of ResNet-50 on ImageNet, on any number of GPUs",
        "tables 1 and 2, extreme-sparsity figure, figure 3 b and c, section 5.2", PRESETS, main,
    )
}  # fmt: skip
