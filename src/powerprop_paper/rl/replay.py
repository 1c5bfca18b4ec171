"""What happened in an environment, to learn from again: first in, first out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Replay", "Transitions"]


class Transitions(NamedTuple):
    """Steps of an environment, a row for each."""

    observation: Tensor
    action: Tensor
    reward: Tensor
    following: Tensor
    """The observation afterwards."""
    ended: Tensor
    """1 where the episode came to its own end, so that nothing follows; 0 also where it was merely cut off."""


class Replay:
    """The latest steps of a task; of older ones than there is room for, the oldest go first.

    A transition is one row of one tensor, so that a batch is one look-up.

    capacity: the most transitions; memory is taken as they come.
    """

    def __init__(self, observations: int, actions: int, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"replay must have room for at least one transition, got {capacity}")
        self.parts = [observations, actions, 1, observations, 1]
        self.capacity = capacity
        self.rows = torch.empty(0, sum(self.parts))
        self.seen = 0

    def __len__(self) -> int:
        return min(self.seen, self.capacity)

    def add(
        self, observation: NDArray[np.float32], action: NDArray[np.float32], reward: float,
        following: NDArray[np.float32], ended: bool,
    ) -> None:  # fmt: skip
        """One step of the environment."""
        row = np.concatenate([observation, action, [reward], following, [ended]], dtype=np.float32)
        place = self.seen % self.capacity
        if place == len(self.rows):
            more = min(max(1024, len(self.rows)), self.capacity - len(self.rows))
            self.rows = torch.cat([self.rows, self.rows.new_empty(more, self.rows.shape[1])])
        self.rows[place] = torch.from_numpy(row)
        self.seen += 1

    def sample(self, count: int, generator: torch.Generator) -> Transitions:
        """Some transitions, each drawn from all."""
        if not self.seen:
            raise ValueError(f"there is nothing to draw {count} transitions from: nothing has happened yet")
        return self._apart(self.rows.index_select(0, torch.randint(len(self), (count,), generator=generator)))

    def all(self) -> Transitions:
        """Everything that is there."""
        return self._apart(self.rows[: len(self)])

    def _apart(self, rows: Tensor) -> Transitions:
        observation, action, reward, following, ended = torch.split(rows, self.parts, 1)
        return Transitions(observation, action, reward[:, 0], following, ended[:, 0])

    def state(self) -> dict[str, Tensor]:
        """The rows, and how many came by."""
        return {"rows": self.rows[: len(self)].clone(), "seen": torch.tensor(self.seen)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """What `state` gave."""
        rows, seen = state["rows"], int(state["seen"])
        if rows.ndim != 2 or rows.shape[1] != sum(self.parts) or len(rows) != min(seen, self.capacity):
            wanted = (min(seen, self.capacity), sum(self.parts))
            raise ValueError(f"the saved replay must have rows of {wanted}, got {tuple(rows.shape)}")
        self.rows, self.seen = rows.clone(), seen
