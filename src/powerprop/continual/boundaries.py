"""Learning without being told where one task ends and the next begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from powerprop.continual.data import derived_seed, drawing_from, number_of, to_device
from powerprop.continual.strategy import Strategy
from powerprop.eval_mode import evaluating

__all__ = ["BoundaryFinder", "ChangePointDetector", "check_finding"]

Array = NDArray[np.float64]


class _Runs(NamedTuple):
    """For every possible run length: log-probability and the normal-gamma posterior of the run's mean and precision."""

    log_p: Array
    mu: Array
    kappa: Array
    a: Array
    b: Array


class ChangePointDetector:
    """Keeps the posterior of the run length; one call of `update` per observation.

    hazard: expected number of observations between changes.
    mean, strength, shape, scale: the normal-gamma prior of a run's mean (known as well as from `strength`
        observations) and of its variance (about `scale / shape`).
    longest: run lengths beyond this share one place; memory and time per observation stay constant.

    Examples:
        >>> detector = continual.ChangePointDetector()
        >>> probability = detector.update(0.3)
    """

    def __init__(
        self, hazard: float = 1000.0, mean: float = 0.0, strength: float = 0.01, shape: float = 1.0,
        scale: float = 0.1, longest: int = 500,
    ) -> None:  # fmt: skip
        if not hazard > 1:
            raise ValueError(f"hazard is the expected number of observations between changes, > 1, got {hazard}")
        if min(strength, shape, scale) <= 0:
            raise ValueError(f"strength, shape and scale must be positive, got {strength}, {shape} and {scale}")
        if longest < 2:
            raise ValueError(f"longest must be at least 2, got {longest}")
        self.change, self.prior, self.longest = 1 / hazard, (mean, strength, shape, scale), longest
        self.reset()

    def reset(self) -> None:
        """Forget everything: the next observation starts a run."""
        mu, kappa, a, b = (np.array([value], np.float64) for value in self.prior)
        self._runs = _Runs(np.zeros(1), mu, kappa, a, b)

    def update(self, x: float) -> Array:
        """Take an observation; returns the posterior of the run length, P(r = 0), P(r = 1), …

        r = 0 means that this observation is the first of a new run.
        """
        if not np.isfinite(x):
            raise ValueError(f"an observation must be a finite number, got {x}")
        runs = self._runs
        seen = runs.log_p + np.log1p(-self.change) + _log_student_t(x, runs)
        fresh = _Runs(np.zeros(1), *(np.array([value], np.float64) for value in self.prior))
        new = np.logaddexp.reduce(runs.log_p) + np.log(self.change) + _log_student_t(x, fresh)
        grown, first = _absorb(x, runs), _absorb(x, fresh)
        log_p = np.concatenate([new, seen])
        joined = (np.concatenate(pair) for pair in zip(first[1:], grown[1:], strict=True))
        self._runs = _shortened(_Runs(log_p - np.logaddexp.reduce(log_p), *joined), self.longest)
        return np.exp(self._runs.log_p)

    def probability_of_change(self, within: int) -> float:
        """The probability that the current run began with one of the last `within` observations."""
        return float(np.exp(self._runs.log_p[:within]).sum())

    def run_length(self) -> int:
        """The most probable number of observations before this one that belong to the same run."""
        return int(self._runs.log_p.argmax())

    def mean(self, length: int) -> float:
        """The expected mean of a run of this length."""
        return float(self._runs.mu[min(length, len(self._runs.mu) - 1)])


def _absorb(x: float, runs: _Runs) -> _Runs:
    """The posterior of each run after one more observation."""
    mu = (runs.kappa * runs.mu + x) / (runs.kappa + 1)
    b = runs.b + runs.kappa * (x - runs.mu) ** 2 / (2 * (runs.kappa + 1))
    return _Runs(runs.log_p, mu, runs.kappa + 1, runs.a + 0.5, b)


def _log_student_t(x: float, runs: _Runs) -> Array:
    """log p(x | run): Student's t with 2a degrees of freedom, mean μ and variance scale b(κ + 1) / (aκ)."""
    freedom, squared = 2 * runs.a, runs.b * (runs.kappa + 1) / (runs.a * runs.kappa)
    shape = _log_gamma(freedom / 2 + 0.5) - _log_gamma(freedom / 2)
    tail = np.log1p((x - runs.mu) ** 2 / (freedom * squared))
    return np.asarray(shape - 0.5 * np.log(np.pi * freedom * squared) - (freedom + 1) / 2 * tail, np.float64)


def _log_gamma(z: Array) -> Array:
    """log Γ(z) for z > 0: Stirling's series after a shift to z + 8, where it is exact to ten digits."""
    shift = np.log(z[..., None] + np.arange(8)).sum(-1)
    w = z + 8
    series = 1 / (12 * w) - 1 / (360 * w**3) + 1 / (1260 * w**5)
    return np.asarray((w - 0.5) * np.log(w) - w + 0.5 * np.log(2 * np.pi) + series - shift, np.float64)


def _shortened(runs: _Runs, longest: int) -> _Runs:
    """Merge the run lengths beyond the longest into it."""
    if len(runs.log_p) <= longest:
        return runs
    tail = np.logaddexp.reduce(runs.log_p[longest - 1 :])
    kept = (np.append(value[: longest - 1], value[-1]) for value in runs[1:])
    return _Runs(np.append(runs.log_p[: longest - 1], tail), *kept)


