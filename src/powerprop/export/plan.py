"""What an export decided, and by which rule: shown to people, kept in files, and followed without measuring again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from powerprop.files import FileError

__all__ = ["MARGIN", "SPARSE_ENOUGH", "Choice", "Plan", "best_times", "choose"]

MARGIN = 0.95
"""A sparse layer or network must take at most this part of the dense one's time: a gain within the noise is none."""

SPARSE_ENOUGH = 0.5
"""Layers of which less is zero stay dense without being measured."""


def choose(dense: float, sparse: float | None, margin: float = MARGIN) -> str:
    """The rule: "sparse" if its time is at most margin · the dense time, else "dense"; None is "has no sparse form"."""
    return "sparse" if sparse is not None and sparse <= margin * dense else "dense"


@dataclass(frozen=True)
class Choice:
    """How one layer computes; times in seconds, None where nothing was measured.

    form: "dense" (as it was), "columns" (a linear layer with its dense matrix on the left, of the inputs in use) or
        "sparse".
    """

    layer: str
    form: str
    sparsity: float
    dense: float | None = None
    sparse: float | None = None
    reason: str = ""
    columns: float | None = None


@dataclass(frozen=True)
class Plan:
    """The decisions of an export.

    network: "dense" (as it was), "smaller" (batch norms folded, dead units removed, all layers dense), "columns" (the
        same, with the matrices of linear layers on the left), "sparse" (every layer in the form that was fastest
        alone) or "all sparse".
    traced: the whole network was one graph; else layers were replaced one by one in a copy.
    batch, threads: what was measured at.
    times: seconds of a call of each network that was tried.
    removed: dead units by layer.
    """

    network: str
    traced: bool
    batch: int
    threads: int
    margin: float = MARGIN
    choices: tuple[Choice, ...] = ()
    times: dict[str, float] = field(default_factory=dict)
    removed: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def speedup(self) -> float | None:
        """The dense network's time over that of the chosen one; None if nothing was measured."""
        return self.times["dense"] / self.times[self.network] if self.times else None

    def to_json(self) -> str:
        """As text, for the metadata of a file."""
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote."""
        try:
            values: dict[str, Any] = json.loads(text)
            choices = tuple(Choice(**choice) for choice in values.pop("choices"))
            return cls(choices=choices, notes=tuple(values.pop("notes")), **values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FileError(f"not the plan of an export: {error}") from None

    def __str__(self) -> str:
        lines = [f"{self.network} network, batch {self.batch}, {self.threads} threads"]
        if self.speedup is not None:
            lines[0] += f": {self.times[self.network] * 1e6:,.0f} us, {self.speedup:.2f}x as fast as dense"
        width = max((len(c.layer) for c in self.choices), default=0)
        for choice in self.choices:
            lines.append(f"  {choice.layer:<{width}}  {choice.form:<7}  {choice.sparsity:6.1%} zero  {_why(choice)}")
        lines += [f"  {count} dead units removed from {layer}" for layer, count in self.removed.items()]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def _why(choice: Choice) -> str:
    if choice.reason:
        return choice.reason
    times = {form: getattr(choice, form) for form in ("dense", "columns", "sparse")}
    return ", ".join(f"{seconds * 1e6:,.0f} us {form}" for form, seconds in times.items() if seconds)


def best_times(
    calls: Mapping[str, Callable[[], object]], device: torch.device, seconds: float = 0.05
) -> dict[str, float]:
    """Seconds per call of each, the least of many rounds that time all in turn: what else runs disturbs all alike.

    seconds: to spend on each, as far as a few rounds need no longer.
    """
    best = {name: _timed(call, 1, device) for name, call in calls.items()}
    best = {name: _timed(call, 1, device) for name, call in calls.items()}  # the first call of all warms up
    repeats = {name: max(1, round(2e-4 / t)) for name, t in best.items()}
    end = time.perf_counter() + seconds * len(calls)
    rounds = 0
    while rounds < 5 or time.perf_counter() < end:
        for name, call in calls.items():
            best[name] = min(best[name], _timed(call, repeats[name], device))
        rounds += 1
    return best


def _timed(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / repeats
