"""Which jobs a one-shot experiment has, and how the learning rate and the decay of each arm are chosen.

The choice is made on validation images, for the baseline as for every other arm: among the candidates that train the
dense network well, the one whose pruned networks are best. (The paper chose by the dense network alone; a learning rate
so high that it spoils the dense network can still leave one that prunes well.) The test set plays no part in it.
"""

from __future__ import annotations

from statistics import fmean
from typing import NamedTuple

from powerprop.experiments.harness.experiment import Job, Results, RunError
from powerprop.experiments.harness.typed import Diverged, result_of
from powerprop.experiments.oneshot.config import Candidate, Config
from powerprop.experiments.oneshot.results import Pruned
from powerprop.experiments.oneshot.train import Arm, arms


def jobs(config: Config, results: Results) -> list[Job]:
    """First the tuning jobs; when they are done, also all seeds with the candidates chosen."""
    pairs = [(arm, each) for arm in arms(config) for each in config.candidates(arm.alpha, arm.form)]
    tuning = [arm.job(config, each, seed) for arm, each in pairs for seed in range(config.tuning_seeds)]
    tuning = tuning if len(config.lrs) > 1 or len(config.lassos) > 1 else []
    if any(job.key not in results for job in tuning):
        return tuning
    final = [job for arm in arms(config) for job in final_jobs(config, arm, results)]
    return list({job.key: job for job in tuning + final}.values())


def final_jobs(config: Config, arm: Arm, results: Results) -> list[Job]:
    """All seeds of an arm with its chosen candidate."""
    best = chosen(config, arm, results)
    return [arm.job(config, best, seed) for seed in range(config.seeds)]


def chosen(config: Config, arm: Arm, results: Results) -> Candidate:
    """The best score among the candidates whose dense accuracy is within `tolerance` of the best dense one."""
    candidates = config.candidates(arm.alpha, arm.form)
    if len(candidates) == 1:
        return candidates[0]
    scores = {each: score for each in candidates if (score := tuning_score(config, arm, each, results))}
    if not scores:
        rates = ", ".join(f"{each.lr:g}" for each in candidates)
        raise RunError(f"training diverged at every learning rate of {rates} for alpha = {arm.alpha:g}")
    enough = max(score.dense for score in scores.values()) - config.tolerance
    return max((each for each in scores if scores[each].dense >= enough), key=lambda each: scores[each].mean)


class Score(NamedTuple):
    """Validation accuracy: averaged over the whole grid, dense point included, and of the dense network."""

    mean: float
    dense: float


def tuning_score(config: Config, arm: Arm, tried: Candidate, results: Results) -> Score | None:
    """The score of a candidate, averaged over the tuning seeds; None if one of them diverged."""
    found = [result_of(Pruned, results, arm.job(config, tried, seed).key) for seed in range(config.tuning_seeds)]
    good = [result.validation for result in found if not isinstance(result, Diverged)]
    if len(good) < len(found):
        return None
    return Score(fmean(fmean(values) for values in good), fmean(values[-1] for values in good))
