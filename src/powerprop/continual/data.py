"""The data of a task as batches: tensors, data sets and loaders behind one face, and rows of what they yield."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from powerprop.batches import Batches

__all__ = [
    "Missing", "Source", "all_tensors", "count_rows", "derived_seed", "drawing_from", "in_pieces", "join_rows",
    "number_of", "take_rows", "to_device",
]  # fmt: skip


def map_parts(function: Callable[..., Any], *batches: Any) -> Any:
    """A batch put together as these are, of function(parts) for all parts that stand in the same place."""
    first = batches[0]
    if isinstance(first, Mapping):
        return {key: map_parts(function, *(each[key] for each in batches)) for key in first}
    if isinstance(first, (tuple, list)):
        found = [map_parts(function, *parts) for parts in zip(*batches, strict=True)]
        return type(first)(*found) if hasattr(first, "_fields") else type(first)(found)
    return function(*batches)


def to_device(batch: Any, device: torch.device) -> Any:
    """The same batch with its tensors on a device."""
    return map_parts(lambda part: part.to(device) if isinstance(part, Tensor) else part, batch)


def take_rows(batch: Any, index: Tensor) -> Any:
    """Some inputs of a batch; an index without a dimension is of one input, and may stand for several under `vmap`."""

    def taken(part: Any) -> Any:
        has_rows = isinstance(part, Tensor) and part.ndim
        return part.index_select(0, index.reshape(-1).to(part.device)) if has_rows else part

    return map_parts(taken, batch)


def join_rows(batches: Sequence[Any]) -> Any:
    """Batches of one form as one; parts that have no rows are those of the first."""

    def joined(*parts: Any) -> Any:
        return torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].ndim else parts[0]

    return map_parts(joined, *batches)


def count_rows(batch: Any) -> int:
    """How many inputs a batch has."""
    while not isinstance(batch, Tensor):
        if not isinstance(batch, (Mapping, tuple, list)) or not batch:
            raise TypeError(f"expected batches of tensors with a row for every input, got {type(batch).__name__}")
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return len(batch)


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


IN_ORDER = 1000
"""Inputs of a batch when tensors are gone through in order."""


class Source:
    """A task's training data: endless batches to train on, or all of it once.

    data: (inputs, targets, …) as tensors, inputs alone, a `Dataset`, or a `DataLoader` or anything else that can be
        gone through again and again. What a loader yields is its own affair: its sampler says which examples a task
        has, in training and when it ends.
    batch_size: of the batches that are made here.
    generator: shuffles what is batched here. Asked for when the first batch is, so that what needs no shuffling draws
        nothing.
    device: where batches go.
    """

    def __init__(
        self, data: Any, batch_size: int, generator: Callable[[], torch.Generator], device: torch.device
    ) -> None:
        self.data, self.batch_size, self.generator, self.device = _understood(data), batch_size, generator, device
        self._endless: Iterator[Any] | None = None

    @property
    def missing(self) -> bool:
        """True if no data was given."""
        return isinstance(self.data, Missing)

    def __iter__(self) -> Source:
        return self

    def __next__(self) -> Any:
        """The next batch, wherever training stopped."""
        if self._endless is None:
            self._endless = self._batches()
        return to_device(next(self._endless), self.device)

    def _batches(self) -> Iterator[Any]:
        if not isinstance(self.data, tuple):
            return _again_and_again(self._loader(shuffle=True))
        rows = torch.arange(len(self.data[0]), device=self.data[0].device)
        order = Batches(rows, rows, min(self.batch_size, len(rows)), self.generator())
        return (_one_or_all(tuple(part.index_select(0, index) for part in self.data)) for index, _ in order)

    def per_epoch(self) -> int:
        """How many batches go through all the data once."""
        if isinstance(self.data, tuple):
            return -(-len(self.data[0]) // self.batch_size)
        try:
            return len(self._loader(shuffle=True))
        except TypeError:
            raise TypeError(f"{self.data!r} does not know its length: say how many steps, not epochs") from None

    def in_order(self) -> Iterator[Any]:
        """All the data once, in the order that it has by itself; a loader's batches as it yields them."""
        if isinstance(self.data, tuple):
            parts = (torch.split(part, IN_ORDER) for part in self.data)
            return (to_device(_one_or_all(batch), self.device) for batch in zip(*parts, strict=True))
        return (to_device(batch, self.device) for batch in self._loader(shuffle=False))

    def some_rows(self, most: int, of: Callable[[Any], Any] = lambda batch: batch) -> list[Any]:
        """Some rows of the data, about as many as this and fewer than twice as many, evenly spaced; as batches.

        of: what of a batch is wanted.
        """
        if isinstance(self.data, tuple):
            stride = max(1, len(self.data[0]) // most)
            return [to_device(of(_one_or_all(tuple(part[::stride] for part in self.data))), self.device)]
        kept: list[tuple[Tensor, Any]] = []
        stride, seen = 1, 0
        for batch in map(of, self.in_order()):
            place = torch.arange(-seen % stride, count_rows(batch), stride)
            kept.append((place + seen, take_rows(batch, place)))
            seen += count_rows(batch)
            if sum(len(places) for places, _ in kept) >= 2 * most:
                stride *= 2
                even = [places % stride == 0 for places, _ in kept]
                kept = [(n[e], take_rows(b, e.nonzero())) for (n, b), e in zip(kept, even, strict=True)]
        return [batch for places, batch in kept if len(places)]

    def some_of(self, parts: Callable[[Any], tuple[Tensor, ...]], most: int) -> tuple[Tensor, ...]:
        """The same of several parts of a batch that belong together, such as inputs and labels."""
        return tuple(torch.cat(column) for column in zip(*self.some_rows(most, parts), strict=True))

    def some(self, inputs: Callable[[Any], Tensor], most: int) -> Tensor:
        """The same of the inputs alone."""
        return self.some_of(lambda batch: (inputs(batch),), most)[0]

    def _loader(self, shuffle: bool) -> Any:
        if isinstance(self.data, Dataset):
            if isinstance(self.data, IterableDataset):
                return DataLoader(self.data, self.batch_size)
            generator = self.generator() if shuffle else None
            return DataLoader(self.data, self.batch_size, shuffle=shuffle, generator=generator)
        return self.data


class Missing:
    """Data that was not given: an error that says so, as soon as somebody looks at it."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __iter__(self) -> Iterator[Any]:
        raise ValueError(self.message)


def _understood(data: Any) -> Any:
    """Tensors as a tuple of equal lengths; everything else as it is, if it can be gone through more than once."""
    if isinstance(data, Source):
        return data.data
    if isinstance(data, Tensor):
        data = (data,)
    if isinstance(data, (tuple, list)) and data and all(isinstance(part, Tensor) for part in data):
        lengths = [len(part) for part in data]
        if len(set(lengths)) > 1 or not lengths[0]:
            raise ValueError(f"expected inputs and as many targets, at least one of each, got {lengths} of them")
        return tuple(data)
    if isinstance(data, Iterator) or not (isinstance(data, (Dataset, Iterable)) or hasattr(data, "__getitem__")):
        kind = type(data).__name__
        raise TypeError(f"data must be tensors, a Dataset or a DataLoader, gone through more than once, got {kind}")
    return data


def _again_and_again(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        number, batches, last = 0, iter(loader), _length(loader)
        for number, batch in enumerate(batches, 1):
            # samplers draw once more when they come to their end, which a loop of one's own reaches with every epoch
            further = list(islice(batches, 1)) if number == last else []
            yield batch
            yield from further
        if not number:
            raise ValueError(f"{loader!r} has no batches")


def _length(loader: Iterable[Any]) -> int | None:
    """How many batches there are; None where asking for one more may have an effect."""
    return len(loader) if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) else None


def _one_or_all(batch: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return batch[0] if len(batch) == 1 else batch


# --- what is drawn ----------------------------------------------------------------------------------------------

PURPOSES = ("batches", "layers", "weights", "labels", "revived", "layers at the end")
"""Purposes of a learner's random numbers that have kept their seeds; those of other names are derived from the name."""


def number_of(purpose: str) -> int:
    """Purposes as numbers: the known ones by their place, others by their name."""
    return PURPOSES.index(purpose) if purpose in PURPOSES else zlib.crc32(purpose.encode())


def derived_seed(seed: int, *parts: int) -> int:
    """A seed for one purpose, such as the batches of task 17, so that it needs nothing that was drawn before it."""
    return int(np.random.SeedSequence([seed, *parts]).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Let layers that know torch's global generator only (dropout) draw from this seed, and put its state back."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the other devices too, for good
        for each in devices:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield
