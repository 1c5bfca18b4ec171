"""The two halves of a learner's step: gradients of the task in hand and of rehearsed batches, and the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from powerprop.continual.combine import act
from powerprop.continual.now import Rehearsal
from powerprop.continual.rows import join_rows
from powerprop.continual.source import to_device
from powerprop.optim import Powerprop
from powerprop.training import NonFiniteError

if TYPE_CHECKING:
    from powerprop.continual.strategy import Strategy

__all__ = ["add_penalties", "backward", "check_finite", "clip", "move", "rehearse"]

LEAST_SHARE = 1e-6
"""Of the loss, for the task in hand; less is rounding."""


def check_finite(loss: Tensor, step: int, scaler: GradScaler | None) -> None:
    """An error for a loss that is not finite, before it has made a gradient; with a scaler, that skips the step."""
    if scaler is None and not math.isfinite(value := float(loss.detach())):
        raise NonFiniteError(f"the loss is {value} at step {step + 1}, which is not taken; a lower rate may help")


def backward(loss: Tensor, rehearsals: Sequence[Rehearsal], scaler: GradScaler | None) -> None:
    """Gradients of (1 - Σ share) loss."""
    share = 1.0 - sum(each.share for each in rehearsals)
    if share < LEAST_SHARE:
        shares = [each.share for each in rehearsals]
        raise ValueError(f"rehearsals have shares of {shares} of the loss, which leave none for the task in hand")
    _scaled(loss if share == 1.0 else share * loss, scaler).backward()  # type: ignore[no-untyped-call]


def rehearse(learner: Strategy, scaler: GradScaler | None) -> None:
    """Gradients of Σ share·loss(rehearsal), one loss after the other; all batches of the step are one from now on."""
    now = learner.now
    assert now is not None
    first, now.batch = now.batch, _joined(now.batches)
    for each in now.rehearsals or ():
        again = each._replace(batch=now.batch) if each.batch is first else each
        loss = each.share * _loss_of(learner, again)
        check_finite(loss, now.step, scaler)
        _scaled(loss, scaler).backward()  # type: ignore[no-untyped-call]


def _joined(batches: Sequence[Any]) -> Any:
    """Batches of one form as one."""
    if len(batches) < 2 or batches[0] is None:
        return batches[0] if batches else None
    if any(type(each) is not type(batches[0]) for each in batches):
        raise TypeError(f"expected batches of one form, got {[type(each).__name__ for each in batches]}")
    return join_rows(batches)


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
        learner.optimizer.clip_grad_norm_(learner.clip * math.sqrt(share), _by_name(learner))


def _by_name(learner: Strategy) -> list[nn.Parameter]:
    """All that is trained, by name: a learner that was loaded has met its parameters in another order, and a sum in
    another order is another one."""
    names = {p: name for name, p in learner.model.named_parameters()}
    for own in act(learner, "own_parameters"):
        names |= {parameter: f"of the method/{name}" for name, parameter in own.items()}
    every = [p for group in learner.optimizer.param_groups for p in group["params"]]
    return sorted(every, key=lambda p: names.get(p, ""))


def move(optimizer: Powerprop, scaler: GradScaler | None) -> None:
    """The optimiser's step, by way of the scaler of mixed precision if there is one."""
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
