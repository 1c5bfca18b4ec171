"""The rows of table 1: each method as its authors set it up, with and without Powerprop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

import powerprop as pp
from powerprop.allocate import Layers, check_sparsity
from powerprop.sparsify.base import Method
from powerprop.sparsify.prune import allocate

DENSE = "uniform 0"
"""The column of the dense row."""

FULL_STEPS = {"mnist": 32_000, "cifar10": 64_000, "fast-cifar": 3_600}
"""The length of a training that is not shortened."""


def parse(column: str) -> tuple[str, float]:
    """The distribution and the sparsity of a column such as "erk 0.9"."""
    distribution, _, number = column.partition(" ")
    try:
        sparsity = check_sparsity(float(number))
    except ValueError:
        raise ValueError(f"a column must look like 'uniform 0.95' or 'erk 0.9', got {column!r}") from None
    if distribution not in ("uniform", "erk"):
        raise ValueError(f"a column must look like 'uniform 0.95' or 'erk 0.9', got {column!r}")
    return distribution, sparsity


SPARSIFIERS: dict[str, type[Method]] = {
    "static": pp.Static,
    "snip": pp.SNIP,
    "set": pp.SET,
    "dsr": pp.DSR,
    "snfs": pp.SNFS,
    "rigl": pp.RigL,
    "iterative": pp.IterativePruning,
    "topkast": pp.TopKAST,
}


class Row(NamedTuple):
    """One method of the table.

    label: as shown.
    method: the kind of method; see `make`.
    powerprop: with α > 1.
    backward: backward sparsity of Top-KAST.
    """

    label: str
    method: str
    powerprop: bool = False
    backward: float = 0.0

    def make(
        self,
        sparsity: float,
        distribution: str,
        steps: int,
        layers: Layers,
        seed: int,
        refresh: int = 100,
        regrow: int = 100,
        explore: float = 1e-4,
    ) -> Method | None:
        """The `sparsify=` object; None for the dense network and for one-shot pruning after training.

        refresh: steps between refreshes of Top-KAST's masks.
        regrow: steps between mask updates where growth is random.
        explore: the decay of Top-KAST.
        """
        if self.method in ("dense", "oneshot"):
            return None
        shared: dict[str, Any] = {"distribution": distribution, "steps": steps, "layers": layers, "seed": seed}
        kind: Any = SPARSIFIERS[self.method]
        if kind.grows_at_random or issubclass(kind, pp.SET):
            interval = regrow if kind.grows_at_random else 100
            shared["interval"] = min(interval, max(1, steps // 3))  # a short run moves its masks too
        if kind.explores:
            shared |= {"backward_sparsity": min(self.backward, sparsity), "interval": refresh, "decay": explore}
        made: Method = kind(sparsity, **shared)
        return made


_LABELS = {name: kind.label for name, kind in SPARSIFIERS.items() if not kind.explores}

ROWS: dict[str, Row] = {
    "dense": Row("Dense", "dense"),
    "pp-dense": Row("Powerprop, dense", "dense", True),
    **{name: Row(label, name) for name, label in _LABELS.items()},
    "topkast-50": Row("Top-KAST, 50% backward", "topkast", False, 0.5),
    "topkast-0": Row("Top-KAST, 0% backward", "topkast", False, 0.0),
    "one-shot": Row("One-shot pruning", "oneshot"),
    **{f"pp-{name}": Row(f"Powerprop + {label}", name, True) for name, label in _LABELS.items()},
    "pp-topkast-50": Row("Powerprop + Top-KAST, 50% backward", "topkast", True, 0.5),
    "pp-topkast-0": Row("Powerprop + Top-KAST, 0% backward", "topkast", True, 0.0),
    "pp-one-shot": Row("Powerprop + One-shot pruning", "oneshot", True),
}


def asked(weights: Mapping[str, Tensor], settings: Mapping[str, Any], layers: Layers) -> dict[str, int] | int:
    """What was asked: kept weights per layer, or in all where the method may move them between layers."""
    layerwise = allocate(weights, check_sparsity(settings["sparsity"]), settings["distribution"], layers)
    kind = SPARSIFIERS.get(ROWS[settings["row"]].method)
    return sum(layerwise.values()) if kind is not None and kind.redistributes else layerwise
