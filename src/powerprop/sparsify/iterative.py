"""Gradual magnitude pruning: dense at first, sparser and sparser along a cubic curve."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from powerprop.allocate import kept, overrides
from powerprop.entries import count
from powerprop.optim import Powerprop
from powerprop.schedules import Moment, cubic, moment, period
from powerprop.sparsify.base import Method, active, set_mask, top_among
from powerprop.sparsify.pattern import fill
from powerprop.sparsify.prune import allocate

__all__ = ["IterativePruning"]


@dataclass(eq=False)
class IterativePruning(Method):
    """Remove the smallest weights every so often and train on with the rest (Zhu & Gupta 2017; Gale et al. 2019).

        s_t = s · (1 - (1 - (t - start)/(stop - start))³)

    Every layer follows this curve to its own final sparsity. A removed weight never comes back.

    start, stop: when pruning begins and when it is done: steps, or fractions of `steps`. Only steps taken count:
        leave room after `stop` for those that a `GradScaler` skips, or training ends before the asked sparsity.
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
        self.final: dict[tuple[str, ...], int] = {}

    def begin(self, optimizer: Powerprop) -> None:
        """Dense; but it is settled which layers are ranked together, and how many of their weights stay at the end."""
        weights = {n: m.param for n, m in optimizer.masters.items()}
        if self.distribution != "global":
            counts = allocate(weights, self.sparsity, self.distribution, self.layers)
            self.final = {(n,): keeps for n, keeps in counts.items()}
            return
        own = overrides({n: w.shape for n, w in weights.items()}, self.sparsity, self.layers)
        rest = tuple(n for n in weights if n not in own)
        self.final = {(n,): keeps for n, keeps in own.items()}
        if rest:
            self.final[rest] = kept(sum(weights[n].numel() for n in rest), self.sparsity)

    def after_step(self, optimizer: Powerprop) -> None:
        """Prune when it is time."""
        due = self.first < self.step < self.last and (self.step - self.first) % self.every == 0
        if due or self.step == self.last:
            for names, final in self.final.items():
                self._prune(optimizer, names, final)

    def _prune(self, optimizer: Powerprop, names: tuple[str, ...], final: int) -> None:
        """Keep the largest of the weights still there, as many as the curve allows now."""
        masters = [optimizer.masters[n] for n in names]
        weight = torch.cat([m.weight.detach().flatten() for m in masters])
        alive = torch.cat([active(m).flatten() for m in masters])
        if self.pattern is not None and final < weight.numel():
            stays = [fill(torch.zeros_like(m.param, dtype=torch.bool), m.weight.abs(), self.pattern) for m in masters]
            weight.masked_fill_(torch.cat([mask.flatten() for mask in stays]), float("inf"))
        wanted = weight.numel() - round((weight.numel() - final) * self.progress(self.step))
        there = count(alive)  # a training that goes on for longer than planned is behind what was pruned already
        masks = torch.split(top_among(weight, alive, min(wanted, there)), [m.param.numel() for m in masters])
        for name, mask, master in zip(names, masks, masters, strict=True):
            set_mask(optimizer, name, mask.view(master.param.shape))
