"""Top-KAST: a sparse forward pass, a less sparse backward pass, and a dense master that only the optimiser holds."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from powerprop.allocate import check_sparsity
from powerprop.mask_entries import count
from powerprop.optim import Powerprop
from powerprop.schedules import StepOrFraction, number, step_of
from powerprop.sparsify.base import Method, step_count
from powerprop.sparsify.prune import top_k_masks
from powerprop.weight import WeightState

__all__ = ["TopKAST"]


@dataclass(eq=False)
class TopKAST(Method):
    """Always sparse: use the top weights, train a few more, and let these compete by magnitude (Jayakumar et al. 2020).

        A = top D of |θ| is active,    B = top D + M of |θ| is trained, B ⊇ A,
        θ ← θ - lr·λ·θ on A,    θ ← θ - lr·λ/D·θ on B∖A

    The model holds θ ⊙ A; the values outside A live in the optimiser. The exploration decay is decoupled from the base
    optimiser and its momentum, and like every other move it reaches φ through the slope α|φ|^(α-1) if α > 1: leave the
    base optimiser's own weight decay at zero for these weights.

    backward_sparsity: of B, from 0 (all weights are trained) to `sparsity` (no exploration).
    decay: λ.
    interval: steps between refreshes of A and B. In between, nothing holds back the weights that are trained but not
        used: they outgrow those that are, and the loss jumps at the next refresh. The papers' 100 needs large batches
        and low rates.
    freeze: when A and B stay for good: a step, or a fraction of `steps`; None is never.

    Examples:
        >>> optimizer = pp.Powerprop(base, model, alpha=1.5, sparsify=pp.TopKAST(0.9, backward_sparsity=0.5))
        >>> round(optimizer.active.sparsity(), 2)
        0.9
    """

    label: ClassVar[str] = "Top-KAST"
    look: ClassVar[tuple[str, str]] = ("orange", "h")
    explores: ClassVar[bool] = True
    CHOICES: ClassVar[tuple[str, ...]] = (*Method.CHOICES, "backward_sparsity")

    backward_sparsity: float = 0.0
    decay: float = 1e-4
    interval: int = 1
    freeze: StepOrFraction | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.backward_sparsity = check_sparsity(self.backward_sparsity, "backward_sparsity")
        if self.backward_sparsity > self.sparsity:
            raise ValueError(
                f"backward_sparsity must be at most sparsity={self.sparsity:g}, got {self.backward_sparsity!r}"
            )
        if not 0 <= number(self.decay, "decay") < math.inf:
            raise ValueError(f"decay must be at least 0 and finite, got {self.decay!r}")
        self.interval = step_count(self.interval, "interval")
        self.last = None if self.freeze is None else step_of(self.freeze, self.steps, "freeze")
        self.densities: dict[str, tuple[weakref.ref[Tensor], float]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "densities": {}}

    def attach(self, optimizer: Powerprop) -> None:
        """Refuse a base optimiser without a rate for the decay; then as every method."""
        if self.decay > 0 and any("lr" not in group for group in optimizer.param_groups):
            raise ValueError(
                f"{type(self).__name__}(decay={self.decay!r}) takes lr·decay·θ off at each step, "
                f"but the base optimiser {type(optimizer.base).__name__} has no 'lr' in its groups; use decay=0"
            )
        super().attach(optimizer)

    def begin(self, optimizer: Powerprop) -> None:
        """The largest of the initial weights."""
        self.refresh(optimizer)

    def before_step(self, optimizer: Powerprop) -> bool:
        """Let the exploration decay follow the masks and the learning rate: λ on A and λ/D on the rest of B."""
        super().before_step(optimizer)
        if self.decay > 0:
            rates = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
            for master in optimizer.masters.values():
                if master.active is not None:
                    taken = rates[id(master.param)] * self.decay
                    master.decay = taken, taken / self._density(master)
        return False

    def _density(self, master: WeightState) -> float:
        """D of one layer; counted once for each mask."""
        mask = master.active
        assert mask is not None
        known = self.densities.get(master.name)
        if known is None or known[0]() is not mask:
            known = self.densities[master.name] = (weakref.ref(mask), max(1, count(mask)) / master.numel)
        return known[1]

    @property
    def due(self) -> bool:
        """True if A and B are chosen anew after the next step."""
        return self._is_time(self.step + 1)

    def _is_time(self, step: int) -> bool:
        return step % self.interval == 0 and (self.last is None or step < self.last)

    def after_step(self, optimizer: Powerprop) -> None:
        """Choose A and B anew when it is time."""
        if self._is_time(self.step):
            self.refresh(optimizer)

    def refresh(self, optimizer: Powerprop) -> None:
        """A and B by the magnitudes of now. Weights that enter or leave B lose their momentum."""
        for master in optimizer.masters.values():
            master.sync()
        sizes = {n: m.theta().abs() for n, m in optimizer.masters.items()}
        limit = self.backward_sparsity
        layers = {n: rule if callable(rule) else min(rule, limit) for n, rule in (self.layers or {}).items()}
        forward, backward = self.top(sizes), top_k_masks(sizes, limit, self.distribution, layers)
        for name, master in optimizer.masters.items():
            trained = backward[name] | forward[name]
            everything = count(trained) == trained.numel()
            if master.trainable is not None or not everything:
                optimizer.reset_state(name, ~trained if master.trainable is None else trained ^ master.trainable)
            master.set_masks(forward[name], None if everything else trained, keep=True)
