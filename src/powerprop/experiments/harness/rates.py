"""Learning rates that mean the same for every power."""

from __future__ import annotations

__all__ = ["equal_rate"]


def equal_rate(lr: float, magnitude: float, alpha: float) -> float:
    """The rate at which a weight of this size learns under α as fast as at `lr` without: lr·|w|^(2/α-2)/α²."""
    return float(lr * magnitude ** (2 / alpha - 2) / alpha**2)
