"""Ratios of step times in one run: interleaved, one thread, the best of many rounds, because machines are noisy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch


def best_times(
    steps: Mapping[str, Callable[[], object]],
    rounds: int = 20,
    calls: int = 30,
    warm: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds per call of each, the least over the rounds; every round times all of them one after the other.

    Many rounds of few calls find quiet moments also on a busy machine; rounds of ten milliseconds find none.

    warm: calls before those that count: after the others had their turn, nothing of one's own is in the cache, as it is
        when one step follows another.
    clock: that of the wall, or `time.thread_time`, for which programs beside this one hardly count.
    """
    torch.set_num_threads(1)
    best = dict.fromkeys(steps, float("inf"))
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            for _ in range(warm):
                step()
            start = clock()
            for _ in range(calls):
                step()
            best[name] = min(best[name], (clock() - start) / calls)
    return best
