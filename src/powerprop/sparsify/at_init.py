"""Masks chosen once, before training: Static (at random) and SNIP (by the first gradient)."""

from __future__ import annotations

from dataclasses import dataclass

from powerprop.optim import Powerprop
from powerprop.sparsify.base import Method, set_mask

__all__ = ["SNIP", "Static"]


@dataclass(eq=False)
class Static(Method):
    """A random mask, fixed for all of training: the baseline that every dynamic method must beat."""


@dataclass(eq=False)
class SNIP(Method):
    """Keep the weights to which the loss of the first batch is most sensitive (Lee et al. 2019, equation 5).

        score = |w · ∂L/∂w|

    The first step is the masking; no weight moves in it. All weights are ranked together unless `distribution` says
    otherwise.
    """

    distribution: str = "global"

    def begin(self, optimizer: Powerprop) -> None:
        """Dense until the first gradient is there."""

    def before_step(self, optimizer: Powerprop) -> bool:
        """The first step becomes the masking."""
        super().before_step(optimizer)
        if self.step > 1:
            return False
        scores = {}
        for name, master in optimizer.masters.items():
            if master.param.grad is None:
                raise ValueError(f"SNIP needs the first gradient, but {name!r} has none: call backward() before step()")
            scores[name] = (master.param.grad * master.param).abs()
        for name, mask in self.top(scores).items():
            set_mask(optimizer, name, mask)
        return True
