"""Train, prune once, measure: the protocol that figures 2, 3a and appendix A of the paper share.

Arms (an α and how it is trained) × learning rates × seeds; `tuning.py` chooses the learning rates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

from powerprop import data, models
from powerprop.experiments.harness import images
from powerprop.experiments.harness.checks import check_images
from powerprop.experiments.harness.experiment import Job
from powerprop.experiments.harness.parallel import Progress
from powerprop.experiments.oneshot import pruning
from powerprop.experiments.oneshot.config import LASSO, Candidate, Config
from powerprop.files import replacing
from powerprop.optim import Powerprop
from powerprop.reparam import fold, reparametrize
from powerprop.select import select
from powerprop.train import MetricsLog, NonFiniteError, fit
from powerprop.train.distributed import local_device
from powerprop.train.precision import Precision

GREY, COLOURED = (1, 28, 28), (3, 32, 32)
"""The images of LeNet-300-100, and those of networks of convolutions."""
SURVIVORS = 0.1
"""The fraction kept in figures 2c and 2d: 90% sparsity."""
SAMPLED = 10_000
"""The number of weights drawn in figures 2c and 2d."""
SEEN = 5_000
"""Training images by which statistics of batch norms are measured again, in ten batches."""


@dataclass(frozen=True)
class Arm:
    """One curve of the figure."""

    alpha: float
    form: str

    def job(self, config: Config, tried: Candidate, seed: int) -> Job:
        """The training of this arm with a candidate from a seed; a decay is named where it is not that of all."""
        start = "" if self.form == "targets" else f"{self.form}-"
        own = {"decay": tried.decay} if tried.decay != config.weight_decay or self.form == LASSO else {}
        settings = {"alpha": self.alpha, "form": self.form, "lr": tried.lr, "seed": seed, **own}
        decay = f"-decay{tried.decay:g}" if own else ""
        return Job(f"{start}alpha{self.alpha:g}-lr{tried.lr:g}{decay}-seed{seed}", settings)


def arms(config: Config) -> list[Arm]:
    """Every α > 1 in every form; α = 1 is the same in all and runs once, and once more if a penalty is asked for."""
    every = [Arm(alpha, form if alpha > 1 else "targets") for form in config.forms for alpha in config.alphas]
    return list(dict.fromkeys([*every, *([Arm(1.0, LASSO)] if config.lassos else [])]))


def prepare(config: Config) -> None:
    """Find the data, or download it, and refuse settings that it does not fit, before a job runs."""
    found = data.load(config.data)
    check_images(config.model, GREY if flat(config) else COLOURED, 10, found)
    found.split_validation(config.validation)


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
    parts = torch.split(splits.train.x[:SEEN], SEEN // 10)
    seen = list(parts) if flat(config) else [images.channels_last(part) for part in parts]
    test = {"test": splits.test}
    both = {**test, "validation": splits.validation}
    with Precision(config.precision, device.type).autocast(device):  # pruned in four ways: half of a job's time
        curves = pruning.accuracies(model, both, config.grid, config.ways[0], seen)
        others = {way: pruning.accuracies(model, test, config.grid, way, seen)["test"] for way in config.ways[1:]}
    survivors = pruning.layerwise_masks(after, SURVIVORS)
    drawn = pruning.sample(before, after, survivors, SAMPLED, torch.Generator().manual_seed(job.settings["seed"]))
    with replacing(folder / "weights.safetensors") as file:
        file.write(to_safetensors(drawn))
    overlap = pruning.overlaps(before, after, config.grid)
    moved = pruning.movement(before, after, survivors)
    return {"kept": config.grid, **curves, "overlap": overlap, **moved, "others": others}


def train(config: Config, job: Job, model: nn.Module, splits: data.Splits, folder: Path, progress: Progress) -> None:
    """Train to the last step, from the checkpoint in the folder if there is one."""
    optimizer = make_optimizer(config, model, **{name: job.settings[name] for name in job.settings if name != "seed"})
    generator = torch.Generator().manual_seed(job.settings["seed"])
    precision = Precision(config.precision, next(model.parameters()).device.type)
    batches = data.Batches(*splits.train, config.batch, generator, None if flat(config) else images.moved(config.shift))
    with MetricsLog(folder / "metrics.jsonl") as log:
        fit(
            model,
            optimizer,
            batches,
            config.steps,
            loss=partial(cross_entropy, label_smoothing=config.label_smoothing),
            schedule=(lambda step: triangle(step / config.steps, config.peak)) if config.peak else None,
            precision=precision,
            checkpoint=folder / "checkpoint.pt",
            checkpoint_every=config.every,
            log=log,
            evaluate=lambda model: {"accuracy": images.accuracy_in(precision, model, splits.validation)},
            eval_every=config.every,
            progress=lambda step, values: progress(step / config.steps, {"step": step, **values}),
        )


def load_splits(config: Config) -> data.Splits:
    """Training, validation and test images as floats."""
    return images.load_splits(config.data, config.pixels, config.validation, config.train, config.test)


def flat(config: Config) -> bool:
    """True if the network has no convolutions."""
    return config.model == "lenet-300-100"


def build(config: Config, seed: int) -> nn.Module:
    """The network with the initial weights of this seed."""
    generator = torch.Generator().manual_seed(seed)
    if flat(config):
        return models.lenet_300_100(init=config.init, generator=generator)
    options: dict[str, Any] = {"init": config.init, "generator": generator}
    if config.model == "conv6":
        model: nn.Module = models.conv6(width=config.width, batch_norm=config.batch_norm, **options)
    elif config.model == "fast-cifar":
        model = models.fast_cifar(widths=[round(config.width * each) for each in models.fastconv.WIDTHS], **options)
    else:
        model = models.resnet20(**options)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def make_optimizer(
    config: Config, model: nn.Module, alpha: float, form: str, lr: float, decay: float | None = None
) -> Optimizer:
    """SGD or Adam with Powerprop around it, or, in the direct form, over φ itself."""
    if form == "direct":
        reparametrize(model, alpha)
    own = config.weight_decay if decay is None or form == LASSO else decay
    options: dict[str, Any] = {"lr": lr, "weight_decay": own}
    if config.optimiser == "adam":
        base: Optimizer = Adam(model.parameters(), **options)
    else:
        base = SGD(model.parameters(), momentum=config.momentum, nesterov=config.nesterov, **options)
    if form == LASSO:
        penalise(base, model, decay or 0.0)
    return Powerprop(base, model, alpha) if form == "targets" else base


def penalise(optimizer: Optimizer, model: nn.Module, strength: float) -> None:
    """Add the slope of strength·|w| to the gradient of every weight, before each step."""
    weights = list(select(model).values())

    def pull(*_: Any) -> None:
        for weight in weights:
            if weight.grad is not None:
                weight.grad.add_(weight.detach().sign(), alpha=strength)

    optimizer.register_step_pre_hook(pull)


def triangle(done: float, peak: float) -> float:
    """The learning rate when a fraction of the training is done: a linear rise to 1 at `peak`, a linear fall to 0."""
    return done / peak if done < peak else (1 - done) / (1 - peak)
