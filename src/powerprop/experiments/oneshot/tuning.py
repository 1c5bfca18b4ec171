"""Which jobs a one-shot experiment has, and how the learning rate of each arm is chosen.

The choice is made on validation images, for the baseline as for every other arm: among the candidates that train the
dense network well, the one whose pruned networks are best. (The paper chose by the dense network alone; a learning rate
so high that it spoils the dense network can still leave one that prunes well.) The test set plays no part in it.
"""

from __future__ import annotations

from statistics import fmean
from typing import NamedTuple

from powerprop.experiments.harness.experiment import Job, Results, RunError
from powerprop.experiments.harness.typed import Diverged, result_of
from powerprop.experiments.oneshot.config import Config
from powerprop.experiments.oneshot.results import Pruned
from powerprop.experiments.oneshot.train import Arm, arms


def jobs(config: Config, results: Results) -> list[Job]:
    """First the tuning jobs; when they are done, also all seeds at the learning rates chosen."""
    seeds = range(config.tuning_seeds)
    tuning = [arm.job(lr, seed) for arm in arms(config) for lr in config.rates(arm.alpha) for seed in seeds]
    if len(config.lrs) > 1 and any(job.key not in results for job in tuning):
        return tuning
    final = [job for arm in arms(config) for job in final_jobs(config, arm, results)]
    return list({job.key: job for job in (tuning if len(config.lrs) > 1 else []) + final}.values())


def final_jobs(config: Config, arm: Arm, results: Results) -> list[Job]:
    """All seeds of an arm at its chosen learning rate."""
    lr = chosen_lr(config, arm, results)
    return [arm.job(lr, seed) for seed in range(config.seeds)]


def chosen_lr(config: Config, arm: Arm, results: Results) -> float:
    """The best score among the candidates whose dense accuracy is within `tolerance` of the best dense one."""
    rates = config.rates(arm.alpha)
    if len(rates) == 1:
        return rates[0]
    scores = {lr: score for lr in rates if (score := tuning_score(config, arm, lr, results))}
    if not scores:
        raise RunError(f"training diverged at every learning rate of {rates} for alpha = {arm.alpha:g}")
    enough = max(score.dense for score in scores.values()) - config.tolerance
    return max((lr for lr in scores if scores[lr].dense >= enough), key=lambda lr: scores[lr].mean)


class Score(NamedTuple):
    """Validation accuracy: averaged over the whole grid, dense point included, and of the dense network."""

    mean: float
    dense: float


def tuning_score(config: Config, arm: Arm, lr: float, results: Results) -> Score | None:
    """The score of a candidate, averaged over the tuning seeds; None if one of them diverged."""
    found = [result_of(Pruned, results, arm.job(lr, seed).key) for seed in range(config.tuning_seeds)]
    good = [result.validation for result in found if not isinstance(result, Diverged)]
    if len(good) < len(found):
        return None
    return Score(fmean(fmean(values) for values in good), fmean(values[-1] for values in good))
