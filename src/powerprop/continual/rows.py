"""Rows of batches, whatever a batch is: tensors, and tuples, lists and mappings of them, with a row for every input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["all_tensors", "count_rows", "in_pieces", "join_rows", "take_rows"]


def count_rows(batch: Any) -> int:
    """How many inputs a batch has."""
    while not isinstance(batch, Tensor):
        if not isinstance(batch, (Mapping, tuple, list)) or not batch:
            raise TypeError(f"expected batches of tensors with a row for every input, got {type(batch).__name__}")
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return len(batch)


def take_rows(batch: Any, index: Tensor) -> Any:
    """Some inputs of a batch; an index without a dimension is of one input, and may stand for several under `vmap`."""
    if isinstance(batch, Tensor):
        return batch.index_select(0, index.reshape(-1).to(batch.device)) if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {key: take_rows(value, index) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(take_rows(part, index) for part in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(take_rows(part, index) for part in batch)
    return batch


def join_rows(batches: Sequence[Any]) -> Any:
    """Batches of one form as one; parts that have no rows are those of the first."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches)) if first.ndim else first
    if isinstance(first, Mapping):
        return {key: join_rows([each[key] for each in batches]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(join_rows(parts) for parts in zip(*batches, strict=True)))
    if isinstance(first, (tuple, list)):
        return type(first)(join_rows(parts) for parts in zip(*batches, strict=True))
    return first


def in_pieces(batch: Any, size: int) -> Iterator[Any]:
    """The same inputs in smaller batches."""
    for index in torch.split(torch.arange(count_rows(batch)), size):
        yield take_rows(batch, index)


def all_tensors(answer: Any) -> Iterator[Tensor]:
    """The tensors of an answer, however it is put together."""
    if isinstance(answer, Tensor):
        yield answer
    elif isinstance(answer, (Mapping, tuple, list)):
        for each in answer.values() if isinstance(answer, Mapping) else answer:
            yield from all_tensors(each)
