"""Loss and accuracy on a whole set held in tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from powerprop.batches import Part
from powerprop.eval_mode import evaluating
from powerprop_paper.data.images import AT_ONCE
from powerprop_paper.train.precision import Precision


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
            loss += functional.cross_entropy(logits, labels, reduction="sum").item()
            correct += int((logits.argmax(dim=-1) == labels).sum())
    return Score(loss / len(x), correct / len(x))


def accuracy_in(precision: Precision, model: nn.Module, part: Part) -> float:
    """Accuracy in the precision of training, for a curve along it: in float32 it takes a fifth of a short training."""
    with precision.autocast(next(model.parameters()).device):
        return evaluate(model, *part, batch=AT_ONCE).accuracy
