"""The small quadratic program of gradient episodic memory, solved exactly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["least_above", "least_nonnegative"]

Array = NDArray[np.float64]

EXACT = 1e-10
"""What is smaller than this, where the diagonal is 1, is rounding."""


def least_above(bound: float, p: Array, q: Array) -> Array:
    """The v ≥ bound with the least ½vᵀPv + qᵀv, for P = GGᵀ and q = Gg.

    With v = bound + u it is a program in u ≥ 0.
    """
    return bound + least_nonnegative(p, q + bound * p.sum(1))


def least_nonnegative(p: Array, q: Array) -> Array:
    """The u ≥ 0 with the least ½uᵀPu + qᵀu, by an active set: exact after finitely many steps.

    P is positive semidefinite and q in its range, as for P = GGᵀ and q = Gg: a variable that is set free then has a
    column that does not depend on those which are free already, so that singular P need no further care.

    Reference: Lawson & Hanson, Solving Least Squares Problems, 1974, chapter 23.
    """
    scale = np.sqrt(np.diag(p))
    scale = np.where(scale > 0, scale, np.inf)  # a zero gradient forbids nothing: its variable stays 0
    p, q = p / np.outer(scale, scale), q / scale
    u, free = np.zeros(len(q)), np.zeros(len(q), dtype=bool)
    tolerance = EXACT * max(1.0, float(np.abs(q).max(initial=0.0)))
    for _ in range(10 * len(q) + 10):
        downhill = np.where(free, 0.0, -(p @ u + q))
        if downhill.max(initial=0.0) <= tolerance:
            return u / scale
        free[int(downhill.argmax())] = True
        u = _settled(p, q, u, free)
    raise RuntimeError(f"no solution after {10 * len(q) + 10} steps for P = {p.tolist()}, q = {q.tolist()}")


def _settled(p: Array, q: Array, u: Array, free: NDArray[np.bool_]) -> Array:
    """Go to the least among the free variables; those that would become negative on the way stay at 0."""
    while free.any():
        aim = np.zeros(len(q))
        aim[free] = np.linalg.lstsq(p[np.ix_(free, free)], -q[free], rcond=EXACT)[0]
        below = free & (aim <= 0)
        if not below.any():
            return aim
        way = (u[below] / np.maximum(u[below] - aim[below], np.finfo(float).tiny)).min()
        u = u + way * (aim - u)
        free &= u > EXACT * max(1.0, float(u.max()))
        u = np.where(free, u, 0.0)
    return np.zeros(len(q))
