"""The regression guard: a few ratios in under three minutes, against the bounds in `bounds.json`.

    OMP_NUM_THREADS=1 python benchmarks/quick.py [--times 1.0]

A bound is what the full benchmark allows, with room for the noise of a short measurement. A ratio above its bound is
measured a second time, because another program may have been in the way; the exit code is 1 if it is above it again.
`--times` widens all bounds, for a machine that is known to be busy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

import powerprop as pp
from growth import layer, wrapped
from masks import SHAPE, ours
from step import BASES, stepper, variants
from timing import best_times

BOUNDS = json.loads(Path(__file__).with_name("bounds.json").read_text())
ROUNDS, CALLS, WARM = 80, 1, 1


def steps(base: str) -> dict[str, float]:
    """LeNet at batch 60, one whole and one fractional α."""
    times = best_times(variants("LeNet-300-100", base, ("kernel",), (2.0, 1.375)), ROUNDS, CALLS, WARM)
    return {f"{base}, α = {a}": times[f"kernel {a}"] / times["plain"] for a in ("2", "1.375")}


def masked_steps() -> dict[str, float]:
    """Static masks, and Top-KAST with both masks."""
    plain = ours("Static", 1.0)[0]
    names = {"Static": ("Static", 1.0), "Top-KAST": ("Top-KAST, 50% backward", 2.0)}
    timed = {"plain": stepper(plain, BASES["SGD momentum"](plain), SHAPE)}
    timed |= {name: stepper(*ours(*which), SHAPE) for name, which in names.items()}
    times = best_times(timed, ROUNDS, CALLS, WARM)
    return {f"masked, {name}": times[name] / times["plain"] for name in names}


def many_layers() -> dict[str, float]:
    """2,000 tensors against foreach Adam."""
    models = [torch.nn.ModuleList([layer(1024) for _ in range(2000)]) for _ in range(2)]
    plain, base = (torch.optim.Adam(model.parameters(), foreach=True) for model in models)
    times = best_times({"plain": plain.step, "ours": pp.Powerprop(base, models[1], 2.0).step}, 5, 1)
    return {"2,000 tensors": times["ours"] / times["plain"]}


def mask_updates() -> dict[str, float]:
    """A mask update of a million weights, against one sort of them."""
    weights = layer(10**6).weight.detach().flatten()
    methods = {"RigL": pp.RigL(0.9, interval=2, stop=1 << 40), "Top-KAST": pp.TopKAST(0.9, interval=2)}
    optimizers = {name: wrapped(layer(10**6), alpha=2.0, sparsify=method) for name, method in methods.items()}
    pairs = {name: lambda o=optimizer: (o.step(), o.step()) for name, optimizer in optimizers.items()}  # type: ignore[misc]
    times = best_times({"sort": weights.sort, **pairs}, 8, 1)
    return {f"update, {name}": times[name] / times["sort"] for name in methods}


CASES: dict[str, Callable[[], dict[str, float]]] = {
    **{base: lambda base=base: steps(base) for base in ("SGD", "SGD momentum", "AdamW", "RMSprop")},  # type: ignore[misc]
    "masked": masked_steps,
    "layers": many_layers,
    "updates": mask_updates,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=float, default=1.0, help="widen all bounds by this factor")
    wider = parser.parse_args().times
    failures = 0
    for case in CASES.values():
        found = case()
        if any(ratio > wider * BOUNDS[name] for name, ratio in found.items()):
            found = {name: min(ratio, found[name]) for name, ratio in case().items()}
        for name, ratio in found.items():
            bad = ratio > wider * BOUNDS[name]
            failures += bad
            Console().print(f"{name:28} {ratio:6.3f}x  bound {wider * BOUNDS[name]:.2f}x{'  EXCEEDED' if bad else ''}")
    Console().print("all within the bounds" if not failures else f"{failures} bounds exceeded")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
