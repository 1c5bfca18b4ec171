"""Which trainings a sparse-training table needs: rates are chosen first, in two rounds, then the cells are filled."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from powerprop.experiments.harness.experiment import Job, Results
from powerprop.experiments.harness.typed import Diverged, result_of
from powerprop.experiments.sparse.results import Trained
from powerprop.experiments.sparse.rows import DENSE, ROWS, parse

if TYPE_CHECKING:
    from powerprop.experiments.sparse.config import Config

NEAR = 0.003
"""A rate within this validation accuracy of the best is a finalist."""


def job(config: Config, row: str, column: str, lr: float, seed: int, cycles: int = 1) -> Job:
    """One training of a row at a column."""
    distribution, sparsity = parse(column)
    longer = f"-x{cycles}" if cycles > 1 else ""
    key = f"{row}-{distribution}{sparsity:g}{longer}-lr{lr:g}-seed{seed}"
    settings = {"row": row, "distribution": distribution, "sparsity": sparsity, "cycles": cycles}
    return Job(key, settings | {"lr": lr, "seed": seed})


def jobs(config: Config, results: Results) -> list[Job]:
    """One run of each row at each candidate rate; all seeds of the finalists; then, at the chosen ones, the table."""
    rows = dict.fromkeys((*config.rows, *config.extended))
    first = [tuning_job(config, row, lr, 0) for row in rows for lr in config.candidates(row)]
    if any(j.key not in results for j in first):
        return first
    seeds = range(config.seeds)
    final = [
        tuning_job(config, row, lr, seed) for row in rows for lr in finalists(config, row, results) for seed in seeds
    ]
    tuning = first + final
    if any(j.key not in results for j in tuning):
        return _once(tuning)
    cells = [(row, column, 1) for row in config.rows for column in columns_of(config, row)]
    longer = [(row, column_of(row, config.tune_at), m) for row in config.extended for m in config.multipliers]
    chosen = {row: chosen_lr(config, row, results) for row in rows}
    table = [job(config, r, c, chosen[r], seed, m) for r, c, m in cells + longer for seed in seeds]
    return _once(tuning + table)


def _once(jobs: list[Job]) -> list[Job]:
    return list({j.key: j for j in jobs}.values())


def tuning_job(config: Config, row: str, lr: float, seed: int) -> Job:
    """A training that takes part in the choice of the rate."""
    return job(config, row, column_of(row, config.tune_at), lr, seed)


def column_of(row: str, column: str) -> str:
    """The dense row has one column, whatever is asked."""
    return DENSE if ROWS[row].method == "dense" else column


def columns_of(config: Config, row: str) -> tuple[str, ...]:
    """The columns in which a row has a value."""
    return (DENSE,) if ROWS[row].method == "dense" else config.columns


def finalists(config: Config, row: str, results: Results) -> list[float]:
    """The rates whose first seed comes near the best: one run and one validation set are noisy judges."""
    score = {lr: validation(config, row, lr, 0, results) for lr in config.candidates(row)}
    return [lr for lr in score if score[lr] >= max(score.values()) - NEAR]


def chosen_lr(config: Config, row: str, results: Results) -> float:
    """The finalist with the best mean validation accuracy over the seeds at the column of the choice."""

    def score(lr: float) -> float:
        return fmean(validation(config, row, lr, seed, results) for seed in range(config.seeds))

    return max(finalists(config, row, results), key=score)


def validation(config: Config, row: str, lr: float, seed: int, results: Results) -> float:
    """Validation accuracy at the column of the choice; nothing for a run that diverged."""
    found = result_of(Trained, results, tuning_job(config, row, lr, seed).key)
    return 0.0 if isinstance(found, Diverged) else found.validation
