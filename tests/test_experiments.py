"""What every experiment promises of its settings: what cannot be is refused before anything runs, by its name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest

from powerprop_paper.cli import FAMILIES, find
from powerprop_paper.settings import EachOnce, Range


def refused(kind: Any) -> Iterator[tuple[Any, str]]:
    """Values that a setting of this type cannot have, and what the error says was expected."""
    if get_origin(kind) is Annotated:
        base, *marks = get_args(kind)
        for mark in marks:
            yield from [((), "some, each once")] if isinstance(mark, EachOnce) else outside(mark)
        yield from refused(base)
    elif get_origin(kind) is Literal:
        yield "nothing of the kind", "one of "
    elif get_origin(kind) is tuple and get_args(kind)[-1] is ...:
        yield from (((bad,), expected) for bad, expected in refused(get_args(kind)[0]))
        yield "text", "a list"
    elif kind in (int, float):
        yield from [(math.nan, "finite" if kind is float else "a whole number"), (True, ""), (10**13, "at most ")]


def outside(mark: Range) -> Iterator[tuple[float, str]]:
    """Numbers next to a range."""
    yield mark.low if mark.above else mark.low - 1, "above " if mark.above else "at least "
    if mark.high <= 10_000:
        yield int(mark.high) + (0 if mark.below else 1), "below " if mark.below else "at most "


def twice(kind: Any, value: Any) -> bool:
    """True if a value may not stand twice in it."""
    return get_origin(kind) is Annotated and EachOnce() in get_args(kind) and bool(value)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_setting_that_cannot_be_is_refused_by_its_name(name: str) -> None:
    config = find(name).presets["smoke"]
    kinds, tried = get_type_hints(type(config), include_extras=True), 0
    for each in fields(config):
        kind, value = kinds[each.name], getattr(config, each.name)
        wrong = [*refused(kind), *([((*value, value[0]), "some, each once")] if twice(kind, value) else [])]
        for bad, expected in wrong:
            with pytest.raises(ValueError, match=f"^{each.name} must be {expected}") as error:
                replace(config, **{each.name: bad})
            assert str(bad[0] if isinstance(bad, tuple) and len(bad) == 1 else bad) in str(error.value)
            tried += 1
    assert tried > 10
