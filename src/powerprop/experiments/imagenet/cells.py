"""What the paper trains on ImageNet: every cell of its tables with the value printed there, and the settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from powerprop import models
from powerprop.allocate import Layers, at_most, check_sparsity
from powerprop.experiments.sparse.rows import ROWS, parse
from powerprop.power import check_alpha

MODELS: dict[str, Callable[..., nn.Module]] = {"resnet18": models.resnet18, "resnet50": models.resnet50}

ALPHA = 1.375
"""The power of every Powerprop row (appendix, hyper-parameters for ImageNet)."""

BASE_RATES = {"pp-iterative": 0.4}
"""η_b of the rows whose best base learning rate is not the usual 0.1 (same table)."""

ONESHOT_ALPHAS = (1.125, 1.25, 1.375, 1.5)
"""The powers considered for one-shot pruning (same table)."""

RULES: Layers = {"conv1.weight": 0.0, "fc.weight": at_most(0.8)}
"""Uniform sparsity leaves the first convolution dense and prunes the last layer to at most 80% (appendix C)."""

NOT_ZERO = ("topkast", "snip")
"""Methods whose last layer must not start at zero even with α = 1: Top-KAST as in the paper; SNIP because the gradient
of all other layers would be zero, and with it every score."""

TABLE_1 = {
    "dense": "76.8 ± 0.09",
    "static uniform 0.8": "70.6 ± 0.06", "static uniform 0.9": "65.8 ± 0.04", "static uniform 0.95": "59.5 ± 0.11",
    "static erk 0.8": "72.1 ± 0.04", "static erk 0.9": "67.7 ± 0.12",
    "dsr uniform 0.8": "73.3", "dsr uniform 0.9": "71.6",
    "snfs uniform 0.8": "74.2", "snfs uniform 0.9": "72.3", "snfs erk 0.8": "75.2 ± 0.11",
    "snfs erk 0.9": "72.9 ± 0.06",
    "snip uniform 0.8": "72.0 ± 0.10", "snip uniform 0.9": "67.2 ± 0.12", "snip uniform 0.95": "57.8 ± 0.40",
    "rigl uniform 0.8": "74.6 ± 0.06", "rigl uniform 0.9": "72.0 ± 0.05", "rigl uniform 0.95": "67.5 ± 0.10",
    "rigl erk 0.8": "75.1 ± 0.05", "rigl erk 0.9": "73.0 ± 0.04",
    "iterative uniform 0.8": "75.3 ± 0.07", "iterative uniform 0.9": "73.7 ± 0.14",
    "iterative uniform 0.95": "70.6 ± 0.05",
    "pp-iterative uniform 0.8": "75.7 ± 0.05", "pp-iterative uniform 0.9": "74.4 ± 0.02",
    "pp-iterative uniform 0.95": "72.1 ± 0.00",
    "topkast-50 uniform 0.8": "75.47 ± 0.03", "topkast-50 uniform 0.9": "74.65 ± 0.03",
    "topkast-50 uniform 0.95": "72.73 ± 0.10", "topkast-50 erk 0.8": "75.71 ± 0.06",
    "topkast-50 erk 0.9": "74.79 ± 0.05",
    "pp-topkast-50 uniform 0.8": "75.75 ± 0.05", "pp-topkast-50 uniform 0.9": "74.74 ± 0.04",
    "pp-topkast-50 uniform 0.95": "72.89 ± 0.10", "pp-topkast-50 erk 0.8": "75.84 ± 0.01",
    "pp-topkast-50 erk 0.9": "74.98 ± 0.09",
    "topkast-0 uniform 0.8": "76.08 ± 0.02", "topkast-0 uniform 0.9": "75.13 ± 0.03",
    "topkast-0 uniform 0.95": "73.19 ± 0.02", "topkast-0 erk 0.8": "76.42 ± 0.03", "topkast-0 erk 0.9": "75.51 ± 0.05",
    "pp-topkast-0 uniform 0.8": "76.24 ± 0.07", "pp-topkast-0 uniform 0.9": "75.23 ± 0.02",
    "pp-topkast-0 uniform 0.95": "73.25 ± 0.02", "pp-topkast-0 erk 0.8": "76.76 ± 0.08",
    "pp-topkast-0 erk 0.9": "75.74 ± 0.08",
}  # fmt: skip
"""Top-1 accuracy of ResNet-50 in percent; "iterative" is the paper's own implementation."""

