"""A transformer of 2,000 tensors: wrapping it, and a step of Adam, against torch's own ways to step many tensors.

    OMP_NUM_THREADS=1 python benchmarks/layers.py [--quick]

167 encoder layers of 32 units have 2,004 tensors of 32 to 3,072 numbers, so that what is done for each tensor counts
and not what is done for each weight.
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from torch import nn

import powerprop as pp
from parts import Part
from timing import best_times

LAYERS, LIMIT = 167, 1.1
PLAIN: dict[str, dict[str, bool]] = {
    "Adam(foreach=True)": {"foreach": True},
    "Adam(fused=True)": {"fused": True},
    "Adam(foreach=False)": {"foreach": False},
}


def transformer(layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
        if p.ndim > 1:
            nn.init.uniform_(p, -0.1, 0.1, generator=torch.Generator().manual_seed(0))
    return model


def part(quick: bool = False) -> Part:
    """Times the step of foreach Adam."""
    torch.set_num_threads(1)
    layers = 20 if quick else LAYERS
    models = {name: transformer(layers) for name in PLAIN}
    steps = {name: torch.optim.Adam(models[name].parameters(), lr=1e-5, **PLAIN[name]).step for name in PLAIN}
    wrapping = {}
    for alpha in (2.0, 1.375):
        model = transformer(layers)
        base = torch.optim.Adam(model.parameters(), lr=1e-5)
        start = time.perf_counter()
        steps[f"Powerprop, α = {alpha:g}"] = pp.Powerprop(base, model, alpha).step
        wrapping[f"Powerprop, α = {alpha:g}"] = time.perf_counter() - start
    times = best_times(steps, 5 if quick else 30, calls=1)
    foreach = times["Adam(foreach=True)"]
    rows = [(name, [seconds / foreach, 1e3 * seconds]) for name, seconds in times.items()]
    said = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in wrapping.items())
    tensors = sum(1 for _ in models["Adam(foreach=True)"].parameters())
    text = f"A step of Adam alone, {tensors:,} tensors. Wrapping takes, once: {said}."
    limits = {f"{name} | times foreach": LIMIT for name in wrapping}
    columns = ("times foreach", "ms")
    return Part(
        "layers", "A transformer of many tensors", text, columns, rows, "times foreach Adam", limits, pictured=1
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    found = part(parser.parse_args().quick)
    Console().print(found.text, found.rows, found.exceeded())
