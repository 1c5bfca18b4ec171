"""The two halves of a learner's step: gradients of the task in hand and of rehearsed batches, and the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from powerprop.continual.now import Rehearsal
from powerprop.continual.source import to_device
from powerprop.optim import Powerprop

if TYPE_CHECKING:
    from powerprop.continual.strategy import Strategy

__all__ = ["add_penalties", "backward", "clip", "move"]

LEAST_SHARE = 1e-6
"""Of the loss, for the task in hand; less is rounding."""


def backward(learner: Strategy, loss: Tensor, rehearsals: Sequence[Rehearsal], scaler: GradScaler | None) -> None:
    """Gradients of (1 - Σ share) loss + Σ share·loss(rehearsal), one loss after the other."""
    share = 1.0 - sum(each.share for each in rehearsals)
    if share < LEAST_SHARE:
        shares = [each.share for each in rehearsals]
        raise ValueError(f"rehearsals have shares of {shares} of the loss, which leave none for the task in hand")
    _scaled(loss if share == 1.0 else share * loss, scaler).backward()  # type: ignore[no-untyped-call]
    for each in rehearsals:
        _scaled(each.share * _loss_of(learner, each), scaler).backward()  # type: ignore[no-untyped-call]


def _loss_of(learner: Strategy, rehearsal: Rehearsal) -> Tensor:
    """The loss of a batch of an earlier task, with the network as that task sees it."""
    task: Any = rehearsal.task
    loss = rehearsal.loss or learner.objective.loss
    with learner.viewing(task if isinstance(task, int) else None) as model:
        return loss(model, to_device(rehearsal.batch, learner.device), task)


def _scaled(loss: Tensor, scaler: GradScaler | None) -> Tensor:
    return loss if scaler is None else scaler.scale(loss)


def add_penalties(penalties: Sequence[Tensor | None]) -> None:
    """Gradients of the terms that methods add to the loss, on top of those that are there."""
    if terms := [each for each in penalties if each is not None]:
        torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]


def clip(learner: Strategy) -> None:
    """The gradient at the norm that the learner allows; of a fraction of the weights, its root times that."""
    if learner.clip is not None and (share := learner.trained_share()) > 0:
        learner.optimizer.clip_grad_norm_(learner.clip * math.sqrt(share))


def move(optimizer: Powerprop, scaler: GradScaler | None) -> None:
    """The optimiser's step, by way of the scaler of mixed precision if there is one."""
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
