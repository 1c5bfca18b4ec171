"""Schedules: functions from the step to a number, and moments of training given as steps or as fractions of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from numbers import Integral, Real

__all__ = ["Schedule", "StepOrFraction", "constant", "cosine", "cubic", "number", "period", "step_of"]

Schedule = Callable[[int], float]
"""A number for every step of training."""

StepOrFraction = int | float
"""A step (int), or a fraction of all steps (float)."""


def number(value: float, name: str) -> float:
    """The value as a float, from any kind of real number; a string or a bool is an error that repeats it."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def constant(value: float) -> Schedule:
    """The same value at every step."""
    return partial(_constant, number(value, "value"))  # unlike a lambda, it can be pickled with its method


def _constant(value: float, step: int) -> float:
    return value


def cosine(value: float, stop: int) -> Schedule:
    """value/2 · (1 + cos(πt/stop)): from value to 0 at `stop`, and 0 from then on (Evci et al. 2020, section 3)."""
    value = number(value, "value")
    if not number(stop, "stop") >= 1:
        raise ValueError(f"a cosine schedule must stop at step 1 or later, got {stop}")
    return partial(_cosine, value, stop)


def _cosine(value: float, stop: int, step: int) -> float:
    return value / 2 * (1 + math.cos(math.pi * min(step, stop) / stop))


def cubic(initial: float, final: float, start: int, stop: int) -> Schedule:
    """final + (initial - final)(1 - (t - start)/(stop - start))³ between the two (Zhu & Gupta 2017, equation 1)."""
    initial, final = number(initial, "initial"), number(final, "final")
    if not 0 <= number(start, "start") < number(stop, "stop"):
        raise ValueError(f"a cubic schedule needs 0 <= start < stop, got start={start}, stop={stop}")
    return partial(_cubic, initial, final, start, stop)


def _cubic(initial: float, final: float, start: int, stop: int, step: int) -> float:
    remaining = 1 - (min(max(step, start), stop) - start) / (stop - start)
    return final + (initial - final) * remaining**3


def step_of(value: StepOrFraction, steps: int | None, name: str) -> int:
    """The step meant: an int is the step itself, a float in [0, 1] a fraction of `steps`."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if whole and value >= 0:
        return int(value)
    if whole or isinstance(value, bool) or not (isinstance(value, Real) and 0 <= value <= 1):
        raise ValueError(f"{name} must be a step (int >= 0) or a fraction of steps (float in [0, 1]), got {value!r}")
    if steps is None:
        raise ValueError(f"{name}={value!r} is a fraction of steps: give steps=, the number of optimiser steps in all")
    return round(float(value) * steps)


def period(value: StepOrFraction, steps: int | None, name: str = "interval") -> int:
    """The steps between two events, at least 1: an int, or a float in (0, 1] as a fraction of `steps`."""
    if value == 0:
        raise ValueError(f"{name} must be more than 0 steps, got {value!r}")
    return max(1, step_of(value, steps, name))
