"""Arguments of learners that cannot be."""

from __future__ import annotations

__all__ = ["check_least"]


def check_least(**arguments: tuple[float, float]) -> None:
    """An error for the first argument below the least that it can be: `check_least(steps=(steps, 1))`."""
    for name, (value, least) in arguments.items():
        if not value >= least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
