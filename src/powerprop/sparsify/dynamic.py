"""Sparse throughout, with moving masks: every so often the smallest weights are dropped and others grown.

SET grows at random, RigL by the gradient, SNFS by the momentum. A grown weight starts at zero, as in their papers,
unless α > 1: φ = 0 would never move, so it starts with the magnitude at which the dropped weights of its layer ended.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from powerprop.allocate import apportion
from powerprop.mask_entries import count, places
from powerprop.optim import Powerprop
from powerprop.schedules import Schedule, StepOrFraction, cosine, step_of
from powerprop.sparsify.base import Method, active, refuse_nan, set_mask, step_count, top_among
from powerprop.sparsify.pattern import fill
from powerprop.weight import WeightState

__all__ = ["SET", "SNFS", "RigL"]

_MOMENTUM = 0.9


@dataclass(eq=False)
class SET(Method):
    """Sparse Evolutionary Training: drop the smallest |w| of each layer, grow as many at random (Mocanu et al. 2018).

    Every `interval`-th step is a mask update instead of a step.

    interval: steps between mask updates.
    fraction: of each layer's weights to drop, falling to 0 along a cosine; or a schedule of it.
    stop: when the masks stay for good: a step, or a fraction of `steps`.

    Examples:
        >>> optimizer = pp.Powerprop(base, model, alpha=1.5, sparsify=pp.SET(0.9, steps=1_000))
        >>> round(optimizer.active.sparsity(), 2)
        0.9
    """

    label: ClassVar[str] = "SET"
    look: ClassVar[tuple[str, str]] = ("maroon", "^")
    grows_at_random: ClassVar[bool] = True
    moves_in_place: ClassVar[bool] = True

    interval: int = 100
    fraction: float | Schedule = 0.3
    stop: StepOrFraction = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        self.interval = step_count(self.interval, "interval")
        self.last = step_of(self.stop, self.steps, "stop")
        if not callable(self.fraction) and not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {self.fraction!r}")
        self.rate = self.fraction if callable(self.fraction) else self.schedule(float(self.fraction))

    def attach(self, optimizer: Powerprop) -> None:
        """Warn if the masks never move; then as every method."""
        if self.steps is not None and min(self.last, self.steps) <= self.interval:
            warnings.warn(
                f"{type(self).__name__} never moves its masks: its first update would be at step {self.interval} "
                f"(interval), but they stay for good from step {self.last} (stop={self.stop!r}, steps={self.steps})",
                stacklevel=3,
            )
        super().attach(optimizer)

    def schedule(self, fraction: float) -> Schedule:
        """How the fraction of dropped weights develops."""
        return cosine(fraction, max(1, self.last))

    # --- what methods differ in: whom to drop, how many to grow in each layer, and whom ---------------------------

    def drop(self, masters: Mapping[str, WeightState]) -> dict[str, Tensor]:
        """Masks of the survivors: all but the smallest fraction of each layer."""
        found = {}
        for name, master in masters.items():
            kept = count(mask := active(master))
            found[name] = top_among(master.weight.detach(), mask, kept - int(kept * self.rate(self.step)))
        return found

    def spread(self, optimizer: Powerprop, survivors: Mapping[str, Tensor]) -> dict[str, int]:
        """How many weights to grow in each layer: as many as it lost."""
        return {n: count(active(optimizer.masters[n])) - count(mask) for n, mask in survivors.items()}

    def within_groups(
        self, optimizer: Powerprop, weights: Mapping[str, float], survivors: Mapping[str, Tensor]
    ) -> dict[str, int]:
        """Share out each group's lost weights among its own layers, so that the group's count stays exact."""
        counts: dict[str, int] = {}
        lost = SET.spread(self, optimizer, survivors)
        for group in self.groups or []:
            names = [n for n in group if n in survivors]
            room = {n: optimizer.masters[n].numel - count(survivors[n]) for n in names}
            counts |= apportion(sum(lost[n] for n in names), {n: weights[n] for n in names}, room)
        return counts

    def growth(self, optimizer: Powerprop, name: str) -> Tensor:
        """Whom to grow: the largest in magnitude; a grown weight has the opposite sign. Here at random."""
        return self.random(optimizer.masters[name].param, -1.0)

    def growth_in_rows(self, optimizer: Powerprop, name: str) -> Iterator[Tensor]:
        """The same for a layer that holds its active weights alone, some rows at a time."""
        pattern = optimizer.masters[name].pattern
        assert pattern is not None
        return (self.random(torch.empty(end - start, pattern.shape[1]), -1.0) for start, end in pattern.row_blocks())

    # --- the mask update ------------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """True if the next step is a mask update."""
        return (self.step + 1) % self.interval == 0 and self.step + 1 < self.last

    def needs_gradients(self, optimizer: Powerprop) -> bool:
        """To grow by, and to see which layers took part in the loss."""
        return self.due

    def before_step(self, optimizer: Powerprop) -> bool:
        """Every `interval`-th step is a mask update."""
        if not self.due:
            return super().before_step(optimizer)
        with self.undone_on_error():
            super().before_step(optimizer)
            self.update(optimizer)
        return True

    def update(self, optimizer: Powerprop) -> None:
        """Drop and grow. Layers without a gradient took no part in the loss and are left alone.

        All layers are settled before the first one is changed.
        """
        masters = {n: m for n, m in optimizer.masters.items() if m.param.grad is not None}
        for name, master in masters.items():
            refuse_nan(name, master.param.detach(), "weights")
            master.sync()
        survivors = self.drop(masters)
        counts = self.spread(optimizer, survivors)
        moves = [self._move(optimizer, n, kept, counts[n]) for n, kept in survivors.items()]
        for move in moves:
            move()

    def _move(self, optimizer: Powerprop, name: str, kept: Tensor, wanted: int) -> Callable[[], None]:
        """What settles a layer's new mask and the values of its grown weights, unless these are zero."""
        master, layout = optimizer.masters[name], optimizer.compute
        if master.pattern is not None:  # where the active weights alone are held
            assert layout is not None
            moved = layout.choose(name, kept, _refusing_nan(name, self.growth_in_rows(optimizer, name)), wanted)
            values = 0.0 if master.alpha == 1 else _grown_values(master, active(master), ~moved.stays, moved.against)
            return partial(layout.regrow, name, moved, values)
        old, against = active(master), self.growth(optimizer, name)
        refuse_nan(name, against, "gradients")
        if self.pattern is None or count(old) == old.numel():
            new = kept | top_among(against, ~kept, wanted)
        else:  # each group gets back what it lost
            new = fill(kept, against.abs(), self.pattern)
        if master.alpha == 1:
            return partial(set_mask, optimizer, name, new)
        grown = new & ~old
        values = _grown_values(master, old, old & ~new, against.flatten().index_select(0, places(grown)))

        def settle() -> None:
            set_mask(optimizer, name, new)
            master.put(grown, values)

        return settle


