"""The masks of 1,000 tasks over a network of two million weights: memory, the switch to a task, tasks in turn.

    OMP_NUM_THREADS=1 python benchmarks/packed.py [--quick]

"nested" masks are those that packing makes (the largest weights among all that are used, and one's own), "any" have
nothing in common and take one bit for each weight and task. A forward pass of a batch of 128 is made with the network
of the same task again and again, of two tasks in turn, and of all tasks in turn.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable

import torch
from rich.console import Console

from parts import Part
from powerprop import Powerprop
from powerprop.continual import Subnetworks
from powerprop.masks import Masks
from powerprop_paper.models import mlp
from timing import best_times

TASKS, BATCH = 1000, 128
GIGABYTES, SWITCH_MS, IN_TURN = 0.3, 2.0, 6.0


def network() -> Subnetworks:
    """784-1100-1000-10 units: 1.97 million weights."""
    model = mlp([784, 1100, 1000, 10], generator=torch.Generator().manual_seed(0))
    return Subnetworks(model, Powerprop(torch.optim.SGD(model.parameters(), lr=0.1), model, alpha=1.5))


def nested(tasks: int) -> Subnetworks:
    """Owners and thresholds at random: what `pack` leaves after so many tasks."""
    nets, generator = network(), torch.Generator().manual_seed(1)
    for name, master in nets.masters.items():
        shape = master.param.shape
        nets.masks.owner[name] = torch.randint(-1, tasks, shape, generator=generator).to(torch.int16)
        nets.masks.threshold[name] = (0.1 * torch.rand(tasks, generator=generator)).tolist()
    nets.masks.tasks = tasks
    return nets


def chosen(tasks: int) -> Subnetworks:
    """Masks that have nothing in common, over the weights of one task that owns all."""
    nets, generator = network(), torch.Generator().manual_seed(1)
    whole = Masks({n: torch.ones_like(m.param, dtype=torch.bool) for n, m in nets.masters.items()})
    nets.masks.add(whole)
    for _ in range(tasks - 1):
        some = {n: torch.rand(m.param.shape, generator=generator) < 0.3 for n, m in nets.masters.items()}
        nets.masks.add_chosen(some)
    return nets


def gigabytes(nets: Subnetworks) -> float:
    """Of all masks: owners, thresholds and bits."""
    masks = nets.masks
    tensors = [*masks.owner.values(), *itertools.chain(*masks.bits.values())]
    lists = [*masks.threshold.values(), masks.chosen]
    return (sum(t.nbytes for t in tensors) + sum(sys.getsizeof(x) + 32 * len(x) for x in lists)) / 1e9


def measured(nets: Subnetworks, rounds: int) -> list[float]:
    """Memory, the mask of a task, one pass over the weights, and forward passes of the same and of other tasks."""
    x = torch.rand(BATCH, 784, generator=torch.Generator().manual_seed(2))
    last = nets.masks.tasks - 1
    mask = nets.masks.mask(last)

    def passes(tasks: Callable[[], int]) -> Callable[[], object]:
        def forward() -> None:
            task = tasks()
            with torch.no_grad(), nets.viewing(nets.weights(task), task) as model:
                model(x)

        return forward

    calls = {
        "mask": lambda: nets.masks.mask(last),
        "pass": lambda: nets.masked(mask),
        "same": passes(lambda: last),
        "two": passes(itertools.cycle((last - 1, last)).__next__),
        "all": passes(itertools.cycle(range(nets.masks.tasks)).__next__),
    }
    times = best_times(calls, rounds, calls=10)
    return [
        gigabytes(nets),
        1e3 * times["mask"],
        1e3 * times["pass"],
        1e3 * times["same"],
        times["two"] / times["same"],
        times["all"] / times["same"],
    ]


def part(quick: bool = False) -> Part:
    """The table."""
    torch.set_num_threads(1)
    tasks = 100 if quick else TASKS
    rows = [(f"{name} masks", measured(make(tasks), 3 if quick else 12)) for name, make in KINDS.items()]
    columns = ("GB", "mask, ms", "one pass, ms", "same task, ms", "two in turn, times that", "all in turn, times that")
    limits = {}
    for name in KINDS:
        limits |= {f"{name} masks | {columns[0]}": GIGABYTES, f"{name} masks | {columns[1]}": SWITCH_MS}
        limits |= {f"{name} masks | {column}": IN_TURN for column in columns[4:]}
    text = (
        f"{tasks:,} tasks over 1.97 million weights. A switch is the mask and one pass over the weights; then batches "
        f"of {BATCH} with the network of the same task, of two in turn and of all {tasks:,} in turn. Limits: "
        f"{GIGABYTES} GB, {SWITCH_MS:g} ms for the mask, {IN_TURN:g} times the same task."
    )
    return Part("packed", f"Masks of {tasks:,} tasks", text, columns, rows, "", limits, drawn=False)


KINDS = {"nested": nested, "any": chosen}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    found = part(parser.parse_args().quick)
    for label, values in found.rows:
        Console().print(label, dict(zip(found.columns, values, strict=True)))
