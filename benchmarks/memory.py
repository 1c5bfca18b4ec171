"""Bytes that the optimiser keeps for each weight besides the base optimiser's own state, measured from its tensors.

python benchmarks/memory.py
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor, nn

import powerprop as pp
from parts import Part
from powerprop.sparsify import Method
from powerprop_paper.models import lenet_300_100

METHODS: dict[str, Callable[[], Method] | None] = {
    "no masks": None,
    "Static": lambda: pp.Static(0.9),
    "SNIP": lambda: pp.SNIP(0.9),
    "SET": lambda: pp.SET(0.9, steps=1000),
    "RigL": lambda: pp.RigL(0.9, steps=1000),
    "SNFS": lambda: pp.SNFS(0.9, steps=1000),
    "DSR": lambda: pp.DSR(0.9, steps=1000),
    "Iterative pruning": lambda: pp.IterativePruning(0.9, start=0, stop=2, interval=1),
    "Top-KAST, dense backward": lambda: pp.TopKAST(0.9),
    "Top-KAST, 50% backward": lambda: pp.TopKAST(0.9, backward_sparsity=0.5),
}
KINDS: dict[str, tuple[float, torch.dtype]] = {
    "α = 1": (1.0, torch.float32),
    "α = 2": (2.0, torch.float32),
    "α = 1.375": (1.375, torch.float32),
    "α = 2, bfloat16": (2.0, torch.bfloat16),
}


def held() -> dict[int, int]:
    """The size of every storage that a tensor made since the last `gc.freeze` lies in, by its place."""
    tensors = [t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def footprint(make: Callable[[], object]) -> int:
    """The bytes of all tensors that a call makes and what it returns keeps."""
    gc.collect()
    gc.freeze()  # whatever there is already does not count
    try:
        kept = make()
        gc.collect()
        return sum(held().values()) if kept is not None else 0
    finally:
        gc.unfreeze()


def trained(
    wrapped: bool, method: Callable[[], Method] | None, alpha: float, dtype: torch.dtype
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """LeNet-300-100 after four steps."""
    model = lenet_300_100(generator=torch.Generator().manual_seed(0)).to(dtype)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if wrapped:
        sparsify = None if method is None else method()
        optimizer = pp.Powerprop(optimizer, model, alpha, sparsify=sparsify)
    for step in range(4):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e-3 * (step + 1)).normal_(generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return model, optimizer


def bytes_per_weight(method: Callable[[], Method] | None, alpha: float, dtype: torch.dtype) -> float:
    """All memory of tensors after four steps, less that of a plain optimiser with momentum, by weight."""
    plain, ours = (footprint(lambda w=w: trained(w, method, alpha, dtype)) for w in (False, True))  # type: ignore[misc]
    return (ours - plain) / sum(p.numel() for p in lenet_300_100().parameters() if p.ndim > 1)


def part(quick: bool = False) -> Part:
    """The table."""
    rows = [(name, [bytes_per_weight(method, *kind) for kind in KINDS.values()]) for name, method in METHODS.items()]
    text = (
        "What a `Powerprop` keeps besides the base optimiser's own state, after four steps of LeNet-300-100 with "
        "momentum: every storage that a tensor of the process lies in is counted. A float32 weight itself has 4 bytes."
    )
    limits = {f"{name} | {kind}": 6.0 for name in METHODS for kind in ("α = 1", "α = 2", "α = 1.5")}
    return Part("memory", "Bytes per weight", text, tuple(KINDS), rows, "bytes per weight", limits, pictured=4)


if __name__ == "__main__":
    for label, values in (table := part()).rows:
        Console().print(f"{label:26}", "  ".join(f"{c}: {v:.2f}" for c, v in zip(table.columns, values, strict=True)))
