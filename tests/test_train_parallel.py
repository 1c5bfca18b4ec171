"""Jobs side by side: results, failures that stay alone, and what is shown."""

from __future__ import annotations

import gc
import io
import os
import signal
import time
import weakref
from typing import Any

import pytest
import torch
from rich.console import Console

from powerprop_paper.display import Bars, Lines, display_for
from powerprop_paper.pool import Failure, Progress, Work, _dismiss, _hire, default_workers, run_all


class Silent:
    """A display that remembers what it was told."""

    def __init__(self) -> None:
        self.updates: dict[str, list[float]] = {}
        self.ended: dict[str, str | None] = {}

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, key: str, done: float, values: dict[str, float]) -> None:
        self.updates.setdefault(key, []).append(done)

    def finish(self, key: str, error: str | None) -> None:
        self.ended[key] = error


def job(kind: str, progress: Progress) -> Any:
    progress(0.5, {"step": 1, "loss": 0.25})
    if kind == "raises":
        raise ValueError("no such weights")
    if kind == "dies":
        os._exit(3)
    return kind, torch.get_num_threads(), os.getpid()


def works(*kinds: str) -> list[Work]:
    return [Work(f"{i}-{kind}", job, (kind,)) for i, kind in enumerate(kinds)]


def test_side_by_side_a_crash_stays_alone() -> None:
    display = Silent()
    outcome = run_all(works("good", "raises", "dies", "good", "good"), 2, display)
    assert outcome.results.keys() == {"0-good", "3-good", "4-good"}
    assert all(value[:2] == ("good", 1) and value[2] != os.getpid() for value in outcome.results.values())
    assert "Traceback" in outcome.failures["1-raises"].traceback
    assert outcome.failures["1-raises"].traceback.endswith("ValueError: no such weights")
    assert outcome.failures["2-dies"] == Failure("its process died with exit code 3")
    assert display.updates["0-good"] == [0.0, 0.5]
    assert display.ended["1-raises"] == "ValueError: no such weights"
    assert display.ended["0-good"] is None


def test_one_worker_runs_in_this_process_with_one_thread() -> None:
    before = torch.get_num_threads()
    outcome = run_all(works("good", "raises", "good"), 1, Silent())
    assert outcome.results == {"0-good": ("good", 1, os.getpid()), "2-good": ("good", 1, os.getpid())}
    assert outcome.failures.keys() == {"1-raises"}
    assert torch.get_num_threads() == before


def test_what_a_job_leaves_behind_is_gone_before_the_next() -> None:
    left: list[weakref.ref[Any]] = []

    class Learner:
        """Refers to itself, as a learner does by way of its optimiser."""

        def __init__(self) -> None:
            self.optimizer = self

    def leaves(progress: Progress) -> int:
        alive = sum(each() is not None for each in left)
        left.append(weakref.ref(Learner()))
        return alive

    gc.disable()
    try:
        outcome = run_all([Work(str(i), leaves) for i in range(3)], 1, Silent())
    finally:
        gc.enable()
    assert list(outcome.results.values()) == [0, 0, 0]


def test_ctrl_c_does_not_reach_a_worker_that_is_still_starting() -> None:
    """A terminal sends it to the whole group; the parent decides, and says so in one line."""
    connection, process = _hire()
    try:
        for _ in range(20):
            os.kill(process.pid or 0, signal.SIGINT)
            time.sleep(0.02)
        connection.send(works("good")[0])
        while (message := connection.recv())[0] != "ended":
            pass
        assert message[2] is None
    finally:
        _dismiss(connection, process)


def test_no_work_and_no_workers() -> None:
    assert run_all([], 4, Silent()).results == {}
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        run_all(works("good"), 0, Silent())
    assert default_workers() >= 1


def test_lines_for_pipes() -> None:
    text = io.StringIO()
    display = display_for(Console(file=text), "mnist", 2)
    assert isinstance(display, Lines)
    display.every = 0.0
    with display:
        display.update("a[1]", 0.5, {"step": 100, "loss": 0.25})
        display.finish("a[1]", None)
        display.finish("b", "ValueError: x")
    assert text.getvalue().splitlines() == [
        "mnist: 2 jobs",
        "  a[1]: 50% step 100, loss 0.2500",
        "  [1/2] a[1]: done step 100, loss 0.2500",
        "  [2/2] b: failed: ValueError: x",
    ]


def test_bars_for_terminals() -> None:
    text = io.StringIO()
    display = display_for(Console(file=text, force_terminal=True, width=120), "mnist", 2)
    assert isinstance(display, Bars)
    with display:
        display.update("a[1]", 0.5, {"step": 1500, "accuracy": 0.971})
        display.progress.refresh()
        display.finish("a[1]", None)
        display.finish("b", "ValueError: [x]")
    assert "a[1]" in text.getvalue()
    assert "step 1,500, accuracy 97.10%" in text.getvalue()
    assert "ValueError: [x]" in text.getvalue()
    assert display.progress.tasks[0].completed == 2
