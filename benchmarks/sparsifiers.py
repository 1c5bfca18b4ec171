"""The price of sparse training: a step between mask updates, and a mask update, against the plain optimiser's step.

    OMP_NUM_THREADS=1 python benchmarks/sparsifiers.py [--quick]

SGD with momentum 0.9 at 90% sparsity, side by side in one run. LeNet-300-100, at the batch of 100 that the experiments
use, is the hard case: its weights outweigh the activations; `--batch` shows how the price depends on it. On ResNet-20
the passes through the network take hundreds of times longer than what is measured and vary by more than it, so that the
optimisers' steps are timed apart and their differences set against a whole plain step. "update" is
what a mask update adds to a step, in plain steps, with all that follows from it: one is made at every other step. The
limits, for α = 1, are those the project holds itself to; the exit code is 1 if one is exceeded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import powerprop as pp
from powerprop.sparsify import Method
from powerprop_paper.models import lenet_300_100, resnet20
from step import BASES, stepper
from timing import best_times

NEVER = 1 << 40
AT_THE_START = ("Static", "SNIP")
METHODS: dict[str, Callable[[int], Method]] = {
    "Static": lambda every: pp.Static(0.9),
    "SNIP": lambda every: pp.SNIP(0.9),
    "SET": lambda every: pp.SET(0.9, interval=every, stop=NEVER + 1),
    "RigL": lambda every: pp.RigL(0.9, interval=every, stop=NEVER + 1),
    "SNFS": lambda every: pp.SNFS(0.9, interval=every, stop=NEVER + 1),
    "DSR": lambda every: pp.DSR(0.9, interval=every, stop=NEVER + 1),
    "Iterative": lambda every: (
        pp.IterativePruning(0.9, start=0, stop=2, interval=1)
        if every == NEVER
        else pp.IterativePruning(0.9, start=0, stop=100_000, interval=every)
    ),
    "Top-KAST, dense backward": lambda every: pp.TopKAST(0.9, interval=every),
    "Top-KAST, 50% backward": lambda every: pp.TopKAST(0.9, backward_sparsity=0.5, interval=every),
}
NETS: dict[str, tuple[Callable[[torch.Generator], nn.Module], tuple[int, ...], float]] = {
    "LeNet-300-100": (lambda g: lenet_300_100(generator=g), (784,), 1.10),
    "ResNet-20": (lambda g: resnet20(generator=g), (3, 32, 32), 1.03),
}
UPDATE_LIMIT = 5.0


def steps(net: str, alpha: float, batch: int, whole: bool = True) -> dict[str, Callable[[], object]]:
    """A plain step, and steps under every method, without mask updates and with one at every other step.

    whole: with the passes through the network; otherwise the optimiser's part alone, on gradients that stay.
    """
    make, shape, _ = NETS[net]

    def step(method: Method | None) -> Callable[[], object]:
        model = make(torch.Generator().manual_seed(0))
        base = BASES["SGD momentum"](model)
        optimizer = base if method is None else pp.Powerprop(base, model, alpha, sparsify=method)
        taken = stepper(model, optimizer, (batch, *shape))
        if whole:
            return taken
        taken()
        return optimizer.step

    between = {name: step(method(NEVER)) for name, method in METHODS.items()}
    updates = {f"{name}, updates": step(method(2)) for name, method in METHODS.items() if name not in AT_THE_START}
    return {"plain": step(None), **between, **updates}


def times_of(net: str, alpha: float, batch: int, rounds: int) -> dict[str, float]:
    """Seconds per step; of ResNet-20 a whole plain step, and what the optimisers add to it."""
    if net != "ResNet-20":
        return best_times(steps(net, alpha, batch), rounds, calls=2)
    plain = best_times({"plain": steps(net, alpha, batch)["plain"]}, 4, calls=2)["plain"]
    apart = best_times(steps(net, alpha, batch, whole=False), rounds, calls=2)
    return {name: plain + seconds - apart["plain"] for name, seconds in apart.items()}


def report(net: str, alpha: float, batch: int, times: dict[str, float]) -> int:
    """Print one table and return how many limits were exceeded."""
    limit = NETS[net][-1]
    title = f"{net}, batch {batch}, α = {alpha:g}: {times['plain'] * 1e3:.2f} ms a plain step"
    table = Table("method", "step", "update", title=title, title_justify="left", min_width=60)
    failures = 0
    for name in METHODS:
        ratio = times[name] / times["plain"]
        pair = times.get(f"{name}, updates")
        update = 0.0 if pair is None else 2 * (pair - times[name]) / times["plain"]
        failures += (ratio > limit) + (update > UPDATE_LIMIT)
        table.add_row(name, f"{ratio:.3f}x", f"{update:.2f}" if update else "")
    Console().print(table)
    Console().print(f"limits {limit:.2f}x and {UPDATE_LIMIT:g}" if alpha == 1 else "no limits here")
    return failures if alpha == 1 else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, LeNet alone")
    parser.add_argument("--batch", type=int, default=100, help="images per step")
    arguments = parser.parse_args()
    quick, batch, failures = arguments.quick, arguments.batch, 0
    for net, alpha in [("LeNet-300-100", 1.0), ("LeNet-300-100", 2.0), ("ResNet-20", 1.0)][: 1 if quick else 3]:
        failures += report(net, alpha, batch, times_of(net, alpha, batch, 60 if quick else 250))
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
