"""Masks chosen once, before training: Static (at random) and SNIP (by the first gradient)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from powerprop.optim import Powerprop
from powerprop.sparsify.base import Method, set_mask

__all__ = ["SNIP", "Static"]


@dataclass(eq=False)
class Static(Method):
    """A random mask, fixed for all of training: the baseline that every dynamic method must beat.

    Examples:
        >>> optimizer = pp.Powerprop(base, model, alpha=1.5, sparsify=pp.Static(0.9))
        >>> round(optimizer.active.sparsity(), 2)
        0.9
    """

    label: ClassVar[str] = "Static"
    look: ClassVar[tuple[str, str]] = ("slate", "v")


@dataclass(eq=False)
class SNIP(Method):
    """Keep the weights to which the loss of the first batch is most sensitive (Lee et al. 2019, equation 5).

        score = |w · ∂L/∂w|

    The first step is the masking; no weight moves in it. All weights are ranked together unless `distribution` says
    otherwise.

    Examples:
        >>> optimizer = pp.Powerprop(base, model, alpha=1.5, sparsify=pp.SNIP(0.9))    # masks: at the first step
    """

    label: ClassVar[str] = "SNIP"
    look: ClassVar[tuple[str, str]] = ("ochre", "<")
    redistributes: ClassVar[bool] = True

    distribution: str = "global"

    def begin(self, optimizer: Powerprop) -> None:
        """Dense until the first gradient is there."""

    @property
    def due(self) -> bool:
        """True for the first step."""
        return self.step == 0

    def needs_gradients(self, optimizer: Powerprop) -> bool:
        """Those of the first batch."""
        return self.due

    def before_step(self, optimizer: Powerprop) -> bool:
        """The first step becomes the masking."""
        masks = self.top(_sensitivity(optimizer)) if self.step == 0 else {}
        super().before_step(optimizer)
        for name, mask in masks.items():
            set_mask(optimizer, name, mask)
        return bool(masks)


def _sensitivity(optimizer: Powerprop) -> dict[str, Tensor]:
    """|w · ∂L/∂w| of every weight."""
    grads = {n: m.param.grad for n, m in optimizer.masters.items()}
    if all(grad is None for grad in grads.values()):
        raise ValueError("SNIP needs the first gradient, but no weight has one: call backward() before step()")
    scores = {}
    for name, grad in grads.items():
        if grad is None:
            raise ValueError(
                f"SNIP needs the first gradient of every weight, but {name!r} got none: it is frozen, or takes no part "
                f"in the loss; leave it out through where="
            )
        scores[name] = (grad * optimizer.masters[name].param).abs()
    if not any(score.any() for score in scores.values()):
        zero = ", ".join(repr(n) for n, m in optimizer.masters.items() if not m.param.any())
        reason = f"{zero} hold zeros alone, which no gradient passes" if zero else "no gradient arrives"
        text = "SNIP's scores |w · ∂L/∂w| are all 0, so that no weight is better than another"
        raise ValueError(f"{text}: {reason}")
    return scores
