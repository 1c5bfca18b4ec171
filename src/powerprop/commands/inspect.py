"""powerprop inspect: what is in a file of weights."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import tyro
from rich.console import Console

from powerprop.commands.checkpoint import Stored, read_state, weights_of
from powerprop.commands.show import bar, grid, size_of
from powerprop.export.encode import encode
from powerprop.mask_entries import count

__all__ = ["inspect"]

DECADES = 9


def inspect(file: tyro.conf.Positional[Path]) -> None:
    """Show the tensors of a file: how much of each is zero, what it takes, and how large its weights are.

    Args:
        file: safetensors of powerprop or of any other origin, or a torch checkpoint (.pt) of tensors alone.
    """
    stored, console = read_state(file), Console()
    table = grid(
        f"{file.name}, {size_of(stored.file_bytes)}", ["tensor", "shape", "type", "zero", "dense", "sparse"], 3
    )
    for name, tensor in stored.state.items():
        parts = encode(tensor).values()
        table.add_row(
            name,
            "x".join(map(str, tensor.shape)) or "one",
            str(tensor.dtype)[6:],
            f"{1 - count(tensor != 0) / max(1, tensor.numel()):.1%}",
            size_of(tensor.numel() * tensor.element_size()),
            size_of(sum(t.numel() * t.element_size() for t in parts)),
        )
    console.print(table)
    histogram(stored, console)


def histogram(stored: Stored, console: Console) -> None:
    """How the sizes of the weights that are not zero are spread over powers of ten, and the sparsity of all."""
    weights = [w.flatten().float() for w in weights_of(stored.state).values()]
    values = torch.cat(weights) if weights else torch.zeros(0)
    left = values[values != 0].abs()
    share = 1 - left.numel() / max(1, values.numel())
    console.print(f"{values.numel():,} weights, {share:.2%} zero; the others by magnitude:", highlight=False)
    if not left.numel() or not bool(left.isfinite().all()):
        console.print("  (none)" if not left.numel() else "  (some are not finite)", highlight=False)
        return
    top = math.floor(math.log10(float(left.max())))
    powers = left.log10().floor().clamp(top - DECADES + 1, top)
    parts = {power: count(powers == power) for power in range(top, top - DECADES, -1)}
    for power, part in ((p, n) for p, n in parts.items() if n):
        share, length = part / left.numel(), part / max(parts.values())
        console.print(f"  1e{power:+03d} to 1e{power + 1:+03d}  {share:6.1%}  {bar(length, console)}", highlight=False)