def _refusing_nan(name: str, blocks: Iterator[Tensor]) -> Iterator[Tensor]:
    for block in blocks:
        if block.sum().isnan():  # a sum is fast, and NaN goes through it
            refuse_nan(name, torch.cat([block, *blocks]), "gradients")
        yield block


@dataclass(eq=False)
class RigL(SET):
    """The rigged lottery: SET, but grow where the gradient is largest (Evci et al. 2020, section 3).

        drop the smallest |w|, grow the largest |∂L/∂w|

    The gradient is the dense one of the plain weight, ∂L/∂w, also for α > 1: ∂L/∂φ vanishes where φ does.

    Examples:
        >>> optimizer = pp.Powerprop(base, model, alpha=1.5, sparsify=pp.RigL(0.9, distribution="erk", steps=1_000))
        >>> round(optimizer.active.sparsity(), 2)
        0.9
    """

    label: ClassVar[str] = "RigL"
    look: ClassVar[tuple[str, str]] = ("violet", "D")
    grows_at_random: ClassVar[bool] = False
    moves_in_place: ClassVar[bool] = True

    def step_flops(self, active: float, trainable: float, dense: float) -> float:
        """One step in interval + 1 computes the gradient of all weights, to grow by."""
        return (3 * active * self.interval + 2 * active + dense) / (self.interval + 1)

    def growth(self, optimizer: Powerprop, name: str) -> Tensor:
        """Where the gradient is largest, downhill."""
        grad = optimizer.masters[name].param.grad
        assert grad is not None
        return grad

    def growth_in_rows(self, optimizer: Powerprop, name: str) -> Iterator[Tensor]:
        """From what the layer noted in the backward pass."""
        assert optimizer.compute is not None
        return optimizer.compute.gradient(name)


