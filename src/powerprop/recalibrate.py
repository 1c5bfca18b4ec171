"""Batch-norm recalibration: pruning changes what flows through a network, its running statistics should follow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from powerprop.eval_mode import evaluating

__all__ = ["Batch", "recalibrate", "run_batch"]

Net = TypeVar("Net", bound=nn.Module)
Batch = Tensor | Sequence[Tensor] | Mapping[str, Any]
"""Inputs, (inputs, labels, …), or a mapping of keywords, as Hugging Face's."""


@torch.no_grad()
def recalibrate(model: Net, batches: Iterable[Batch]) -> Net:
    """Measure the running mean and variance of every batch norm anew, as the plain average over the batches.

        μ = 1/n Σ μ_i,    σ² = 1/n Σ σ_i²      over the batches i = 1 … n

    Call it after `prune`: the statistics in the model are those of the dense network. Nothing else changes: no weight,
    no mode, and dropout and all other layers work as in evaluation meanwhile. A model without batch norm is returned
    as it is, and if a batch fails, the old statistics are put back.

    batches: a finite number of inputs, (inputs, labels, …) or mappings of keywords. Some ten batches of the training
        data are enough (`itertools.islice(batches, 10)` takes them from an endless source).

    Examples:
        >>> masks = pp.prune(model, 0.9)
        >>> model = pp.recalibrate(model, batches)
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not norms:
        return model
    remaining = iter(batches)
    first = next(remaining, None)
    if first is None:
        raise ValueError("recalibrate needs at least one batch, got none")
    with _measuring(model, norms):
        for batch in chain([first], remaining):
            run_batch(model, batch)
    return model


def run_batch(model: nn.Module, batch: Batch) -> None:
    """A forward pass of a batch as loaders give it, where the model is."""
    device = next(model.parameters()).device
    if isinstance(batch, Mapping):
        model(**{name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()})
        return
    inputs = batch if isinstance(batch, Tensor) else batch[0]
    if not isinstance(inputs, Tensor):
        raise TypeError(f"a batch must be a tensor, begin with one or map keywords to them, got {type(batch).__name__}")
    model(inputs.to(device))


@contextmanager
def _measuring(model: nn.Module, norms: list[_BatchNorm]) -> Iterator[None]:
    """Norms train with a cumulative average from zero, all else evaluates; modes and momenta come back afterwards."""
    before = [(norm, norm.momentum, _statistics(norm)) for norm in norms]
    with evaluating(model):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
            norm.training = True
        try:
            yield
        except BaseException:
            for norm, _, statistics in before:
                norm.load_state_dict(statistics, strict=False)
            raise
        finally:
            for norm, momentum, _ in before:
                norm.momentum = momentum


def _statistics(norm: _BatchNorm) -> dict[str, Any]:
    return {name: buffer.clone() for name, buffer in norm.named_buffers(recurse=False)}
