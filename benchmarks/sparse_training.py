"""Sparse compute: a whole training step with the active weights alone, as a fraction of the same step computed densely.

    OMP_NUM_THREADS=1 python benchmarks/sparse_training.py [--quick]

784-1000-1000-10, batch 64, Powerprop with α = 2, fresh batches of MNIST (of noise where the data is not at hand),
forward and backward pass, optimiser and all. "masked": over the same optimiser on the masked dense path; "plain": over
the base optimiser on the dense network without Powerprop and masks; both with the dense products that torch takes by
itself. Times are the processor's for the one thread, so that programs beside it hardly count. Methods that move masks
do it every 100 steps, and a mask update is part of the figure. The exit code is 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import powerprop as pp
from parts import Part
from powerprop import kernel
from powerprop.sparse.linear import SparseLinear
from powerprop_paper import data
from powerprop_paper.models import mlp
from timing import best_times

SPARSITIES = (0.9, 0.95, 0.98, 0.99)
BASES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-5),
}
INTERVAL, NEVER = 100, 1 << 40
METHODS: dict[str, Callable[[float], pp.Static]] = {
    "Static": lambda s: pp.Static(s),
    "SET": lambda s: pp.SET(s, interval=2, stop=NEVER),
    "RigL": lambda s: pp.RigL(s, interval=2, stop=NEVER),
}
UPDATE_LIMIT = 0.15
STEADY, MOVING, PLAIN = (5, 8, 11, 13), (4.5, 7, 9, 10), (4, 7, 10, 12)
"""The times faster that a step must be, at each of the sparsities."""
SIZES, BATCH, WIDE = (784, 1000, 1000, 10), 64, (784, 8192, 8192, 10)
BIG, MEMORY_LIMITS = (784, 4096, 4096, 10), {"tensors": 0.05, "resident": 0.06, "peak resident": 0.12}


def batches() -> tuple[Tensor, Tensor]:
    """Images and labels in rows."""
    try:
        images = data.load("mnist", download=False)
        return images.train_x.reshape(-1, 784) / 255, images.train_y
    except data.DataNotFound:
        draw = torch.Generator().manual_seed(0)
        return torch.rand(6400, 784, generator=draw), torch.randint(10, (6400,), generator=draw)


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Callable[[], None]:
    """A training step on the next batch."""
    at = 0

    def step() -> None:
        nonlocal at
        at = (at + BATCH) % (len(x) - BATCH)
        optimizer.zero_grad()
        F.cross_entropy(model(x[at : at + BATCH]), y[at : at + BATCH]).backward()
        optimizer.step()

    return step


def network(sizes: tuple[int, ...] = SIZES) -> nn.Module:
    return mlp(sizes, generator=torch.Generator().manual_seed(0))


def trained(
    method: pp.Static, base: str, computes: bool, sizes: tuple[int, ...] = SIZES
) -> tuple[nn.Module, pp.Powerprop]:
    """Every layer sparse, so that one run is like the other."""
    model = network(sizes)
    optimizer = pp.Powerprop(BASES[base](model), model, 2.0, sparsify=method)
    if computes:
        pp.sparse_compute(model, optimizer, layers=["*"])
    return model, optimizer


def times(base: str, rounds: int) -> dict[str, float]:
    """Seconds of a step by "method sparsity form"; "pair" is a step and a mask update."""
    x, y = batches()
    model = network()
    steps: dict[str, Callable[[], object]] = {"plain": stepper(model, BASES[base](model), x, y)}
    for name, make in METHODS.items():
        for sparsity in SPARSITIES:
            for form in ("dense", "sparse"):
                step = stepper(*trained(make(sparsity), base, form == "sparse"), x, y)
                steps[f"{name} {sparsity} {form}"] = step if name == "Static" else lambda step=step: (step(), step())
    return best_times(steps, rounds, calls=1, warm=1, clock=time.thread_time)


def amortised(found: dict[str, float], method: str, sparsity: float, form: str) -> tuple[float, float]:
    """Seconds of a step with its share of the mask updates, and of one mask update."""
    step = found[f"Static {sparsity} {form}"]
    if method == "Static":
        return step, 0.0
    update = found[f"{method} {sparsity} {form}"] - step
    return ((INTERVAL - 1) * step + update) / INTERVAL, update


def step_part(base: str, quick: bool = False) -> Part:
    """All methods at all sparsities."""
    found = times(base, 15 if quick else 100)
    rows, limits = [], {}
    for method in METHODS:
        for number, sparsity in enumerate(SPARSITIES):
            label = f"{method}, {sparsity:.0%}"
            (dense, _), (sparse, update) = (amortised(found, method, sparsity, form) for form in ("dense", "sparse"))
            share = update / (INTERVAL * found[f"Static {sparsity} sparse"]) if update else None
            rows.append((label, [sparse / dense, sparse / found["plain"], share]))
            least = STEADY if method == "Static" else MOVING
            limits[f"{label} | of masked"] = 1 / least[number]
            if method == "Static":
                limits[f"{label} | of plain"] = 1 / PLAIN[number]
            if method == "RigL":
                limits[f"{label} | update of 100 steps"] = UPDATE_LIMIT
    columns = ("of masked", "of plain", "update of 100 steps")
    text = f"784-1000-1000-10, batch 64, α = 2, {base}; a plain dense step takes {found['plain'] * 1e3:.2f} ms."
    name = f"sparse-compute-{base.lower()}"
    return Part(name, f"A step of sparse compute, {base}", text, columns, rows, limits=limits, drawn=False, zoom=True)


def wide_part(quick: bool = False) -> Part:
    """A network of 73 million weights, of which one in a hundred is there, against the dense one of 1.8 million."""
    x, y = batches()
    model = network()
    steps: dict[str, Callable[[], object]] = {"plain": stepper(model, BASES["momentum"](model), x, y)}
    steps["wide"] = stepper(*trained(pp.Static(0.99), "momentum", True, WIDE), x, y)
    found = best_times(steps, 10 if quick else 100, calls=1, warm=1, clock=time.thread_time)
    rows = [("784-8192-8192-10, 99%, α = 2", [found["wide"] / found["plain"]])]
    text = f"Momentum, batch 64; the dense 784-1000-1000-10 takes {found['plain'] * 1e3:.2f} ms."
    limits = {f"{rows[0][0]} | of the dense": 1.4}
    return Part("wide-sparse", "A wide step", text, ("of the dense",), rows, limits=limits, drawn=False)


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_part(quick: bool = False) -> Part:
    """Both forms, each in a process of its own."""
    rows, limits = [], {}
    for base in BASES:
        dense, sparse = (json.loads(_child(base, form)) for form in ("dense", "sparse"))
        rows.append((base, [sparse[size] / dense[size] for size in dense]))
        limits |= {f"{base} | {column}": limit for column, limit in MEMORY_LIMITS.items()}
    text = (
        "784-4096-4096-10 at 98%, Static, α = 2: weights, gradients, state and patterns by their tensors; what ten "
        "steps leave in the resident memory of a process; and what they add to it at their peak, with activations and "
        "what the C library holds back. The dense form is that of the base optimiser without Powerprop."
    )
    columns, title = tuple(MEMORY_LIMITS), "Memory of sparse compute"
    return Part("sparse-memory", title, text, columns, rows, limits=limits, drawn=False, zoom=True)


def _child(base: str, form: str) -> str:
    command = [sys.executable, __file__, "--memory", base, form]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def measured_memory(base: str, form: str) -> dict[str, int]:
    """Bytes of one form; the network is made, made sparse and then looked at."""
    x, y = (t[:6400].clone() for t in batches())
    _steps(network((784, 8, 10)), base, x, y)
    before = _resident("VmRSS")
    model: nn.Module
    if form == "dense":
        model = network(BIG)
        optimizer = BASES[base](model)
    else:
        model, optimizer = trained(pp.Static(0.98), base, True, BIG)  # type: ignore[assignment]
        optimizer.step()  # what was there before the masks is let go with the first step
    Path("/proc/self/clear_refs").write_text("5")
    step = stepper(model, optimizer, x, y)
    for _ in range(10):
        step()
    base_state = optimizer.base.state if isinstance(optimizer, pp.Powerprop) else optimizer.state
    tensors = [
        t for p in model.parameters() for t in (p.data, p.grad, *base_state[p].values()) if isinstance(t, Tensor)
    ]
    size = sum(t.numel() * t.element_size() for t in tensors)
    for pattern in (m.pattern for m in model.modules() if isinstance(m, SparseLinear)):
        size += sum(len(content) for name in pattern.__slots__ if isinstance(content := getattr(pattern, name), bytes))
    peak = _resident("VmHWM")
    kernel.trim()
    return {"tensors": size, "resident": _resident("VmRSS") - before, "peak": peak - before}


def _steps(model: nn.Module, base: str, x: Tensor, y: Tensor) -> None:
    step = stepper(model, pp.Powerprop(BASES[base](model), model, 2.0), x, y)
    for _ in range(3):
        step()


def _resident(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(kind)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--memory", nargs=2, metavar=("BASE", "FORM"), help="for the processes that measure it")
    arguments = parser.parse_args()
    if arguments.memory:
        sys.stdout.write(json.dumps(measured_memory(*arguments.memory)))
        raise SystemExit
    found = [*(step_part(base, arguments.quick) for base in BASES), wide_part(arguments.quick), memory_part()]
    for part in found:
        Console().print(part.title, part.rows, part.exceeded())
    raise SystemExit(int(any(part.exceeded() for part in found)))
