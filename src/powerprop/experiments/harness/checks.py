"""Settings that cannot be, found before anything runs: an error repeats the value and says what was expected."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from math import isfinite
from typing import Any, get_args, get_origin, get_type_hints

from powerprop.data import Images

MOST_SEEDS = 10_000
"""More runs of the same are a slip of the finger."""
LARGEST = 10**12
"""No number of steps, images or units is larger."""


def require(condition: bool, message: str) -> None:
    """A `ValueError` with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def check_settings(
    config: Any, least: Mapping[str, float] | None = None, choices: Mapping[str, Collection[str]] | None = None
) -> None:
    """What experiments ask of every setting: its type, finite numbers, a sensible number of seeds.

    least: the smallest value of some settings; whole numbers that are not named must be at least 0.
    choices: the values that some settings can have, each of their values if they are tuples.
    """
    kinds = get_type_hints(type(config))
    bounds = {name: 0.0 for name, kind in kinds.items() if kind is int} | {"seeds": 1} | dict(least or {})
    for each in fields(config):
        value = getattr(config, each.name)
        check_type(each.name, value, kinds[each.name])
        if each.name in bounds:
            smallest = bounds[each.name]
            require(value >= smallest, f"{each.name} must be at least {smallest:g}, got {value}")
    require(config.seeds <= MOST_SEEDS, f"seeds must be at most {MOST_SEEDS}, got {config.seeds}")
    for name, known in (choices or {}).items():
        given = getattr(config, name)
        for value in given if isinstance(given, tuple) else (given,):
            require(value in known, f"{name} must be one of {', '.join(known)}, got {value!r}")


def check_alphas(alphas: Collection[float]) -> None:
    """Powers must be some, each once, none below 1."""
    for alpha in alphas:
        require(alpha >= 1, f"alpha must be at least 1, got {alpha}")
    require(len(set(alphas)) == len(alphas) > 0, f"alphas must be some, each once, got {alphas}")


def check_images(model: str, shape: tuple[int, ...], classes: int, images: Images) -> None:
    """A network must be made for the images and classes of the data."""
    found = f"{images.name} with {images.shape} and {images.classes} classes"
    fits = (images.shape, images.classes) == (shape, classes)
    require(fits, f"model {model} is for images {shape} of {classes} classes, got {found}")


def check_positive(config: Any, *names: str) -> None:
    """Settings that must be above 0."""
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{name} must be above 0, got {value}")


def check_type(name: str, value: Any, kind: Any) -> None:
    """A value that is not of its setting's type, or a number that is not finite, is an error."""
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        require(isinstance(value, tuple), f"{name} must be a list, got {value!r}")
        require(parts[-1] is ... or len(value) == len(parts), f"{name} must have {len(parts)} values, got {len(value)}")
        for each in value:
            check_type(name, each, parts[0])
    elif kind in (int, float):
        fits = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        require(fits, f"{name} must be {'a whole number' if kind is int else 'a number'}, got {value!r}")
        require(isfinite(value), f"{name} must be finite, got {value}")
        require(abs(value) <= LARGEST, f"{name} must be at most {LARGEST}, got {value}")
    else:
        require(isinstance(value, kind), f"{name} must be {kind.__name__}, got {value!r}")
