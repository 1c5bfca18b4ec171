"""DSR: one global threshold that adapts itself, and regrowth where weights survive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from powerprop.mask_entries import count, places
from powerprop.optim import Powerprop
from powerprop.schedules import Schedule, constant
from powerprop.sparsify.base import active, from_places
from powerprop.sparsify.dynamic import SET
from powerprop.sparsify.prune import top_k
from powerprop.weight import WeightState

__all__ = ["DSR"]

_TOLERANCE = 0.1


@dataclass(eq=False)
class DSR(SET):
    """Dynamic sparse reparameterisation (Mostafa & Wang 2019, algorithm 1).

        drop |w| < H;    H ← 2H if fewer than 0.9·N were dropped, H/2 if more than 1.1·N;
        grow as many at random, layer by layer in proportion to the surviving weights

    One threshold serves all layers, so that the budget moves between them; at least one weight of each layer stays.
    Layers with a rule of their own in `layers` keep their count.

    fraction: N as a fraction of the kept weights; constant, or a schedule.
    threshold: the first H.

    Examples:
        >>> optimizer = pp.Powerprop(base, model, alpha=1.5, sparsify=pp.DSR(0.9, steps=1_000))
    """

    label: ClassVar[str] = "DSR"
    look: ClassVar[tuple[str, str]] = ("indigo", ">")
    redistributes: ClassVar[bool] = True
    moves_in_place: ClassVar[bool] = True
    STATE: ClassVar[tuple[str, ...]] = (*SET.STATE, "height")

    fraction: float | Schedule = 0.05
    threshold: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.threshold > 0:
            raise ValueError(f"threshold must be more than 0, got {self.threshold!r}")
        self.height = float(self.threshold)

    def schedule(self, fraction: float) -> Schedule:
        """The same target at every update: the threshold does the adapting."""
        return constant(fraction)

    def drop(self, masters: Mapping[str, WeightState]) -> dict[str, Tensor]:
        """All that reach the threshold survive; then the threshold adapts to how many did not."""
        survivors = {n: _reaching(m, self.height) for n, m in masters.items()}
        before = sum(count(active(m)) for m in masters.values())
        dropped = before - sum(count(s) for s in survivors.values())
        target = self.rate(self.step) * before
        if dropped < (1 - _TOLERANCE) * target:
            self.height *= 2
        elif dropped > (1 + _TOLERANCE) * target:
            self.height /= 2
        return survivors

    def spread(self, optimizer: Powerprop, survivors: Mapping[str, Tensor]) -> dict[str, int]:
        """The weights lost in all layers, shared out by the number of survivors."""
        return self.within_groups(optimizer, {n: float(count(s)) for n, s in survivors.items()}, survivors)


def _reaching(master: WeightState, height: float) -> Tensor:
    mask = active(master)
    here = places(mask)
    size = master.weight.detach().flatten().index_select(0, here).abs_()
    high = size >= height
    if not high.any():
        high = top_k(size, min(1, size.numel()))
    return from_places(here.index_select(0, places(high)), mask)
