"""Batches of pictures that are decoded as they are needed, by worker processes if asked.

Batches are the same whatever the number of ranks and of worker processes, and resume at any batch: the order of an
epoch depends on (seed, epoch) alone, and the crop of a picture on (seed, epoch, row).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from powerprop_paper.data.imagenet import Pictures
from powerprop_paper.data.pictures import centre_crop, random_resized_crop, standardise
from powerprop_paper.train.distributed import ALONE, Ranks

__all__ = ["PictureBatches", "epoch_order", "evaluation_batches"]

MIX = 64
"""Tar files whose pictures are shuffled together: reads stay near each other, and the order is random enough."""

Item = tuple[int, int]
"""Epoch and row; the epoch -1 stands for evaluation."""


def seeded(*numbers: int) -> torch.Generator:
    """A generator whose numbers depend on all of these."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 6364136223846793005 + number + 1442695040888963407) % 2**63
    return torch.Generator().manual_seed(mixed)


def epoch_order(blocks: Sequence[int], seed: int, epoch: int, mix: int = MIX) -> Tensor:
    """All rows in random order: the blocks shuffled, then the rows of every `mix` blocks that follow each other."""
    generator = seeded(seed, epoch)
    starts = list(accumulate(blocks, initial=0))
    order = torch.randperm(len(blocks), generator=generator).tolist()
    parts = []
    for first in range(0, len(order), mix):
        rows = torch.cat([torch.arange(starts[b], starts[b] + blocks[b]) for b in order[first : first + mix]])
        parts.append(rows[torch.randperm(len(rows), generator=generator)])
    return torch.cat(parts)


class Decoded(Dataset[tuple[Tensor, Tensor]]):
    """Cropped pictures by (epoch, row): at random in training, the middle in evaluation."""

    def __init__(self, pictures: Pictures, size: int, resize: int, seed: int) -> None:
        self.pictures, self.size, self.resize, self.seed = pictures, size, resize, seed

    def __getitem__(self, item: Item) -> tuple[Tensor, Tensor]:
        epoch, row = item
        data = self.pictures.read(row)
        try:
            if epoch < 0:
                x = centre_crop(data, self.size, self.resize)
            else:
                x = random_resized_crop(data, self.size, seeded(self.seed, epoch, row))
        except OSError as error:
            where = self.pictures.origin(row)
            raise ValueError(f"{where} cannot be decoded ({error}); put an intact copy in its place") from None
        return x, self.pictures.labels[row]


class PictureBatches:
    """Endless shuffled training batches (x, y) of this rank, standardised, on a device.

    Args:
        batch: pictures per step over all ranks.
        size: of the square crops.
        seed: decides order and crops.
        loaders: worker processes of this rank that read and decode; 0 does it here.
    """

    def __init__(
        self,
        pictures: Pictures,
        batch: int,
        size: int,
        seed: int,
        *,
        device: torch.device | str = "cpu",
        ranks: Ranks = ALONE,
        loaders: int = 0,
    ) -> None:
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        ranks.share(batch)
        self.pictures, self.batch, self.seed, self.ranks, self.loaders = pictures, batch, seed, ranks, loaders
        self.device = torch.device(device)
        self.decoded = Decoded(pictures, size, size, seed)
        self.step = 0
        self._epoch, self._order = -1, Tensor()
        self._stream: Iterator[tuple[Tensor, Tensor]] | None = None

    def __iter__(self) -> PictureBatches:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self._stream is None:
            self._stream = _load(self.decoded, _Remaining(self), self.loaders, self.device)
        x, y = next(self._stream)
        self.step += 1
        return x, y

    def items(self, step: int) -> list[Item]:
        """What this rank decodes at a step: its share of the next `batch` places of the endless order."""
        share = self.ranks.share(self.batch)
        places = range(step * self.batch, (step + 1) * self.batch)[share]
        return [(place // len(self.pictures), self._row(place)) for place in places]

    def _row(self, place: int) -> int:
        epoch, position = divmod(place, len(self.pictures))
        if self._epoch != epoch:
            self._epoch, self._order = epoch, epoch_order(self.pictures.blocks, self.seed, epoch)
        return int(self._order[position])

    def state_dict(self) -> dict[str, Any]:
        """The number of batches taken, and what the order depends on."""
        return {"step": self.step, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the batch after those that were taken, on any number of ranks."""
        if (there := {k: v for k, v in state.items() if k != "step"}) != self._identity():
            raise ValueError(f"the state is of batches with {there}, these have {self._identity()}")
        self.step, self._stream = state["step"], None

    def _identity(self) -> dict[str, int]:
        return {"pictures": len(self.pictures), "batch": self.batch, "seed": self.seed}


class _Remaining:
    """The lists of items from the current step on, for the loader, which asks ahead."""

    def __init__(self, batches: PictureBatches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[Item]]:
        step = self.batches.step
        while True:
            yield self.batches.items(step)
            step += 1


def evaluation_batches(
    pictures: Pictures,
    batch: int,
    size: int,
    resize: int,
    *,
    device: torch.device | str = "cpu",
    ranks: Ranks = ALONE,
    loaders: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every picture once, the middle of it, in order; each rank gets every `world`-th one."""
    rows = range(ranks.rank, len(pictures), ranks.world)
    lists = [[(-1, row) for row in rows[first : first + batch]] for first in range(0, len(rows), batch)]
    return _load(Decoded(pictures, size, resize, 0), lists, loaders, torch.device(device))


def _load(
    decoded: Decoded, lists: Iterable[list[Item]], loaders: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    loader = DataLoader(
        decoded,
        batch_sampler=lists,
        num_workers=loaders,
        pin_memory=device.type == "cuda",
        multiprocessing_context=_start_method() if loaders else None,
        generator=torch.Generator(),  # the loader draws a seed for its workers; not from the global generator
    )
    for x, y in loader:
        yield standardise(x, device), y.to(device, non_blocking=True)


def _start_method() -> str:
    """Not fork: this process has threads (CUDA, collectives) that a copy would lack."""
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
