"""Magnitude pruning in one shot: how a trained network fares with ever fewer of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor, nn

import powerprop as pp
from powerprop.select import select
from powerprop.sparsify.prune import top_k
from powerprop_paper import data
from powerprop_paper.train import evaluate

LAYERWISE: Final = "layerwise"
GLOBAL, RECALIBRATED = "global", " recalibrated"
PruneMode = Literal["layerwise", "layerwise recalibrated", "global", "global recalibrated"]
"""The smallest weights of each layer or of all, and the statistics of batch norms as they were or measured again."""
SEEN = 5_000
"""Training images by which statistics of batch norms are measured again, in ten batches."""
NEAR_ZERO = 1e-3
"""Weights of smaller magnitude are counted as near zero."""


def kept_grid(points: int, smallest: float) -> list[float]:
    """Fractions of weights kept, up to 1, evenly spaced on a log scale."""
    return [float(p) for p in np.geomspace(smallest, 1.0, points)]


def inside(grid: Sequence[float], band: tuple[float, float]) -> list[int]:
    """The points of a grid inside a range."""
    return [i for i, kept in enumerate(grid) if band[0] <= kept <= band[1]]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every weight that is pruned."""
    return {name: weight.detach().clone() for name, weight in select(model).items()}


def layerwise_masks(weights: Mapping[str, Tensor], kept: float) -> pp.Masks:
    """The int(p·n) largest magnitudes of each layer; the last one keeps twice the fraction: min(1, 2p)."""
    *_, output = weights
    share = {name: min(1.0, 2 * kept) if name == output else kept for name in weights}
    return pp.Masks({name: top_k(weight.abs(), int(share[name] * weight.numel())) for name, weight in weights.items()})


def global_masks(weights: Mapping[str, Tensor], kept: float) -> pp.Masks:
    """The int(p·n) largest magnitudes of all layers together."""
    sizes = {name: weight.numel() for name, weight in weights.items()}
    chosen = torch.split(top_k(flattened(weights).abs(), int(kept * sum(sizes.values()))), list(sizes.values()))
    return pp.Masks({name: part.view_as(weights[name]) for name, part in zip(sizes, chosen, strict=True)})


@contextmanager
def pruned(model: nn.Module, masks: pp.Masks) -> Iterator[nn.Module]:
    """The model with the masks applied, inside the block only; statistics of norms come back, too."""
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    masks.apply(model)
    try:
        yield model
    finally:
        model.load_state_dict(before)


def accuracies(
    model: nn.Module, parts: Mapping[str, data.Part], grid: Sequence[float], mode: str, seen: Sequence[Tensor]
) -> dict[str, list[float]]:
    """Accuracy on each part after pruning the model, as it is now, to each fraction of the grid.

    seen: batches of training images, by which statistics of batch norms are measured again.
    """
    weights, choose = weights_of(model), global_masks if mode.startswith(GLOBAL) else layerwise_masks
    found: dict[str, list[float]] = {name: [] for name in parts}
    for kept in grid:
        with pruned(model, choose(weights, kept)):
            if mode.endswith(RECALIBRATED):
                pp.recalibrate(model, seen)
            for name, part in parts.items():
                found[name].append(evaluate(model, *part, batch=data.AT_ONCE).accuracy)
    return found


def movement(before: Mapping[str, Tensor], after: Mapping[str, Tensor], survivors: pp.Masks) -> dict[str, float]:
    """Sign changes and weights near zero, as fractions of all weights and of the survivors."""
    first, last, kept = flattened(before), flattened(after), flattened(survivors)
    changed = first.sign() != last.sign()
    return {
        "sign_changes": changed.float().mean().item(),
        "sign_changes_of_survivors": changed[kept].float().mean().item(),
        "near_zero_before": (first.abs() < NEAR_ZERO).float().mean().item(),
        "near_zero_after": (last.abs() < NEAR_ZERO).float().mean().item(),
    }


def sample(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    survivors: pp.Masks,
    count: int,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Some weights of all layers at random, before and after training, and which of them survive (figure 2c, d)."""
    first, last, kept = flattened(before), flattened(after), flattened(survivors)
    rows = torch.randperm(len(first), generator=generator)[:count].to(first.device)
    return {"before": first[rows], "after": last[rows], "survives": kept[rows]}


def flattened(tensors: Mapping[str, Tensor]) -> Tensor:
    """All tensors as one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def described(mode: str) -> str:
    """A way to prune in words."""
    alone = "those of every layer by itself; the output layer keeps twice the fraction of the others"
    ranking = "all layers are ranked together" if mode.startswith(GLOBAL) else alone
    dense = "those of the dense network"
    again = f"measured again on {SEEN:,} training images" if mode.endswith(RECALIBRATED) else dense
    return f"{ranking}; statistics of batch norms, where there are any, are {again}"