@dataclass(eq=False)
class SNFS(SET):
    """Sparse networks from scratch: momentum decides where weights grow and which layers get more (Dettmers 2019).

        layer's share of the regrown weights ∝ mean |momentum| of its weights,    grow the largest |momentum|

    The base optimiser's momentum serves if it keeps one; otherwise an average of the gradients is kept here, which
    costs a pass over them at every step. Layers with a rule of their own in `layers` keep their count.

    Examples:
        >>> optimizer = pp.Powerprop(base, model, alpha=1.5, sparsify=pp.SNFS(0.9, steps=1_000))
    """

    label: ClassVar[str] = "SNFS"
    look: ClassVar[tuple[str, str]] = ("azure", "p")
    redistributes: ClassVar[bool] = True
    grows_at_random: ClassVar[bool] = False
    grows_by_momentum: ClassVar[bool] = True
    STATE: ClassVar[tuple[str, ...]] = (*SET.STATE, "average")

    fraction: float | Schedule = 0.5
    stop: StepOrFraction = 1.0

    def step_flops(self, active: float, trainable: float, dense: float) -> float:
        """Momentum of all weights needs the gradient of all weights, every step."""
        return 2 * active + dense

    def __post_init__(self) -> None:
        super().__post_init__()
        self.average: dict[str, Tensor] = {}
        self.optimizer: Powerprop | None = None

    def begin(self, optimizer: Powerprop) -> None:
        """Averages begin at zero, and are given up where the base optimiser turns out to have a momentum."""
        super().begin(optimizer)
        self.optimizer = optimizer
        self.average = {n: torch.zeros_like(m.param) for n, m in optimizer.masters.items()}

    def needs_gradients(self, optimizer: Powerprop) -> bool:
        """At every step where the average is kept here."""
        masters = optimizer.masters.values()
        return self.due or any(base_momentum(optimizer, master) is None for master in masters)

    def before_step(self, optimizer: Powerprop) -> bool:
        """Keep the average up where the base optimiser has no momentum."""
        if not self.due:
            self._follow(optimizer)
        return super().before_step(optimizer)

    def update(self, optimizer: Powerprop) -> None:
        """With averages of its own until the update has succeeded."""
        self.average = {n: mean.clone() for n, mean in self.average.items()}
        self._follow(optimizer)
        for name, master in optimizer.masters.items():
            if master.param.grad is not None:
                refuse_nan(name, self.momentum(optimizer, name), "momentum")
        super().update(optimizer)

    def _follow(self, optimizer: Powerprop) -> None:
        for name, master in optimizer.masters.items():
            if base_momentum(optimizer, master) is not None:
                self.average.pop(name, None)
            elif (grad := master.param.grad) is not None:
                mean = self.average.get(name, torch.zeros_like(grad))
                self.average[name] = mean.to(grad.device).lerp_(grad, 1 - _MOMENTUM)

    def momentum(self, optimizer: Powerprop, name: str) -> Tensor:
        """The momentum of all weights of a layer, masked or not."""
        own = base_momentum(optimizer, optimizer.masters[name])
        return self.average[name] if own is None else own

    def spread(self, optimizer: Powerprop, survivors: Mapping[str, Tensor]) -> dict[str, int]:
        """The weights lost in all layers, shared out by mean |momentum|."""
        weight = {n: _mean_size(self.momentum(optimizer, n), active(optimizer.masters[n])) for n in survivors}
        return self.within_groups(optimizer, weight, survivors)

    def growth(self, optimizer: Powerprop, name: str) -> Tensor:
        """Where the momentum is largest, downhill."""
        return self.momentum(optimizer, name)

    def state_dict(self) -> dict[str, Any]:
        """Without averages of weights that have a momentum by now."""
        if (own := self.optimizer) is not None:
            self.average = {n: t for n, t in self.average.items() if base_momentum(own, own.masters[n]) is None}
        return super().state_dict()


def base_momentum(optimizer: Powerprop, master: WeightState) -> Tensor | None:
    """The base optimiser's own momentum of a weight, if it has one."""
    state = optimizer.base.state.get(master.param, {})
    found = state.get("momentum_buffer", state.get("exp_avg"))
    return found if isinstance(found, Tensor) else None


def _grown_values(master: WeightState, old: Tensor, lost: Tensor, against: Tensor) -> Tensor:
    """Grown weights have the mean magnitude of the lost ones (else the smallest of the layer; else that of a fresh
    layer), and run downhill."""
    weight = master.weight.detach()
    size = _mean_size(weight, lost)
    if size == 0:
        alive = weight.flatten().index_select(0, places(old & (weight != 0)))
        inputs = weight[0].numel() if master.pattern is None else master.pattern.shape[1]
        size = float(alive.abs().min()) if alive.numel() else max(1, inputs) ** -0.5
    wide = torch.promote_types(against.dtype, torch.float32)  # half precision would round a small size to zero
    return torch.full_like(against, size, dtype=wide).copysign_(-against)


def _mean_size(values: Tensor, mask: Tensor) -> float:
    chosen = values.flatten().index_select(0, places(mask))
    return float(chosen.abs().mean()) if chosen.numel() else 0.0