LAYERS = number_of("layers")


def check_finding(delay: int, confirm: int, certainty: float, least: int, memory: int) -> None:
    """Settings of a `BoundaryFinder` that cannot work are an error.

    Of no more losses than `delay` a change within them is certain; a task that was found begins with those that waited.
    """
    if not 0 < certainty < 1:
        raise ValueError(f"certainty must be in (0, 1), got {certainty}")
    if not 1 <= confirm <= delay:
        raise ValueError(f"confirm must be in 1..{delay} (the delay), got {confirm}")
    if memory < 4 or least < 2 * delay:
        raise ValueError(f"expected least >= {2 * delay} (twice the delay) and memory >= 4, got {least} and {memory}")


class BoundaryFinder:
    """Feeds a strategy from an unbroken stream of batches; a jump of the loss ends a task and begins the next.

    The loss of every batch is observed when it arrives, and the batch is trained on `delay` batches later. When the
    detector is sure that the loss has jumped up within the last `delay` batches, none of those has been trained on:
    the task that ends is packed with what is kept of its data, and the waiting batches are the first of the next one.

    learner: any strategy; its `steps` play no part, since the stream decides how long a task is trained.
    detector: by default one that suits cross-entropies.
    delay: batches that wait, and within which a change must show.
    confirm: batches that a change must last; a single odd batch is none.
    certainty: the probability of a change from which on it is believed.
    least: a task has at least so many batches; the first losses of a task fall too fast to be judged.
    memory: batches of the current task that are kept for packing it: the latest ones, a quarter as validation data.
    classes: the numbers of the classes, the same for every task.
    """

    def __init__(
        self, learner: Strategy, detector: ChangePointDetector | None = None, *, delay: int = 5, confirm: int = 3,
        certainty: float = 0.9, least: int = 100, memory: int = 200, classes: Sequence[int] = tuple(range(10)),
    ) -> None:  # fmt: skip
        check_finding(delay, confirm, certainty, least, memory)
        self.learner, self.detector = learner, detector or ChangePointDetector()
        if delay >= self.detector.longest:
            raise ValueError(f"delay must be below {self.detector.longest} (the detector's longest), got {delay}")
        self.delay, self.confirm, self.certainty, self.least = delay, confirm, certainty, least
        self.classes = tuple(classes)
        self.waiting: deque[tuple[Tensor, Tensor]] = deque()
        self.kept: deque[tuple[Tensor, Tensor]] = deque(maxlen=memory)
        self.seen, self.open = 0, False
        self._before = 0.0

    def observe(self, x: Tensor, y: Tensor) -> bool:
        """Take the next batch of the stream; returns True if it revealed that a new task has begun."""
        if not self.open:
            self._begin()
        changed = self._jumped(self._loss(x, y))
        self.waiting.append((x, y))
        self.seen += 1
        if changed:
            self._train_waiting(self.detector.run_length() + 1)
            self._end()
            self._begin()
        elif len(self.waiting) > self.delay:
            self._train(self.waiting.popleft())
        return changed

    def finish(self) -> None:
        """The stream has ended: train on what waits and pack the last task."""
        self._train_waiting(0)
        if self.open and self.kept:
            self._end()

    def _loss(self, x: Tensor, y: Tensor) -> float:
        learner = self.learner
        task = learner.current
        with torch.no_grad(), evaluating(learner.model), learner.viewing(task) as model:
            return float(learner.objective.loss(model, to_device((x, y), learner.device), task))

    def _jumped(self, loss: float) -> bool:
        """A change within the delay, and upwards: what falls is learning."""
        self.detector.update(loss)
        length = self.detector.run_length()
        sure = self.detector.probability_of_change(self.delay) >= self.certainty
        if not sure:
            self._before = self.detector.mean(length)
        lasting = self.seen >= self.least and length + 1 >= self.confirm
        return sure and lasting and self.detector.mean(length) > self._before

    def _train(self, batch: tuple[Tensor, Tensor]) -> None:
        learner = self.learner
        on_device = to_device(batch, learner.device)
        seed = derived_seed(learner.seed, learner.current, LAYERS, self.seen)
        with drawing_from(seed, learner.device), learner.viewing(learner.current) as model:
            learner.step(learner.objective.loss(model, on_device, learner.current), on_device)
        self.kept.append(batch)

    def _train_waiting(self, left: int) -> None:
        """Train on the batches that wait, up to the last ones."""
        while len(self.waiting) > left:
            self._train(self.waiting.popleft())

    def _begin(self) -> None:
        self.learner.begin(classes=self.classes, name=f"found {self.learner.current}")
        self.detector.reset()
        self.open, self.seen = True, len(self.waiting)

    def _end(self) -> None:
        """End the task with what is kept of it: every fourth batch validates, or all of fewer than four."""
        rest, held_back = ([pair for i, pair in enumerate(self.kept) if (i % 4 == 3) == held] for held in (False, True))
        train, held = (tuple(map(torch.cat, zip(*part, strict=True))) for part in (rest, held_back or rest))
        self.learner.end(train, held)
        self.kept.clear()
        self.open = False
