"""Gradual magnitude pruning: dense at first, sparser and sparser along a cubic curve."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from powerprop.allocate import overrides
from powerprop.optim import Powerprop
from powerprop.schedules import Moment, cubic, moment, period
from powerprop.sparsify.base import Method, active, set_mask
from powerprop.sparsify.prune import allocate, top_k, top_k_masks

__all__ = ["IterativePruning"]


@dataclass(eq=False)
class IterativePruning(Method):
    """Remove the smallest weights every so often and train on with the rest (Zhu & Gupta 2017; Gale et al. 2019).

        s_t = s · (1 - (1 - (t - start)/(stop - start))³)

    Every layer follows this curve to its own final sparsity. A removed weight never comes back.

    start, stop: when pruning begins and when it is done: steps, or fractions of `steps`.
    interval: between prunings: steps, or a fraction of `steps`; by default the paper's 2,000 of 32,000.
    """

    start: Moment = 0.2
    stop: Moment = 0.8
    interval: Moment = 1 / 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.first, self.last = moment(self.start, self.steps, "start"), moment(self.stop, self.steps, "stop")
        self.every = period(self.interval, self.steps)
        if not self.first < self.last:
            raise ValueError(f"start must come before stop, got start={self.start!r}, stop={self.stop!r}")
        self.progress = cubic(0.0, 1.0, self.first, self.last)
        self.final: dict[str, int] = {}

    def begin(self, optimizer: Powerprop) -> None:
        """Dense; but how many weights each layer keeps at the end is settled, unless all are ranked together."""
        weights = {n: m.param for n, m in optimizer.masters.items()}
        if self.distribution == "global":
            self.final = overrides({n: w.shape for n, w in weights.items()}, self.sparsity, self.layers)
        else:
            self.final = allocate(weights, self.sparsity, self.distribution, self.layers)

    def after_step(self, optimizer: Powerprop) -> None:
        """Prune when it is time."""
        due = self.first < self.step < self.last and (self.step - self.first) % self.every == 0
        if due or self.step == self.last:
            for name, mask in self.masks(optimizer, self.progress(self.step)).items():
                set_mask(optimizer, name, mask)

    def masks(self, optimizer: Powerprop, progress: float) -> dict[str, Tensor]:
        """The largest of the weights still there, at this fraction of the way to the final sparsity."""
        sizes = {n: m.weight.detach().abs().masked_fill_(~active(m), -1) for n, m in optimizer.masters.items()}
        alone = {n: top_k(sizes[n], _on_the_way(sizes[n].numel(), k, progress)) for n, k in self.final.items()}
        rest = {n: s for n, s in sizes.items() if n not in alone}
        return alone | dict(top_k_masks(rest, self.sparsity * progress, "global"))


def _on_the_way(size: int, final: int, progress: float) -> int:
    return size - round((size - final) * progress)
