"""Names that are typed: unknown ones get an error that says what was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean --steps or --tuning-seeds?)`, or nothing if no known name is like it."""
    plain = {each.lstrip("-"): each for each in known}
    name = name.lstrip("-")
    alike = get_close_matches(name, plain, n=2, cutoff=0.6)
    alike += [each for each in plain if name and name in each and each not in alike]
    return f" (did you mean {' or '.join(plain[each] for each in alike[:2])}?)" if alike else ""
