"""Train, prune once, measure: the protocol that figures 2, 3a and appendix A of the paper share.

Arms (an α and how it is trained) × learning rates × seeds; `tuning.py` chooses the learning rates.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from powerprop import data, models
from powerprop.data.batches import Augment
from powerprop.experiments.harness.experiment import Job
from powerprop.experiments.harness.parallel import Progress
from powerprop.experiments.oneshot import pruning
from powerprop.files import replacing
from powerprop.optim import Powerprop
from powerprop.reparam import fold, reparametrize
from powerprop.train import MetricsLog, NonFiniteError, evaluate, fit

FORMS = {
    "targets": "through virtual targets",
    "direct": "on φ directly",
}
CHOICES = {"model": ("lenet-300-100", "conv6"), "optimiser": ("sgd", "adam"), "pixels": ("unit", "standard")}
SURVIVORS = 0.1
"""The fraction kept in figures 2c and 2d: 90% sparsity."""
SAMPLED = 10_000
"""The number of weights drawn in figures 2c and 2d."""


@dataclass(frozen=True)
class Config:
    """The settings of a one-shot pruning experiment.

    Args:
        data: name of the data set.
        model: "lenet-300-100" or "conv6".
        alphas: powers; 1 is the baseline.
        lrs: candidates of the learning rate; with one there is no tuning.
        seeds: runs of each arm at its chosen learning rate.
        steps: training steps.
        tuning_seeds: runs of each candidate.
        tolerance: what the dense accuracy of the chosen learning rate may lack to the best candidate's.
        optimiser: "sgd" or "adam".
        forms: how α > 1 is trained: "targets" (the Powerprop wrapper), "direct" (the optimiser sees φ).
        momentum: of SGD.
        batch: images per step.
        init: initialisation of the weights.
        pixels: "unit" scales them to [0, 1], "standard" each channel to mean 0 and variance 1.
        width: multiplies the channels of Conv-6.
        batch_norm: after each convolution of Conv-6; its variables are not pruned.
        validation: the last so many training images choose the learning rate.
        train: the first so many of the others are trained on; 0 means all.
        test: the first so many test images are measured; 0 means all.
        points: size of the grid of fractions kept, evenly spaced on a log scale up to 1.
        least: the smallest fraction kept.
        band: the range of fractions kept that the headline averages over.
        every: steps between checkpoints.
    """

    data: str
    model: str
    alphas: tuple[float, ...]
    lrs: tuple[float, ...]
    seeds: int
    steps: int
    tuning_seeds: int = 1
    tolerance: float = 0.005
    optimiser: str = "sgd"
    forms: tuple[str, ...] = ("targets",)
    momentum: float = 0.0
    batch: int = 60
    init: str = "truncated_fan_in"
    pixels: str = "unit"
    width: float = 1.0
    batch_norm: bool = False
    validation: int = 5000
    train: int = 0
    test: int = 0
    points: int = 20
    least: float = 0.01
    band: tuple[float, float] = (0.015, 0.055)
    every: int = 1000

    def __post_init__(self) -> None:
        for alpha in self.alphas:
            _require(1 <= alpha < float("inf"), f"alpha must be at least 1, got {alpha}")
        _require(len(set(self.alphas)) == len(self.alphas) > 0, f"alphas must be different, got {self.alphas}")
        _require(len(set(self.lrs)) == len(self.lrs) > 0, f"learning rates must be different, got {self.lrs}")
        _require(self.seeds >= 1, f"seeds must be at least 1, got {self.seeds}")
        low, high = self.band
        _require(any(low <= kept <= high for kept in self.grid), f"no point of the grid lies in {self.band}")
        for name, known in CHOICES.items():
            value = getattr(self, name)
            _require(value in known, f"{name} must be one of {', '.join(known)}, got {value!r}")
        for form in self.forms:
            _require(form in FORMS, f"form must be one of {', '.join(FORMS)}, got {form!r}")

    @property
    def grid(self) -> list[float]:
        """The fractions of weights kept."""
        return pruning.kept_grid(self.points, self.least)


@dataclass(frozen=True)
class Arm:
    """One curve of the figure."""

    alpha: float
    form: str

    def job(self, lr: float, seed: int) -> Job:
        """The training of this arm at a learning rate from a seed."""
        start = "direct-" if self.form == "direct" else ""
        settings = {"alpha": self.alpha, "form": self.form, "lr": lr, "seed": seed}
        return Job(f"{start}alpha{self.alpha:g}-lr{lr:g}-seed{seed}", settings)


def arms(config: Config) -> list[Arm]:
    """Every α > 1 in every form; α = 1 is the same in all and runs once."""
    return [
        Arm(alpha, form) for form in config.forms for alpha in config.alphas if alpha > 1 or form == config.forms[0]
    ]


def prepare(config: Config) -> None:
    """Find the data, or download it, before several processes ask for it."""
    data.load(config.data)


def run_job(config: Config, job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
    """Train one network and prune it to every fraction of the grid."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    splits = load_splits(config).to(device)
    # The same seed gives every arm the same initial weights and the same batches.
    model = build(config, job.settings["seed"]).to(device)
    before = pruning.weights_of(model)
    try:
        train(config, job, model, splits, folder, progress)
    except NonFiniteError as error:
        return {"diverged": str(error)}
    fold(model)
    after = pruning.weights_of(model)
    curves = {name: pruning.accuracies(model, *part, config.grid) for name, part in _measured(splits).items()}
    survivors = pruning.layerwise_masks(after, SURVIVORS)
    drawn = pruning.sample(before, after, survivors, SAMPLED, torch.Generator().manual_seed(job.settings["seed"]))
    with replacing(folder / "weights.safetensors") as file:
        file.write(to_safetensors(drawn))
    overlap = pruning.overlaps(before, after, config.grid)
    return {"kept": config.grid, **curves, "overlap": overlap, **pruning.movement(before, after, survivors)}


