"""powerprop export: a network for where it will run."""

from __future__ import annotations

import io
from pathlib import Path

import torch
import tyro
from rich.console import Console
from safetensors.torch import save as to_safetensors

import powerprop.export as exporting
from powerprop.commands.checkpoint import CommandError, Stored, example, filled, read_state
from powerprop.commands.show import size_of
from powerprop.export.files import write
from powerprop.files import write_atomically

__all__ = ["export"]

SUFFIXES = {"sparse": ".sparse.safetensors", "dense": ".dense.safetensors", "onnx": ".onnx", "pt2": ".pt2"}


def export(
    file: tyro.conf.Positional[Path],
    format: str = "sparse",
    model: str | None = None,
    shape: tuple[int, ...] = (),
    batch: int = 1,
    out: Path | None = None,
) -> None:
    """Write the network of a file for where it will run.

    Args:
        file: safetensors or a torch checkpoint (.pt) of tensors alone.
        format: sparse (weights with the measured plan, for powerprop.export.load), onnx, pt2 (torch.export) or dense
            (plain safetensors, for which no --model is needed).
        model: package.module:function that makes the network.
        shape: of one input, without the batch: 784, or 3 32 32.
        batch: inputs at a time, to be fast at.
        out: the file to write; by default beside FILE, with another ending.
    """
    if format not in SUFFIXES:
        raise CommandError(f"--format must be one of {', '.join(SUFFIXES)}, got {format!r}")
    stored, console = read_state(file), Console()
    out = out or file.with_suffix(SUFFIXES[format])
    if format == "dense":
        write_atomically(out, to_safetensors({n: t.clone().contiguous() for n, t in stored.state.items()}))
    else:
        _with_network(stored, format, model, shape, batch, out, console)
    line = f"{out}: {size_of(out.stat().st_size)}, from {size_of(stored.file_bytes)}"
    console.print(line, highlight=False, soft_wrap=True)


def _with_network(
    stored: Stored, format: str, model: str | None, shape: tuple[int, ...], batch: int, out: Path, console: Console
) -> None:
    network = filled(model, stored)
    x = example(network, shape, batch)
    if format == "onnx":
        exporting.onnx(network, x, out)
    elif format == "pt2":
        content = io.BytesIO()
        torch.export.save(exporting.program(network, x), content)
        write_atomically(out, content.getvalue())
    else:
        plan = exporting.sparse(network, x).plan
        write(stored.state, out, plan)
        console.print(str(plan), highlight=False, markup=False)