TABLE_2 = {
    "iterative uniform 0.8 x1.5": ("76.5", 0.84), "iterative uniform 0.9 x1.5": ("75.2", 0.76),
    "rigl uniform 0.8 x5": ("76.6 ± 0.06", 1.14), "rigl uniform 0.9 x5": ("75.7 ± 0.06", 0.52),
    "rigl erk 0.8 x5": ("77.1 ± 0.06", 2.09), "rigl erk 0.9 x5": ("76.4 ± 0.05", 1.23),
    "pp-topkast-0 erk 0.8 x2": ("77.51 ± 0.03", 1.21), "pp-topkast-0 erk 0.9 x2": ("76.94 ± 0.10", 0.97),
    "pp-topkast-0 erk 0.8 x3": ("77.64 ± 0.05", 1.81), "pp-topkast-0 erk 0.9 x3": ("77.16 ± 0.19", 1.46),
}  # fmt: skip
"""Extended training: accuracy, and training FLOPs relative to a dense model for a single cycle."""

EXTREME = tuple(
    f"{row} uniform {sparsity}"
    for sparsity in (0.95, 0.965, 0.98, 0.99)
    for row in ("rigl", "iterative", "pp-iterative", "topkast-0", "pp-topkast-0")
)
"""The extreme-sparsity figure, 95% to 99%; the paper prints no values."""


class Cell(NamedTuple):
    """One training: `name` is "dense", "powerprop 1.375" (dense, for one-shot pruning) or "rigl erk 0.9 x5"."""

    name: str
    row: str
    alpha: float
    distribution: str = "uniform"
    sparsity: float = 0.0
    times: float = 1.0

    @property
    def key(self) -> str:
        """Its name as that of a folder."""
        return self.name.replace(" ", "-")

    @property
    def oneshot(self) -> bool:
        """True if it is trained densely and pruned afterwards."""
        return ROWS[self.row].method == "dense"

    @property
    def rate(self) -> float:
        """η_b."""
        return BASE_RATES.get(self.row, 0.1)

    @property
    def rules(self) -> Layers:
        """The exceptions of the first and the last layer."""
        return RULES if self.distribution == "uniform" else {}

    @property
    def zero_last(self) -> bool:
        """Whether the last layer starts at zero."""
        return self.alpha == 1 and ROWS[self.row].method not in NOT_ZERO


def cell(name: str) -> Cell:
    """Read a cell's name; an error repeats it and says what was expected."""
    row, _, rest = name.partition(" ")
    if name == "dense":
        return Cell(name, "dense", 1.0)
    if row == "powerprop":
        return Cell(name, "pp-dense", check_alpha(_number(rest, name), name))
    if row not in ROWS or ROWS[row].method in ("dense", "oneshot"):
        known = ", ".join(key for key, each in ROWS.items() if each.method not in ("dense", "oneshot"))
        raise ValueError(f"a cell must begin with dense, powerprop, {known}, got {name!r}")
    column, _, times = rest.partition(" x")
    distribution, sparsity = parse(column)
    length = _number(times, name) if times else 1.0
    if length <= 0:
        raise ValueError(f"training must be longer than nothing, got x{length:g} in {name!r}")
    return Cell(name, row, ALPHA if ROWS[row].powerprop else 1.0, distribution, check_sparsity(sparsity), length)


def chosen(cells: Sequence[str], alphas: Sequence[float], only: Sequence[str]) -> list[Cell]:
    """The cells, and the dense trainings with these powers, that fit one of the patterns (all if there is none)."""
    names = dict.fromkeys([*cells, *(f"powerprop {alpha:g}" for alpha in alphas)])
    return [cell(name) for name in names if not only or any(fnmatchcase(name, pattern) for pattern in only)]


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"expected a number, got {text!r} in {name!r}") from None
