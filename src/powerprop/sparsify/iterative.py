"""Gradual magnitude pruning: dense at first, sparser and sparser along a cubic curve."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from powerprop.allocate import kept, settled_counts
from powerprop.mask_entries import count
from powerprop.optim import Powerprop
from powerprop.schedules import StepOrFraction, cubic, period, step_of
from powerprop.sparsify.base import Method, active, refuse_nan, set_mask, top_among
from powerprop.sparsify.pattern import fill

__all__ = ["IterativePruning"]


@dataclass(eq=False)
class IterativePruning(Method):
    """Remove the smallest weights every so often and train on with the rest (Zhu & Gupta 2017; Gale et al. 2019).

        s_t = s · (1 - (1 - (t - start)/(stop - start))³)

    Every layer follows this curve to its own final sparsity. A removed weight never comes back.

    start, stop: when pruning begins and when it is done: steps, or fractions of `steps`. Only steps taken count:
        leave room after `stop` for those that a `GradScaler` skips, or training ends before the asked sparsity.
    interval: between prunings: steps, or a fraction of `steps`; by default the paper's 2,000 of 32,000.

    Examples:
        >>> optimizer = pp.Powerprop(base, model, alpha=1.5, sparsify=pp.IterativePruning(0.9, steps=1_000))
    """

    label: ClassVar[str] = "Iterative pruning"
    look: ClassVar[tuple[str, str]] = ("green", "s")

    start: StepOrFraction = 0.2
    stop: StepOrFraction = 0.8
    interval: StepOrFraction = 1 / 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.first, self.last = step_of(self.start, self.steps, "start"), step_of(self.stop, self.steps, "stop")
        self.every = period(self.interval, self.steps)
        if not self.first < self.last:
            raise ValueError(f"start must come before stop, got start={self.start!r}, stop={self.stop!r}")
        self.progress = cubic(0.0, 1.0, self.first, self.last)
        self.final: dict[tuple[str, ...], int] = {}

    def attach(self, optimizer: Powerprop) -> None:
        """Warn if the pruning is not gradual; then as every method."""
        if self.first + self.every >= self.last:
            warnings.warn(
                f"IterativePruning prunes all at once, at step {self.last} (stop={self.stop!r}): its interval of "
                f"{self.every} steps does not fit in between it and step {self.first} (start={self.start!r})",
                stacklevel=3,
            )
        super().attach(optimizer)

    def begin(self, optimizer: Powerprop) -> None:
        """Dense; but it is settled which layers are ranked together, and how many of their weights stay at the end."""
        shapes = {n: m.param.shape for n, m in optimizer.masters.items()}
        counts = settled_counts(shapes, self.sparsity, self.distribution, self.layers)
        self.final = {(n,): keeps for n, keeps in counts.items()}
        if rest := tuple(n for n in shapes if n not in counts):
            self.final[rest] = kept(sum(shapes[n].numel() for n in rest), self.sparsity)

    @property
    def due(self) -> bool:
        """True if the next step ends with a pruning."""
        return self._is_time(self.step + 1)

    def _is_time(self, step: int) -> bool:
        return step == self.last or (self.first < step < self.last and (step - self.first) % self.every == 0)

    def after_step(self, optimizer: Powerprop) -> None:
        """Prune when it is time; all layers are settled before the first one is changed."""
        if self._is_time(self.step):
            masks = [mask for names, final in self.final.items() for mask in self._masks(optimizer, names, final)]
            for name, mask in masks:
                set_mask(optimizer, name, mask)

    def _masks(self, optimizer: Powerprop, names: tuple[str, ...], final: int) -> Iterator[tuple[str, Tensor]]:
        """The largest of the weights still there, as many as the curve allows now."""
        masters = [optimizer.masters[n] for n in names]
        for master in masters:
            refuse_nan(master.name, master.weight.detach(), "weights")
        weight = torch.cat([m.weight.detach().flatten() for m in masters])
        alive = torch.cat([active(m).flatten() for m in masters])
        if self.pattern is not None and final < weight.numel():
            stays = [fill(torch.zeros_like(m.param, dtype=torch.bool), m.weight.abs(), self.pattern) for m in masters]
            weight.masked_fill_(torch.cat([mask.flatten() for mask in stays]), float("inf"))
        wanted = weight.numel() - round((weight.numel() - final) * self.progress(self.step))
        there = count(alive)  # a training that goes on for longer than planned is behind what was pruned already
        masks = torch.split(top_among(weight, alive, min(wanted, there)), [m.param.numel() for m in masters])
        for name, mask, master in zip(names, masks, masters, strict=True):
            yield name, mask.view(master.param.shape)
