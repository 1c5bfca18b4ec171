"""Passes in 16 bits with weights and updates in 32, and what a network knows of a whole set held in tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from powerprop.batches import Part
from powerprop.eval_mode import evaluating
from powerprop.optim import Powerprop
from powerprop_paper.data.images import AT_ONCE

PRECISIONS: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
PRODUCTS: dict[str, str] = {"float32": "highest", "bfloat16": "medium"}
"""What torch calls the precision of the factors in a product of float32 matrices."""


class Precision:
    """How the forward and backward pass compute.

    name: "float32", "bfloat16", or "float16", whose short range needs the loss to be scaled up: a step whose gradients
        overflow is left out, and the scale is part of the checkpoint.
    device: the type of the device that the model is on, "cuda" or "cpu".
    """

    def __init__(self, name: str = "float32", device: str = "cpu") -> None:
        if name not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {name!r}")
        self.name, self.dtype = name, PRECISIONS[name]
        self.scaler = GradScaler(device) if name == "float16" else None

    @contextmanager
    def autocast(self, device: torch.device) -> Iterator[None]:
        """Inside, matrix products and convolutions compute in this precision, with the weights of the moment.

        torch would keep the rounded weights to the end of the block, also of a network that is pruned meanwhile.
        """
        if self.dtype == torch.float32:
            yield
            return
        with torch.autocast(device.type, self.dtype, cache_enabled=False):
            yield

    def step(self, loss: Tensor, optimizer: Optimizer, clip: float | None = None) -> None:
        """Backward pass, gradients clipped to the norm `clip`, optimiser step."""
        if self.scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
            _clip(optimizer, clip)
            optimizer.step()
            return
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            self.scaler.unscale_(optimizer)
            _clip(optimizer, clip)
        self.scaler.step(optimizer)
        self.scaler.update()

    def parts(self) -> dict[str, Any]:
        """What belongs into a checkpoint."""
        return {} if self.scaler is None else {"scaler": self.scaler}


def _clip(optimizer: Optimizer, norm: float | None) -> None:
    if norm is None:
        return
    if isinstance(optimizer, Powerprop):
        optimizer.clip_grad_norm_(norm)
    else:
        clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], norm)


FULL = Precision()
"""Everything in float32."""


def precision_note(precision: str) -> list[str]:
    """A sentence for reports, where products were not in full precision."""
    if precision == "float32":
        return []
    return [f"The factors in products of matrices are rounded to {precision}, sums and all else are float32"]


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Inside, the factors in products of float32 matrices are rounded to this precision; they are added up in float32,
    and everything else is float32 as before, so that no method has to know of it.

    precision: "float32" or "bfloat16". On a processor that multiplies bfloat16, networks of a few hundred units train
        two to three times as fast; others compute as they can.
    """
    if precision not in PRODUCTS:
        raise ValueError(f"precision of products must be one of {', '.join(PRODUCTS)}, got {precision!r}")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(PRODUCTS[precision])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Score(NamedTuple):
    """Mean cross-entropy and the fraction classified correctly."""

    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor, batch: int = 1000) -> Score:
    """Classify `x` in eval mode, `batch` rows at a time on the model's device; modes are put back afterwards."""
    if len(x) != len(y) or not len(x):
        raise ValueError(f"expected as many labels as inputs and at least one, got {len(x)} inputs and {len(y)} labels")
    device = next(model.parameters()).device
    loss, correct = 0.0, 0
    with evaluating(model):
        for inputs, labels in zip(torch.split(x, batch), torch.split(y, batch), strict=True):
            labels = labels.to(device)
            logits = model(inputs.to(device))
            loss += cross_entropy(logits, labels, reduction="sum").item()
            correct += int((logits.argmax(dim=-1) == labels).sum())
    return Score(loss / len(x), correct / len(x))


def accuracy_in(precision: Precision, model: nn.Module, part: Part) -> float:
    """Accuracy in the precision of training, for a curve along it: in float32 it takes a fifth of a short training."""
    with precision.autocast(next(model.parameters()).device):
        return evaluate(model, *part, batch=AT_ONCE).accuracy
