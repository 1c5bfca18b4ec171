"""Results as typed objects: what a job wrote into its result.json, checked against the dataclass of its experiment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from powerprop.experiments.harness.experiment import Results, RunError

T = TypeVar("T")

SHOWN = 60
"""So many characters of a wrong value are repeated."""

PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    float: ("a number", lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)),
    int: ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    str: ("a text", lambda value: isinstance(value, str)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    NoneType: ("null", lambda value: value is None),
}


@dataclass(frozen=True)
class Diverged:
    """A training that did not come to its end, and why."""

    diverged: str
    note: str = ""


def result_of(kind: type[T], results: Results, key: str) -> T | Diverged:
    """What the job `key` found, as `kind`, or how it diverged; anything else is an error that names file and key.

    Keys that `kind` does not have, such as the settings of the job, are left out.
    """
    found: Any = results[key]
    wanted = Diverged if isinstance(found, dict) and "diverged" in found else kind
    try:
        return _checked(wanted, found, "")  # type: ignore[no-any-return]
    except ValueError as error:
        file = f"jobs/{key}/result.json"
        raise RunError(f"{file}: {error}; undo what was edited, or delete the file to do the job again") from None


def _checked(kind: Any, value: Any, name: str) -> Any:
    """`value` as `kind`, which JSON's types are: a dataclass, list, dict, tuple, union or plain value."""
    origin, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _object(kind, _of_type(dict, value, name, "an object"), name)
    if origin is UnionType:
        return _first_that_fits(parts, value, name)
    if origin is list:
        values = _of_type(list, value, name, "a list")
        return [_checked(parts[0], each, f"{name}[{i}]") for i, each in enumerate(values)]
    if origin is tuple:
        values = _of_type(list, value, name, f"a list of {len(parts)}")
        if len(values) != len(parts):
            raise _wrong(name, f"a list of {len(parts)}", value)
        return tuple(_checked(part, values[i], f"{name}[{i}]") for i, part in enumerate(parts))
    if origin is dict:
        values = _of_type(dict, value, name, "an object")
        return {key: _checked(parts[1], each, f"{name}.{key}") for key, each in values.items()}
    expected, fits = PLAIN[kind]
    if not fits(value):
        raise _wrong(name, expected, value)
    return value


def _object(kind: Any, values: dict[str, Any], name: str) -> Any:
    hints, found = get_type_hints(kind), {}
    for each in fields(kind):
        inner = f"{name}.{each.name}" if name else each.name
        if each.name in values:
            found[each.name] = _checked(hints[each.name], values[each.name], inner)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{inner!r} is missing")
    return kind(**found)


def _first_that_fits(kinds: tuple[Any, ...], value: Any, name: str) -> Any:
    errors = []
    for kind in kinds:
        try:
            return _checked(kind, value, name)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _of_type(kind: type, value: Any, name: str, expected: str) -> Any:
    if not isinstance(value, kind):
        raise _wrong(name, expected, value)
    return value


def _wrong(name: str, expected: str, value: Any) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"
    return ValueError(f"{name!r} must be {expected}, got {shown}" if name else f"expected {expected}, got {shown}")
