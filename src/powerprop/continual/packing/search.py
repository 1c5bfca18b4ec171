"""How sparse can a task be made? Algorithm 1's search over a list of kept fractions, dense first, in three forms.

`sparsest` knows a performance and nothing of what it is of. Each form is given `passes(i)`, which says whether the i-th
fraction keeps enough of the performance, and returns the last one that does on the way from dense to sparse, or -1 if
none does. They agree where the performance falls steadily.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

__all__ = ["FINE", "GRID", "SEARCHES", "Found", "around", "binary", "check_grid", "linear", "sparsest"]

GRID: tuple[float, ...] = (
    0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15,
    0.14, 0.13, 0.12, 0.11, 0.1, 0.09, 0.08, 0.07, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01,
)  # fmt: skip
"""The kept fractions that the paper searches (appendix, hyper-parameters of Permuted- and Split-MNIST)."""

SEARCHES = ("linear", "binary", "taylor")
FINE: tuple[float, ...] = (*GRID, 0.008, 0.006, 0.005, 0.004, 0.003, 0.0025, 0.002, 0.0015, 0.001, 0.0007, 0.0005)
"""The paper's grid and beyond, for sub-networks of a fraction of a percent."""
Passes = Callable[[int], bool]


class Found(NamedTuple):
    """What a search found: the place of a fraction in the grid (-1 if none passes), and what it took."""

    place: int
    evaluations: int


def sparsest(
    performance: Callable[[float], float],
    dense: float,
    grid: Sequence[float],
    gamma: float,
    search: str = "binary",
    guess: int | None = None,
) -> Found:
    """The sparsest fraction of the grid that keeps γ of the dense performance (paper, Algorithm 1, lines 7-11).

        the last s on the way from dense to sparse with P_s > γP

    performance: P_s of the network with this fraction of its weights kept; higher is better.
    dense: P, with all of them. Where it is negative, as a log-likelihood is, γ = 0.95 means that it may fall by 5% of
        its size: P_s > (2 - γ)P.
    search: "linear" (the paper's), "binary", or "taylor", which looks around a guess.
    guess: a place in the grid.
    """
    if search not in SEARCHES:
        raise ValueError(f"search must be one of {', '.join(SEARCHES)}, got {search!r}")
    asked = 0
    least = dense * (gamma if dense >= 0 else 2 - gamma)

    def passes(i: int) -> bool:
        nonlocal asked
        asked += 1
        found = performance(grid[i])
        return found > least or found >= dense

    if search == "taylor" and guess is not None:
        place = around(passes, len(grid), guess)
    else:
        place = (linear if search == "linear" else binary)(passes, len(grid))
    return Found(place, asked)


def check_grid(grid: Sequence[float]) -> tuple[float, ...]:
    """Kept fractions in (0, 1], dense first, or an error that repeats them."""
    values = tuple(float(kept) for kept in grid)
    falling = all(a > b for a, b in pairwise(values))
    if not values or not falling or not 0 < values[-1] <= values[0] <= 1:
        raise ValueError(f"grid must be falling fractions of weights kept in (0, 1], got {list(grid)}")
    return values


def linear(passes: Passes, count: int) -> int:
    """From dense to sparse until one fails (the paper's Algorithm 1)."""
    for i in range(count):
        if not passes(i):
            return i - 1
    return count - 1


def binary(passes: Passes, count: int) -> int:
    """Bisection: never more than ⌈log2(count + 1)⌉ evaluations."""
    return _between(passes, -1, count)


def around(passes: Passes, count: int, guess: int) -> int:
    """From a guess outwards in growing strides, then bisection: few evaluations if the guess is near."""
    guess = min(max(guess, 0), count - 1)
    stride = 1
    if passes(guess):
        low = guess
        while low + stride < count and passes(low + stride):
            low, stride = low + stride, 2 * stride
        return _between(passes, low, min(low + stride, count))
    high = guess
    while high - stride > -1 and not passes(high - stride):
        high, stride = high - stride, 2 * stride
    return _between(passes, max(high - stride, -1), high)


def _between(passes: Passes, low: int, high: int) -> int:
    """The last that passes, where `low` is known to pass (or -1) and `high` to fail (or to be the end)."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low
