"""The rows of table 1: each method as its authors set it up, with and without Powerprop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

import powerprop as pp
from powerprop.allocate import Layers, check_sparsity, overrides
from powerprop.optim import Sparsifier
from powerprop.sparsify.prune import allocate

DENSE = "uniform 0"
"""The column of the dense row."""

FULL_STEPS = {"mnist": 32_000, "cifar10": 64_000}
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


RANDOM_GROWTH = ("set", "dsr")
"""Methods that try weights at random; those that gradients choose (RigL, SNFS) need time to prove themselves."""


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
    ) -> Sparsifier | None:
        """The `sparsify=` object; None for the dense network and for one-shot pruning after training.

        refresh: steps between refreshes of Top-KAST's masks.
        regrow: steps between mask updates where growth is random.
        """
        if self.method in ("dense", "oneshot"):
            return None
        shared: dict[str, Any] = {"distribution": distribution, "steps": steps, "layers": layers, "seed": seed}
        if self.method in (*RANDOM_GROWTH, "rigl", "snfs"):
            interval = regrow if self.method in RANDOM_GROWTH else 100
            shared["interval"] = min(interval, max(1, steps // 3))  # a short run moves its masks too
        if self.method == "topkast":
            backward = min(self.backward, sparsity)
            return pp.TopKAST(sparsity, backward_sparsity=backward, interval=refresh, **shared)
        return METHODS[self.method](sparsity, **shared)  # type: ignore[no-any-return]


METHODS: dict[str, Any] = {
    "static": pp.Static,
    "snip": pp.SNIP,
    "set": pp.SET,
    "rigl": pp.RigL,
    "snfs": pp.SNFS,
    "dsr": pp.DSR,
    "iterative": pp.IterativePruning,
}

_LABELS = {
    "static": "Static",
    "snip": "SNIP",
    "set": "SET",
    "dsr": "DSR",
    "snfs": "SNFS",
    "rigl": "RigL",
    "iterative": "Iterative pruning",
}

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
    sparsity, distribution = check_sparsity(settings["sparsity"]), settings["distribution"]
    if settings["row"].removeprefix("pp-") not in ("snip", "snfs", "dsr"):
        return allocate(weights, sparsity, distribution, layers)
    own = overrides({n: w.shape for n, w in weights.items()}, sparsity, layers)
    rest = sum(w.numel() for n, w in weights.items() if n not in own)
    return sum(own.values()) + rest - round(rest * sparsity)
