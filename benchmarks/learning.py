"""The time to learn a task, by the library's strategies and by the same methods written plainly, as papers' scripts do.

    OMP_NUM_THREADS=1 python benchmarks/learning.py [--quick]

A network of 784-400-400-10 units, 2,000 made-up images a task, the second task of two: same steps, batches and data on
both sides. The plain ones are `plain_strategies.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor, nn

from parts import Part
from plain_strategies import PLAIN, Data
from powerprop.continual import EWC, SI, EfficientPackNet, PackNet, Strategy, Task, make_task
from powerprop_paper.models import mlp

IMAGES, STEPS, BATCH = 2000, 60, 64


def images(seed: int, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 784, generator=generator)
    return x, (x[:, :10] + 0.3 * x[:, 10:20]).argmax(1)


def network() -> nn.Module:
    return mlp([784, 400, 400, 10], generator=torch.Generator().manual_seed(0))


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


OURS: dict[str, Callable[[], Strategy]] = {
    "EWC": lambda: EWC(network(), sgd, strength=10.0, steps=STEPS, batch_size=BATCH),
    "SI": lambda: SI(network(), sgd, strength=1.0, steps=STEPS, batch_size=BATCH),
    "PackNet": lambda: PackNet(network(), sgd, 2, steps=STEPS, retrain_steps=STEPS // 2, batch_size=BATCH),
    "EfficientPackNet": lambda: EfficientPackNet(
        network(), sgd, alpha=1.5, search="linear", grid=GRID, steps=STEPS, retrain_steps=STEPS // 2, batch_size=BATCH
    ),
}
GRID = (0.5, 0.3, 0.2, 0.1)


def task(index: int) -> Task:
    return make_task(images(index, IMAGES), images(100 + index, 500), images(200 + index, 500), index=index)


def seconds_of_second(learn: Callable[[int], object]) -> float:
    learn(0)
    start = time.perf_counter()
    learn(1)
    return time.perf_counter() - start


def part(quick: bool = False) -> Part:
    """The table: seconds per task, the best of a few, one after the other."""
    torch.set_num_threads(1)
    best: dict[str, list[float]] = {}
    for _ in range(1 if quick else 5):
        for name, make in OURS.items():
            learner, plain = make(), PLAIN[name](network(), sgd, STEPS, BATCH, GRID)
            mine = seconds_of_second(lambda i, learner=learner: learner.learn(task(i)))  # type: ignore[misc]
            theirs = seconds_of_second(
                lambda i, plain=plain: plain.learn(Data(*images(i, IMAGES)), Data(*images(100 + i, 500)))  # type: ignore[misc]
            )
            old = best.get(name, [float("inf")] * 2)
            best[name] = [min(old[0], mine), min(old[1], theirs)]
    rows = [(name, [mine, theirs, mine / theirs]) for name, (mine, theirs) in best.items()]
    text = f"Seconds for the second task: {STEPS} steps at a batch of {BATCH}, {IMAGES} images, 784-400-400-10 units."
    columns = ("ours, s", "written plainly, s", "ratio")
    return Part("strategies", "Learning a task", text, columns, rows, "seconds", pictured=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    Console().print(part(parser.parse_args().quick).rows)
