"""The finished trainings of an ImageNet run, cell by cell, and what the reader sees of their names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from powerprop.experiments.harness.experiment import Results
from powerprop.experiments.imagenet.cells import Cell
from powerprop.experiments.sparse.rows import ROWS
from powerprop.report import Cell as Value

if TYPE_CHECKING:
    from powerprop.experiments.imagenet.config import Config

MARKS = {"topkast-0": "*", "topkast-50": "†"}
"""The paper's marks for backward sparsities of 0% and 50%."""


@dataclass(frozen=True)
class Measured:
    """A cell with the results of its seeds, and what became of those that diverged."""

    cell: Cell
    runs: list[dict[str, Any]]
    folders: list[Path]
    diverged: list[str]

    @property
    def label(self) -> str:
        """As the tables show its method."""
        if self.cell.oneshot:
            return "Dense" if self.cell.alpha == 1 else f"Powerprop, α = {self.cell.alpha:g}"
        return label(self.cell.row)

    def value(self, name: str = "accuracy") -> Value | str:
        """Mean and standard deviation over the seeds."""
        return Value.of(run[name] for run in self.runs) if self.runs else "diverged"

    @property
    def accuracy(self) -> float:
        """The mean over the seeds; at least one must be there."""
        return fmean(run["accuracy"] for run in self.runs)


def label(row: str) -> str:
    """The name of a row, with the paper's marks for Top-KAST."""
    method = row.removeprefix("pp-")
    name = f"Top-KAST{MARKS[method]}" if method in MARKS else ROWS[method].label
    return f"Powerprop + {name}" if row.startswith("pp-") else name


def column(this: Cell) -> str:
    """Its sparsity, as a column's name."""
    return f"{100 * this.sparsity:g}%" + (" ERK" if this.distribution == "erk" else "")


def collect(config: Config, this: Cell, results: Results, out: Path) -> Measured:
    """The seeds of a cell."""
    keys = [f"{this.key}-seed{seed}" for seed in range(config.seeds)]
    good = [key for key in keys if "diverged" not in results[key]]
    reasons = [results[key].get("diverged") for key in keys]
    lost = [f"{this.name}, seed {seed}: {reason}" for seed, reason in enumerate(reasons) if reason is not None]
    return Measured(this, [results[key] for key in good], [out / "jobs" / key for key in good], lost)
