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
from powerprop.experiments.oneshot.config import Config
from powerprop.files import replacing
from powerprop.optim import Powerprop
from powerprop.reparam import fold, reparametrize
from powerprop.train import MetricsLog, NonFiniteError, evaluate, fit
from powerprop.train.distributed import local_device

SURVIVORS = 0.1
"""The fraction kept in figures 2c and 2d: 90% sparsity."""
SAMPLED = 10_000
"""The number of weights drawn in figures 2c and 2d."""


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
    device = local_device()
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
