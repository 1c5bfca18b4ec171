"""How the time of task inference grows with the number of tasks, side by side.

    OMP_NUM_THREADS=1 python benchmarks/infer.py [--quick]

One network of 784-1000-1000-10 units with made-up sub-networks, batches of 128. "exhaustive" makes one masked pass per
task; "oneshot" and "binary" take the gradient for all tasks at once; "shortlist" makes four masked passes whatever the
number of tasks. The exit code is 1 if one of the last three takes ten times as long for 300 tasks as for 10.
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console

from parts import Part
from powerprop import Powerprop
from powerprop.continual import INFERENCES, Classification, Subnetworks, infer
from powerprop.continual.packing.subnetworks import Sample
from powerprop_paper.models import mlp
from timing import best_times

TASKS = (10, 30, 100, 300)
METHODS = [method for method in INFERENCES if "superfluous" not in method]
"""The others cost the same, and want outputs that no class has."""
LIMIT = 10.0
BATCH = 128


def crowded(tasks: int) -> Subnetworks:
    """A network in which every task owns some weights and reuses the large ones of all tasks before it."""
    generator = torch.Generator().manual_seed(0)
    model = mlp([784, 1000, 1000, 10], generator=generator)
    nets = Subnetworks(model, Powerprop(torch.optim.SGD(model.parameters(), lr=0.1), model, alpha=1.5))
    strength = {n: m.theta().abs() for n, m in nets.masters.items()}
    for _ in range(tasks):
        draw = {n: torch.rand(s.shape, generator=generator) for n, s in strength.items()}
        large = {n: s > 0.02 + 0.04 * torch.rand((), generator=generator) for n, s in strength.items()}
        free = nets.masks.free()
        masks = {n: (large[n] & ~free[n]) | (free[n] & (draw[n] < 0.7 / tasks)) for n in strength}
        nets.masks.add(nets.masks.complete(masks))
        centre = torch.rand(784, generator=generator)
        nets.stats.add(Sample(centre + 0.1 * torch.rand(100, 784, generator=generator)))
    return nets


def part(quick: bool = False) -> Part:
    """Milliseconds per batch, and how they grow."""
    torch.set_num_threads(1)
    networks = {tasks: crowded(tasks) for tasks in (TASKS[:3] if quick else TASKS)}
    x = torch.rand(BATCH, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    calls = {
        f"{method} {tasks}": lambda nets=nets, method=method: infer(nets, x, Classification(), method, None)
        for tasks, nets in networks.items()
        for method in METHODS
    }
    times = best_times(calls, 2 if quick else 5, calls=1)
    first, last = min(networks), max(networks)
    rows = []
    for method in METHODS:
        each = [1000 * times[f"{method} {tasks}"] for tasks in networks]
        rows.append((method, [*each, times[f"{method} {last}"] / times[f"{method} {first}"]]))
    limits = {f"{method} | growth": LIMIT for method in METHODS if method != "exhaustive"}
    text = (
        f"ms per batch of {BATCH}, 784-1000-1000-10 units. `exhaustive` is one masked pass for each task, as one would "
        f"write it. growth: of {last} tasks to {first}."
    )
    columns = (*(f"{tasks} tasks" for tasks in networks), "growth")
    unit = f"ms per batch of {BATCH}"
    return Part("inference", "Task inference", text, columns, rows, unit, limits, positions=[*networks], axis="tasks")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    table = part(parser.parse_args().quick)
    for method, values in table.rows:
        Console().print(f"{method:12}", "  ".join(f"{c} {v:.1f}" for c, v in zip(table.columns, values, strict=True)))
    return int(bool(table.exceeded()))


if __name__ == "__main__":
    raise SystemExit(main())
