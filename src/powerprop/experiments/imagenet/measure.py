"""What is measured of a trained network: accuracy, sparsity, and how it fares when pruned at once (figure 3 b, c)."""

from __future__ import annotations

import copy
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.nn import functional

import powerprop as pp
from powerprop.data.imagenet import Pictures
from powerprop.data.picture_batches import PictureBatches, evaluation_batches
from powerprop.eval_mode import evaluating
from powerprop.experiments.imagenet.cells import RULES, Cell
from powerprop.experiments.oneshot.pruning import kept_grid, weights_of
from powerprop.files import replacing
from powerprop.train.distributed import current_ranks, local_device
from powerprop.train.evaluate import Score
from powerprop.train.precision import Precision

if TYPE_CHECKING:
    from powerprop.experiments.imagenet.config import Config

SMALLEST = 100_000
"""How many of the smallest weights figure 3c shows."""


@torch.no_grad()
def score(config: Config, model: nn.Module, val: Pictures) -> Score:
    """Loss and top-1 accuracy on the validation pictures, which the ranks share out."""
    ranks, device = current_ranks(), local_device()
    batch = max(1, config.batch // ranks.world)
    batches = evaluation_batches(
        val, batch, config.crop, config.resize, device=device, ranks=ranks, loaders=config.loaders
    )
    precision = Precision(config.precision, device.type)
    sums = torch.zeros(2, dtype=torch.float64)
    with evaluating(model):
        for x, y in batches:
            with precision.autocast(device):
                logits = model(x).float()
            loss = functional.cross_entropy(logits, y, reduction="sum")
            sums += torch.stack([loss, (logits.argmax(1) == y).sum()]).double().cpu()
    loss_sum, correct = (ranks.sum(sums.to(device)) / len(val)).tolist()
    return Score(loss_sum, correct)


def measure(
    config: Config, this: Cell, model: nn.Module, train: Pictures, val: Pictures, folder: Path
) -> dict[str, Any]:
    """Accuracy and the weights that are left; of a dense network also the one-shot curve and its smallest weights."""
    masks = pp.Masks.nonzero(model)
    final = score(config, model, val)
    found: dict[str, Any] = {
        "accuracy": final.accuracy,
        "loss": final.loss,
        "sparsity": masks.sparsity(),
        "kept": {name: mask.float().mean().item() for name, mask in masks.items()},
    }
    if this.oneshot:
        if current_ranks().main:
            save_smallest(model, folder / "smallest.safetensors")
        found |= oneshot_curves(config, model, train, val)
    return found


def save_smallest(model: nn.Module, path: Path) -> None:
    """The weights of smallest magnitude of all layers, with their signs."""
    weights = torch.cat([weight.flatten() for weight in weights_of(model).values()])
    count = min(SMALLEST, len(weights))
    rows = weights.abs().topk(count, largest=False).indices
    with replacing(path) as file:
        file.write(to_safetensors({"smallest": weights[rows].cpu().float(), "all": Tensor([len(weights)])}))


def oneshot_curves(config: Config, model: nn.Module, train: Pictures, val: Pictures) -> dict[str, list[float]]:
    """Accuracy after pruning to each fraction of the grid: as it is, and with batch norms measured anew."""
    grid = kept_grid(config.points, config.least)
    plain, recalibrated = [], []
    for kept in grid:
        pruned = copy.deepcopy(model)
        pp.prune(pruned, 1 - kept, layers=RULES)
        plain.append(score(config, pruned, val).accuracy)
        recalibrate(config, pruned, train)
        recalibrated.append(score(config, pruned, val).accuracy)
    return {"grid": grid, "oneshot": plain, "recalibrated": recalibrated}


def recalibrate(config: Config, model: nn.Module, train: Pictures) -> None:
    """Batch norms over a few batches; every rank gets what rank 0 measured."""
    ranks = current_ranks()
    batches = PictureBatches(
        train, config.batch, config.crop, 0, device=local_device(), ranks=ranks, loaders=config.loaders
    )
    pp.recalibrate(model, islice(batches, config.recalibrate))
    ranks.broadcast_buffers(model)
