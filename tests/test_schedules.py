"""Schedules by hand, and what they refuse."""

from collections.abc import Callable

import numpy as np
import pytest

from powerprop.schedules import constant, cosine, cubic, period, step_of


def test_constant() -> None:
    assert [constant(0.3)(t) for t in (0, 7, 10**6)] == [0.3] * 3


def test_cosine_falls_from_its_value_to_zero() -> None:
    at = cosine(0.3, 100)
    assert [at(t) for t in (0, 50, 100, 300)] == pytest.approx([0.3, 0.15, 0.0, 0.0], abs=1e-12)
    assert at(25) == pytest.approx(0.15 * (1 + 2**-0.5))


def test_cubic_by_hand() -> None:
    # s_t = 0.8 (1 - (1 - (t - 20)/60)³): at t = 50 half of the way, 0.8 · (1 - 1/8) = 0.7
    at = cubic(0.0, 0.8, 20, 80)
    assert [at(t) for t in (0, 20, 50, 80, 100)] == pytest.approx([0, 0, 0.7, 0.8, 0.8])


@pytest.mark.parametrize(("value", "step"), [(0.75, 75), (1.0, 100), (0, 0), (30, 30), (0.0, 0)])
def test_moment(value: float, step: int) -> None:
    assert step_of(value, 100, "stop") == step


def test_period_is_at_least_one_step() -> None:
    assert [period(v, 100) for v in (7, 0.25, 0.001)] == [7, 25, 1]


@pytest.mark.parametrize("bad", [-1, 1.5, -0.1, float("nan"), True, "soon"])
def test_moments_that_mean_nothing(bad: object) -> None:
    with pytest.raises(ValueError, match=rf"stop must be a step .* or a fraction of steps .*, got {bad!r}"):
        step_of(bad, 100, "stop")  # type: ignore[arg-type]


def test_a_fraction_needs_the_number_of_steps() -> None:
    with pytest.raises(ValueError, match=r"stop=0\.5 is a fraction of steps: give steps="):
        step_of(0.5, None, "stop")


@pytest.mark.parametrize("bad", [0, 0.0])
def test_no_period(bad: float) -> None:
    with pytest.raises(ValueError, match=f"interval must be more than 0 steps, got {bad}"):
        period(bad, 100)


@pytest.mark.parametrize(("start", "stop"), [(5, 5), (6, 5), (-1, 5)])
def test_a_cubic_that_goes_nowhere(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"got start={start}, stop={stop}"):
        cubic(0, 1, start, stop)


def test_a_cosine_that_stops_before_it_starts() -> None:
    with pytest.raises(ValueError, match="must stop at step 1 or later, got 0"):
        cosine(0.3, 0)


def test_any_kind_of_number() -> None:
    assert step_of(np.int64(7), None, "stop") == 7
    assert step_of(np.float32(0.5), 100, "stop") == 50


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: constant("0.5"), "value must be a number, got '0.5'"),  # type: ignore[arg-type]
        (lambda: cosine(None, 5), "value must be a number, got None"),  # type: ignore[arg-type]
        (lambda: cosine(0.3, "5"), "stop must be a number, got '5'"),  # type: ignore[arg-type]
        (lambda: cubic(0.0, True, 0, 5), "final must be a number, got True"),
        (lambda: cubic(0.0, 0.5, None, 5), "start must be a number, got None"),  # type: ignore[arg-type]
    ],
)
def test_wrong_kinds(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()