def train(config: Config, job: Job, model: nn.Module, splits: data.Splits, folder: Path, progress: Progress) -> None:
    """Train to the last step, from the checkpoint in the folder if there is one."""
    optimizer = make_optimizer(config, model, job.settings["alpha"], job.settings["form"], job.settings["lr"])
    generator = torch.Generator().manual_seed(job.settings["seed"])
    batches = data.Batches(*splits.train, config.batch, generator, _layout(config))
    with MetricsLog(folder / "metrics.jsonl") as log:
        fit(
            model,
            optimizer,
            batches,
            config.steps,
            checkpoint=folder / "checkpoint.pt",
            checkpoint_every=config.every,
            log=log,
            evaluate=lambda model: {"accuracy": evaluate(model, *splits.validation).accuracy},
            eval_every=config.every,
            progress=lambda step, values: progress(step / config.steps, {"step": step, **values}),
        )


def load_splits(config: Config) -> data.Splits:
    """Training, validation and test images as floats."""
    images = data.load(config.data)
    train, validation, test = images.split_validation(config.validation)
    train, test = _first(train, config.train), _first(test, config.test)
    splits = data.Splits(train, validation, test)
    if config.pixels == "unit":
        return splits.map(data.to_float)
    mean, std = data.mean_std(train.x)
    return splits.map(lambda x: data.normalise(x, mean, std))


def build(config: Config, seed: int) -> nn.Module:
    """The network with the initial weights of this seed."""
    generator = torch.Generator().manual_seed(seed)
    if config.model == "conv6":
        return models.conv6(width=config.width, batch_norm=config.batch_norm, init=config.init, generator=generator)
    return models.lenet_300_100(init=config.init, generator=generator)


def make_optimizer(config: Config, model: nn.Module, alpha: float, form: str, lr: float) -> Optimizer:
    """SGD or Adam with Powerprop around it, or, in the direct form, over φ itself."""
    if form == "direct":
        reparametrize(model, alpha)
    adam = config.optimiser == "adam"
    base = Adam(model.parameters(), lr) if adam else SGD(model.parameters(), lr, momentum=config.momentum)
    return base if form == "direct" else Powerprop(base, model, alpha)


def _layout(config: Config) -> Augment | None:
    """Channels last for convolutions: a step of Conv-6 on a CPU takes two thirds of the time."""
    return (lambda x, _: x.contiguous(memory_format=torch.channels_last)) if config.model == "conv6" else None


def _first(part: data.Part, count: int) -> data.Part:
    return data.Part(part.x[:count], part.y[:count]) if count else part


def _measured(splits: data.Splits) -> dict[str, data.Part]:
    return {"test": splits.test, "validation": splits.validation}


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
