"""Settings of experiments: a frozen dataclass whose types are the checks.

    @dataclass(frozen=True)
    class Config(Settings):
        alphas: Powers = (1.0, 2.0)
        \"\"\"powers; 1 is the baseline\"\"\"
        optimiser: Literal["sgd", "adam"] = "sgd"
        steps: Count = 1000

A value that cannot be is an error that repeats it and says what was expected, before anything runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

LARGEST = 10**12
"""No number of steps, images or units is larger; more is a slip of the finger."""


@dataclass(frozen=True)
class Range:
    """Values from `low` to `high`; `above` leaves out `low` itself, `below` leaves out `high`."""

    low: float = -LARGEST
    high: float = LARGEST
    above: bool = False
    below: bool = False

    def expected(self, value: float) -> str | None:
        """What was expected, if the value is none of these."""
        if not math.isfinite(value):
            return "finite"
        if value < self.low or (self.above and value == self.low):
            return f"{'above' if self.above else 'at least'} {self.low:g}"
        if value > self.high or (self.below and value == self.high):
            return f"{'below' if self.below else 'at most'} {self.high:g}"
        return None


@dataclass(frozen=True)
class EachOnce:
    """Some values, none of them twice."""

    def expected(self, value: tuple[Any, ...]) -> str | None:
        """What was expected, if the values are not like that."""
        return None if len(set(value)) == len(value) > 0 else "some, each once"


Count: TypeAlias = Annotated[int, Range(1)]
Natural: TypeAlias = Annotated[int, Range(0)]
Positive: TypeAlias = Annotated[float, Range(0, above=True)]
NonNegative: TypeAlias = Annotated[float, Range(0)]
Share: TypeAlias = Annotated[float, Range(0, 1, above=True)]
Fraction: TypeAlias = Annotated[float, Range(0, 1)]
Below1: TypeAlias = Annotated[float, Range(0, 1, below=True)]
Seeds: TypeAlias = Annotated[int, Range(1, 10_000)]
Power: TypeAlias = Annotated[float, Range(1)]
Powers: TypeAlias = Annotated[tuple[Power, ...], EachOnce()]


def require(condition: object, message: str) -> None:
    """A `ValueError` with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class Settings:
    """The base of every experiment's settings. Further conditions follow `super().__post_init__()`."""

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self), include_extras=True)
        for each in fields(self):
            _check(each.name, getattr(self, each.name), kinds[each.name])

    def check_held_back(self) -> None:
        """Images held back for `validation` must be fewer than the `images` that are used; 0 images are all."""
        held, images = (getattr(self, name) for name in ("validation", "images"))
        require(not images or held < images, f"validation must be below the {images} images, got {held}")

    def check_prunings(self) -> None:
        """Gradual pruning must fit into the retraining."""
        prunings, between, most = (getattr(self, name) for name in ("prunings", "pruning_steps", "retrain_steps"))
        text = f"prunings times pruning_steps must be at most {most}, the retrain_steps, got {prunings * between}"
        require(prunings * between <= most, text)

    @property
    def runs(self) -> str:
        """`one seed`, `3 seeds`."""
        seeds = getattr(self, "seeds")  # noqa: B009
        return "one seed" if seeds == 1 else f"{seeds} seeds"


def expected(kind: Any) -> str:
    """What a value of a setting looks like, in words."""
    parts = get_args(kind)
    if get_origin(kind) is Annotated:
        return expected(parts[0])
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if get_origin(kind) is tuple:
        return f"a list, each {expected(parts[0])}" if parts[-1] is ... else f"a list of {len(parts)}"
    if get_origin(kind) is UnionType:
        return expected(parts[0])
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(kind, "a path")


def _check(name: str, value: Any, kind: Any) -> None:
    """An error unless the value is of its type and in its range."""
    message = f"{name} must be {expected(kind)}, got {value!r}"
    if get_origin(kind) is Annotated:
        base, *marks = get_args(kind)
        _check(name, value, base)
        for mark in marks:
            if isinstance(mark, Range | EachOnce) and (wanted := mark.expected(value)):
                raise ValueError(f"{name} must be {wanted}, got {value!r}")
    elif get_origin(kind) is Literal:
        require(value in get_args(kind), message)
    elif get_origin(kind) is tuple:
        require(isinstance(value, tuple), message)
        parts = get_args(kind)
        parts = parts[:1] * len(value) if parts[-1] is ... else parts
        require(len(value) == len(parts), f"{name} must have {len(parts)} values, got {len(value)}")
        for each, part in zip(value, parts, strict=True):
            _check(name, each, part)
    elif kind in (int, float):
        require(isinstance(value, int if kind is int else int | float) and not isinstance(value, bool), message)
        require(math.isfinite(value), f"{name} must be finite, got {value}")
        require(abs(value) <= LARGEST, f"{name} must be at most {LARGEST}, got {value}")
    else:
        require(isinstance(value, kind), message)
