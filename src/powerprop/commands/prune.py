"""powerprop prune: a smaller file of the largest weights."""

from __future__ import annotations

from pathlib import Path

import tyro
from rich.console import Console

from powerprop.allocate import DISTRIBUTIONS, check_sparsity
from powerprop.commands.checkpoint import CommandError, build, read_state, weights_of
from powerprop.commands.show import grid, size_of
from powerprop.export.files import write
from powerprop.mask_entries import count
from powerprop.select import select
from powerprop.sparsify.prune import top_k_masks

__all__ = ["prune"]


def prune(
    file: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path],
    sparsity: float = 0.9,
    distribution: str = "uniform",
    where: tuple[str, ...] = (),
    model: str | None = None,
) -> None:
    """Keep the largest weights of a file and write the rest as zeros, small.

    Args:
        file: safetensors or a torch checkpoint (.pt) of tensors alone.
        out: the file to write; `powerprop.load` reads it.
        sparsity: fraction of the weights to remove.
        distribution: uniform (every layer alike), erk or global.
        where: names of weights, where * stands for anything; by default all tensors of two or more dimensions that
            are no embeddings by their name.
        model: package.module:function that makes the network, to know its weights by its layers instead.
    """
    try:
        check_sparsity(sparsity)
    except ValueError as error:
        raise CommandError(str(error)) from None
    if distribution not in DISTRIBUTIONS:
        raise CommandError(f"--distribution must be one of {', '.join(DISTRIBUTIONS)}, got {distribution!r}")
    stored = read_state(file)
    names = tuple(select(build(model))) if model and not where else where
    weights = weights_of(stored.state, names)
    masks = top_k_masks({n: w.abs() for n, w in weights.items()}, sparsity, distribution)
    pruned = {n: t.masked_fill(~masks[n], 0) if n in masks else t for n, t in stored.state.items()}
    sizes = write(pruned, out)
    table = grid(f"{file.name} -> {out.name}", ["weight", "shape", "zero before", "zero after"], 2)
    for name, weight in weights.items():
        before, after = (1 - count(t != 0) / max(1, t.numel()) for t in (weight, pruned[name]))
        table.add_row(name, "x".join(map(str, weight.shape)), f"{before:.2%}", f"{after:.2%}")
    console = Console()
    console.print(table)
    console.print(
        f"{out}: {size_of(stored.file_bytes)} -> {size_of(sizes.file_bytes)}", highlight=False, soft_wrap=True
    )
