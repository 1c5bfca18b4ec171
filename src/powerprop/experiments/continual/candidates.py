"""Settings of an arm that are chosen on validation images of the first tasks, before the table is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from powerprop.experiments.harness.checks import require

if TYPE_CHECKING:
    from powerprop.experiments.continual.config import Config

NAMES = ("lr", "gamma", "clip")
"""What a candidate may set; `gamma` is that of the arm's own method."""


@dataclass(frozen=True)
class Tried:
    """What a candidate came to.

    Args:
        validation: accuracy on validation images, the task given, the mean over the tasks that were learned.
        used: fraction of weights used by all tasks so far, after each.
    """

    validation: float
    used: list[float]

    def __post_init__(self) -> None:
        require(len(self.used) > 0, "'used' must not be empty")

    def needed(self, tasks: int) -> float:
        """The fraction of weights that so many tasks would use, if each took as many new ones as the later of these."""
        later = (self.used[-1] - self.used[0]) / max(1, len(self.used) - 1)
        return self.used[0] + (tasks - 1) * later


def parse(text: str) -> dict[str, float]:
    """The settings of a candidate such as "lr=0.1 gamma=0.98 clip=1"."""
    found = {}
    for word in text.split():
        name, _, number = word.partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            found[""] = 0.0
    good = len(found) == len(text.split()) > 0 and set(found) <= set(NAMES)
    require(good, f"a candidate must look like 'lr=0.1 gamma=0.98 clip=1', some or all of these, got {text!r}")
    return found


def with_candidate(config: Config, text: str) -> Config:
    """The settings with those of a candidate, which are refused where any others would be; "" has none."""
    found: dict[str, float] = parse(text) if text else {}
    if "gamma" in found:
        found["frugal_gamma"] = found["gamma"]
    return replace(config, candidates=(), **found)  # type: ignore[arg-type]


def choose(tried: Mapping[str, Tried], tasks: int) -> str:
    """The best on validation images among the candidates that leave room for all tasks; if none does, the most frugal.

    γ decides how much a task may take: by accuracy alone the largest would always win, and the last tasks would pay.
    """
    fits = {text: each for text, each in tried.items() if each.needed(tasks) <= 1}
    if not fits:
        return min(tried, key=lambda text: tried[text].needed(tasks))
    return max(fits, key=lambda text: fits[text].validation)
