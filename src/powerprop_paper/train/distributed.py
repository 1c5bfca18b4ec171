"""Training on several processes through torchrun: one model, one checkpoint, the batch shared out.

Every rank holds the same weights and masks. DDP averages the gradients, so ranks that each see their part of a batch
take the step that one process would take with all of it.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")


class BatchSource(Protocol):
    """An endless iterator of (inputs, labels) whose position is part of a checkpoint."""

    def __next__(self) -> tuple[Tensor, Tensor]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Ranks:
    """This process (`rank`) among the `world` processes that train together; alone, nothing is communicated."""

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank must be in [0, {self.world}), got {self.rank}")

    @property
    def main(self) -> bool:
        """True for the one process that writes files and shows progress."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model to call in training: gradients are averaged over the ranks, buffers are those of rank 0."""
        if self.world == 1 or not any(p.requires_grad for p in model.parameters()):
            return model
        device = next(model.parameters()).device
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world > 1:
            dist.barrier()

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the ranks, the same bits on each."""
        total = value.detach().clone()
        if self.world > 1:
            dist.all_reduce(total)
        return total

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the ranks, the same bits on each."""
        return self.sum(value) / self.world

    def share(self, count: int) -> slice:
        """This rank's stretch of `count` rows; all stretches have the same length."""
        if count % self.world:
            raise ValueError(f"{count} rows cannot be shared equally by {self.world} ranks; choose a multiple of it")
        size = count // self.world
        return slice(self.rank * size, (self.rank + 1) * size)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def agree(self, value: int, what: str) -> int:
        """The value, if it is the same on all ranks; an error that shows all of them if not."""
        values = self.gather(value)
        if len(set(values)) > 1:
            raise ValueError(f"{what} differs between the ranks: {values}; they must see the same files")
        return value

    def from_main(self, value: T) -> T:
        """The value that rank 0 has."""
        if self.world == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        received: T = box[0]
        return received

    @torch.no_grad()
    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give every rank the buffers (batch norm's statistics) of rank 0."""
        if self.world > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)


ALONE = Ranks()
"""One process."""


class RankBatches:
    """This rank's part of every batch of a source that is the same on all ranks (same data, same seed).

    The state is the source's, so that a run can go on with another number of ranks.
    """

    def __init__(self, batches: BatchSource, ranks: Ranks) -> None:
        self.batches, self.ranks = batches, ranks

    def __iter__(self) -> RankBatches:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        x, y = next(self.batches)
        mine = self.ranks.share(len(x))
        return x[mine], y[mine]

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands."""
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the source to where it stood."""
        self.batches.load_state_dict(state)


def under_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """True if torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in environment and "LOCAL_RANK" in environment


def current_ranks() -> Ranks:
    """This process in the process group that is open, or alone."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    return ALONE


def is_main() -> bool:
    """True for the rank that writes and shows, also before the ranks have joined; True without torchrun."""
    return os.environ.get("RANK", "0") == "0" or not under_torchrun()


def local_device() -> torch.device:
    """This rank's own GPU, counted within its machine, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local, have = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= have:
        raise ValueError(
            f"rank {local} of this machine has no GPU of its own: it has {have}; use --nproc-per-node {have}"
        )
    return torch.device("cuda", local)


@contextmanager
def process_group() -> Iterator[Ranks]:
    """Join the other processes that torchrun started (NCCL on GPUs, else gloo); without torchrun, be alone."""
    if not under_torchrun():
        yield ALONE
        return
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    yield current_ranks()
    # Not after an error: leaving the group would wait for ranks that may be gone; torchrun ends the others.
    dist.barrier()
    gc.collect()  # wrapped models that are still around must not outlive the group
    dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End a rank at once: everything is written, and torch's threads can abort an orderly exit of the interpreter."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
