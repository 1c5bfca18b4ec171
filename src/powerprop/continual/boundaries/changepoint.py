"""Bayesian online change-point detection (Adams & MacKay, 2007) for a stream of numbers such as the training loss.

The run length r is the number of observations since the last change. Its posterior is updated with each observation:

    P(r+1 | x_1:t) ∝ P(r | x_1:t-1) · p(x_t | the run so far) · (1 - h),      P(0 | x_1:t) ∝ p(x_t | nothing) · h,

where the hazard h is the probability of a change at any step. Within a run the numbers are Gaussian with unknown mean
and variance (a normal-gamma prior), so that p(x_t | run) is Student's t.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ChangePointDetector"]

Array = NDArray[np.float64]


class _Runs(NamedTuple):
    """For every possible run length: log-probability and the normal-gamma posterior of the run's mean and precision."""

    log_p: Array
    mu: Array
    kappa: Array
    a: Array
    b: Array


class ChangePointDetector:
    """Keeps the posterior of the run length; one call of `update` per observation.

    hazard: expected number of observations between changes.
    mean, strength, shape, scale: the normal-gamma prior of a run's mean (known as well as from `strength`
        observations) and of its variance (about `scale / shape`).
    longest: run lengths beyond this share one place; memory and time per observation stay constant.
    """

    def __init__(
        self, hazard: float = 1000.0, mean: float = 0.0, strength: float = 0.01, shape: float = 1.0,
        scale: float = 0.1, longest: int = 500,
    ) -> None:  # fmt: skip
        if not hazard > 1:
            raise ValueError(f"hazard is the expected number of observations between changes, > 1, got {hazard}")
        if min(strength, shape, scale) <= 0:
            raise ValueError(f"strength, shape and scale must be positive, got {strength}, {shape} and {scale}")
        if longest < 2:
            raise ValueError(f"longest must be at least 2, got {longest}")
        self.change, self.prior, self.longest = 1 / hazard, (mean, strength, shape, scale), longest
        self.reset()

    def reset(self) -> None:
        """Forget everything: the next observation starts a run."""
        mu, kappa, a, b = (np.array([value], np.float64) for value in self.prior)
        self._runs = _Runs(np.zeros(1), mu, kappa, a, b)

    def update(self, x: float) -> Array:
        """Take an observation; returns the posterior of the run length, P(r = 0), P(r = 1), …

        r = 0 means that this observation is the first of a new run.
        """
        if not np.isfinite(x):
            raise ValueError(f"an observation must be a finite number, got {x}")
        runs = self._runs
        seen = runs.log_p + np.log1p(-self.change) + _log_student_t(x, runs)
        fresh = _Runs(np.zeros(1), *(np.array([value], np.float64) for value in self.prior))
        new = np.logaddexp.reduce(runs.log_p) + np.log(self.change) + _log_student_t(x, fresh)
        grown, first = _absorb(x, runs), _absorb(x, fresh)
        log_p = np.concatenate([new, seen])
        joined = (np.concatenate(pair) for pair in zip(first[1:], grown[1:], strict=True))
        self._runs = _shortened(_Runs(log_p - np.logaddexp.reduce(log_p), *joined), self.longest)
        return np.exp(self._runs.log_p)

    def probability_of_change(self, within: int) -> float:
        """The probability that the current run began with one of the last `within` observations."""
        return float(np.exp(self._runs.log_p[:within]).sum())

    def run_length(self) -> int:
        """The most probable number of observations before this one that belong to the same run."""
        return int(self._runs.log_p.argmax())

    def mean(self, length: int) -> float:
        """The expected mean of a run of this length."""
        return float(self._runs.mu[min(length, len(self._runs.mu) - 1)])


def _absorb(x: float, runs: _Runs) -> _Runs:
    """The posterior of each run after one more observation."""
    mu = (runs.kappa * runs.mu + x) / (runs.kappa + 1)
    b = runs.b + runs.kappa * (x - runs.mu) ** 2 / (2 * (runs.kappa + 1))
    return _Runs(runs.log_p, mu, runs.kappa + 1, runs.a + 0.5, b)


def _log_student_t(x: float, runs: _Runs) -> Array:
    """log p(x | run): Student's t with 2a degrees of freedom, mean μ and variance scale b(κ + 1) / (aκ)."""
    freedom, squared = 2 * runs.a, runs.b * (runs.kappa + 1) / (runs.a * runs.kappa)
    shape = _log_gamma(freedom / 2 + 0.5) - _log_gamma(freedom / 2)
    tail = np.log1p((x - runs.mu) ** 2 / (freedom * squared))
    return np.asarray(shape - 0.5 * np.log(np.pi * freedom * squared) - (freedom + 1) / 2 * tail, np.float64)


def _log_gamma(z: Array) -> Array:
    """log Γ(z) for z > 0: Stirling's series after a shift to z + 8, where it is exact to ten digits."""
    shift = np.log(z[..., None] + np.arange(8)).sum(-1)
    w = z + 8
    series = 1 / (12 * w) - 1 / (360 * w**3) + 1 / (1260 * w**5)
    return np.asarray((w - 0.5) * np.log(w) - w + 0.5 * np.log(2 * np.pi) + series - shift, np.float64)


def _shortened(runs: _Runs, longest: int) -> _Runs:
    """Merge the run lengths beyond the longest into it."""
    if len(runs.log_p) <= longest:
        return runs
    tail = np.logaddexp.reduce(runs.log_p[longest - 1 :])
    kept = (np.append(value[: longest - 1], value[-1]) for value in runs[1:])
    return _Runs(np.append(runs.log_p[: longest - 1], tail), *kept)
