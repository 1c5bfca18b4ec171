"""Change points: the posterior against a direct computation, made-up series, and learning without boundaries."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from powerprop.continual import BoundaryFinder, ChangePointDetector, EfficientPackNet, accuracy_on
from powerprop.continual.boundaries import _log_gamma
from tasks import CLASSES, learner, toy_task


def student_t(x: float, data: list[float], prior: tuple[float, float, float, float]) -> float:
    """p(x | data) under a normal-gamma prior, from the batch formulas of the posterior."""
    mean, kappa, a, b = prior
    n = len(data)
    average = sum(data) / n if n else 0.0
    spread = sum((d - average) ** 2 for d in data)
    kappa_n, a_n = kappa + n, a + n / 2
    mean_n = (kappa * mean + n * average) / kappa_n
    b_n = b + spread / 2 + kappa * n * (average - mean) ** 2 / (2 * kappa_n)
    freedom, squared = 2 * a_n, b_n * (kappa_n + 1) / (a_n * kappa_n)
    scale = math.lgamma(freedom / 2 + 0.5) - math.lgamma(freedom / 2) - 0.5 * math.log(math.pi * freedom * squared)
    return math.exp(scale - (freedom + 1) / 2 * math.log1p((x - mean_n) ** 2 / (freedom * squared)))


def test_log_gamma() -> None:
    z = np.array([0.1, 0.5, 1.0, 2.5, 30.0, 1e4])
    assert _log_gamma(z).tolist() == pytest.approx([math.lgamma(v) for v in z], abs=1e-8)


def test_the_posterior_by_brute_force() -> None:
    # P(run began at s | x) summed over all ways to place change points, for five observations
    series, hazard, prior = [0.2, 0.1, 0.3, 2.0, 2.1], 10.0, (0.0, 0.5, 1.5, 0.2)
    detector = ChangePointDetector(hazard, *prior)
    for x in series:
        found = detector.update(x)
    h, n = 1 / hazard, len(series)
    weight = np.zeros(n + 1)
    for code in range(2**n):  # bit t: observation t starts a new run; no bit at 0 means that the first run goes on
        p, run = 1.0, []
        length = n
        for t, x in enumerate(series):
            if code >> t & 1:
                p, run, length = p * h, [], n - 1 - t
            else:
                p *= 1 - h
            p *= student_t(x, run, prior)
            run = [*run, x]
        weight[length] += p
    expected = weight / weight.sum()
    # a run that goes on from before the first observation is one longer than one that began with it
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_a_jump_is_found_at_once_and_noise_is_not() -> None:
    random = np.random.RandomState(0)
    falling = 2 * np.exp(-np.arange(400) / 40) + 0.2
    series = np.concatenate([falling, falling + 0.05]) + 0.05 * random.randn(800)
    detector, fired = ChangePointDetector(), []
    for t, x in enumerate(series):
        detector.update(float(x))
        if t > 100 and detector.probability_of_change(5) > 0.9:
            fired.append((t, detector.run_length()))
    assert fired[0] == (400, 0)
    assert {t - length for t, length in fired[:5]} == {400}


def test_the_longest_run_bounds_the_memory() -> None:
    detector = ChangePointDetector(longest=50)
    for t in range(300):
        posterior = detector.update(0.1 * (t % 3))
    assert len(posterior) == 50
    assert posterior.sum() == pytest.approx(1.0)
    assert detector.run_length() == 49
    detector.update(30.0)
    assert detector.run_length() == 0
    detector.reset()
    assert detector.probability_of_change(1) == pytest.approx(1.0)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"> 1, got 0\.5"):
        ChangePointDetector(hazard=0.5)
    with pytest.raises(ValueError, match="must be positive, got 0, 1.0 and 0.1"):
        ChangePointDetector(strength=0)
    with pytest.raises(ValueError, match="longest must be at least 2, got 1"):
        ChangePointDetector(longest=1)
    with pytest.raises(ValueError, match="finite number, got nan"):
        ChangePointDetector().update(float("nan"))
    with pytest.raises(ValueError, match=r"certainty must be in \(0, 1\), got 2"):
        BoundaryFinder(learner(), certainty=2)
    with pytest.raises(ValueError, match=r"confirm must be in 1\.\.2 \(the delay\), got 3"):
        BoundaryFinder(learner(), delay=2)
    with pytest.raises(ValueError, match=r"least >= 10 \(twice the delay\) and memory >= 4, got 9 and 200"):
        BoundaryFinder(learner(), least=9)
    with pytest.raises(ValueError, match=r"delay must be below 5 \(the detector's longest\), got 5"):
        BoundaryFinder(learner(), ChangePointDetector(longest=5))
    with pytest.raises(ValueError, match="memory >= 4, got 100 and 2"):
        BoundaryFinder(learner(), memory=2)


def feed(finder: BoundaryFinder, tasks: list[int], batches: int) -> list[int]:
    """An unbroken stream of batches of one task after the other; the batches that revealed a change."""
    found, count = [], 0
    for t in tasks:
        x, y = toy_task(t, 32 * batches).train()
        for i in range(batches):
            if finder.observe(x[32 * i : 32 * (i + 1)], y[32 * i : 32 * (i + 1)]):
                found.append(count)
            count += 1
    finder.finish()
    return found


def test_tasks_are_found_without_boundaries() -> None:
    ours = learner(retrain_steps=30)
    assert isinstance(ours, EfficientPackNet)
    finder = BoundaryFinder(ours, least=30, memory=60, classes=range(CLASSES))
    found = feed(finder, [0, 1, 2], 100)
    assert len(found) == 2
    assert all(0 <= moment - expected < 5 for moment, expected in zip(found, (100, 200), strict=True))
    assert len(ours.tasks) == 3
    for t in range(3):
        assert accuracy_on(ours, toy_task(t), "task-incremental") > 0.9


def test_one_task_has_no_boundary() -> None:
    ours = learner(retrain_steps=10)
    finder = BoundaryFinder(ours, least=30, memory=60, classes=range(CLASSES))
    assert feed(finder, [4], 150) == []
    assert len(ours.tasks) == 1


def test_a_stream_may_end_just_after_a_change() -> None:
    ours = learner(retrain_steps=5)
    finder = BoundaryFinder(ours, least=30, memory=60, classes=range(CLASSES))
    for t, batches in ((0, 100), (1, 3)):
        x, y = toy_task(t, 32 * batches).train()
        changed = [finder.observe(x[32 * i : 32 * (i + 1)], y[32 * i : 32 * (i + 1)]) for i in range(batches)]
    assert changed == [False, False, True]
    finder.finish()
    assert [task.name for task in ours.tasks] == ["found 0", "found 1"]


def test_an_odd_batch_is_no_new_task() -> None:
    ours = learner(retrain_steps=10)
    finder = BoundaryFinder(ours, least=30, memory=60, classes=range(CLASSES))
    x, y = toy_task(0, 3200).train()
    for i in range(100):
        rows = slice(32 * i, 32 * (i + 1))
        assert not finder.observe(x[rows], (y[rows] + (i == 70)) % CLASSES)


def test_nothing_of_the_new_task_was_trained_when_it_is_noticed() -> None:
    ours = learner(retrain_steps=0)
    finder = BoundaryFinder(ours, least=30, memory=500, classes=range(CLASSES))
    seen: list[torch.Tensor] = []
    original = ours.step

    def step(loss: torch.Tensor, batch: Any) -> torch.Tensor:
        if ours.current == 0:
            seen.append(batch[0])
        return original(loss, batch)

    ours.step = step  # type: ignore[method-assign]
    feed(finder, [0, 1], 100)
    first = toy_task(0, 3200).train().x
    assert torch.equal(torch.cat(seen), first)
