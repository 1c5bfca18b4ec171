"""The commands of `powerprop` for files of weights."""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from powerprop import advise as advice
from powerprop import export as exporting
from powerprop.export.file import FORMAT, check_fits, encode, read, write
from powerprop.files import FileError, content_of, header_of, write_atomically
from powerprop.mask_entries import count
from powerprop.select import matches, select
from powerprop.sparsify.prune import top_k_masks

__all__ = ["COMMANDS", "CommandError", "advise", "bench_model", "export", "inspect", "prune"]

SUFFIXES = {"sparse": ".sparse.safetensors", "dense": ".dense.safetensors", "onnx": ".onnx", "pt2": ".pt2"}
EMBEDDINGS = ("*embed*", "*wte.*", "*wpe.*")
"""Names by which embeddings are known in a state dict, which says nothing of the layers."""
WIDTH, DECADES = 80, 9


class CommandError(ValueError):
    """An argument of a command that cannot be."""


class Stored(NamedTuple):
    """A state dict and the file it came from."""

    path: Path
    state: dict[str, Tensor]

    @property
    def bytes(self) -> int:
        """The size of the file."""
        return self.path.stat().st_size


def inspect(file: Path) -> None:
    """Show the tensors of a file: how much is zero, what it takes, how large its weights are."""
    stored = read_state(file)
    rows = []
    for name, tensor in stored.state.items():
        dense, sparse = (size_of(sum(t.nbytes for t in each)) for each in ([tensor], encode(tensor).values()))
        rows.append([name, _shape(tensor), str(tensor.dtype)[6:], f"{_zero(tensor):.1%}", dense, sparse])
    print_table(f"{file.name}, {size_of(stored.bytes)}", ["tensor", "shape", "type", "zero", "dense", "sparse"], rows)
    _histogram([w.flatten().float() for w in weights_of(stored.state).values()])


def _histogram(weights: list[Tensor]) -> None:
    """How the sizes of the weights that are not zero are spread over powers of ten, and the sparsity of all."""
    values = torch.cat(weights) if weights else torch.zeros(0)
    left = values[values != 0].abs()
    print(f"\n{values.numel():,} weights, {_zero(values):.2%} zero; the others by magnitude:")
    if not left.numel() or not bool(left.isfinite().all()):
        print("  (none)" if not left.numel() else "  (some are not finite)")
        return
    top = math.floor(math.log10(float(left.max())))
    powers = left.log10().floor().clamp(top - DECADES + 1, top)
    parts = {power: count(powers == power) for power in range(top, top - DECADES, -1)}
    for power, part in ((p, n) for p, n in parts.items() if n):
        bar = "#" * round(40 * part / max(parts.values()))
        print(f"  1e{power:+03d} to 1e{power + 1:+03d}  {part / left.numel():6.1%}  {bar}")


def prune(file: Path, out: Path, sparsity: float, distribution: str, where: Sequence[str], model: str | None) -> None:
    """Keep the largest weights of a file and write the rest as zeros, small."""
    if not 0 <= sparsity < 1:
        raise CommandError(f"sparsity must be in [0, 1), got {sparsity:g}")
    stored = read_state(file)
    names = tuple(select(build(model))) if model and not where else tuple(where)
    weights = weights_of(stored.state, names)
    masks = top_k_masks({n: w.abs() for n, w in weights.items()}, sparsity, distribution)
    pruned = {n: t.masked_fill(~masks[n], 0) if n in masks else t for n, t in stored.state.items()}
    sizes = write(pruned, out)
    rows = [[n, _shape(w), f"{_zero(w):.2%}", f"{_zero(pruned[n]):.2%}"] for n, w in weights.items()]
    print_table(f"{file.name} -> {out.name}", ["weight", "shape", "zero before", "zero after"], rows)
    print(f"{out}: {size_of(stored.bytes)} -> {size_of(sizes.file_bytes)}")


def export(file: Path, format: str, model: str | None, shape: Sequence[int], batch: int, out: Path | None) -> None:
    """Write the network of a file for where it will run."""
    stored, out = read_state(file), out or file.with_suffix(SUFFIXES[format])
    if format == "dense":
        write_atomically(out, to_safetensors({n: t.clone().contiguous() for n, t in stored.state.items()}))
    else:
        network = filled(model, stored)
        x = example(network, shape, batch)
        if format == "onnx":
            exporting.onnx(network, x, out)
        elif format == "pt2":
            torch.export.save(exporting.program(network, x), content := io.BytesIO())
            write_atomically(out, content.getvalue())
        else:
            write(stored.state, out, plan := exporting.sparse(network, x).plan)
            print(plan)
    print(f"{out}: {size_of(out.stat().st_size)}, from {size_of(stored.bytes)}")


def bench_model(file: Path, model: str, shape: Sequence[int], batches: Sequence[int]) -> None:
    """Measure a network on this machine, as it is and exported."""
    network, rows, threads = filled(model, read_state(file)), [], torch.get_num_threads()
    for batch in batches:
        plan = exporting.sparse(network, example(network, shape, batch)).plan
        dense, exported = (f"{plan.times[name] * 1e6:,.0f}" for name in ("dense", plan.network))
        sparse = f"{sum(c.form == 'sparse' for c in plan.choices)} of {len(plan.choices)}"
        gone = str(sum(plan.removed.values()))
        rows.append([str(batch), dense, exported, f"{plan.speedup:.2f}x", plan.network, sparse, gone])
        threads = plan.threads
    columns = ["batch", "dense", "exported", "faster", "network", "sparse layers", "units gone"]
    print_table(f"{file.name}, {threads} threads, microseconds", columns, rows)


def advise(model: str, goal: str) -> None:
    """Say which method, settings and lines of code serve a goal, and what was measured with them."""
    print(advice.advise(build(model), goal))


COMMANDS: dict[str, Callable[..., None]] = {
    "inspect": inspect, "prune": prune, "export": export, "bench-model": bench_model, "advise": advise,
}  # fmt: skip


# Files, networks, tables.


def read_state(path: Path) -> Stored:
    """The state dict of a powerprop file, of any other safetensors file, or of a torch checkpoint without code."""
    if not path.is_file():
        raise FileError(f"{path} is not there, or not a file")
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        return Stored(path, _read_torch(path))
    content = path.read_bytes()
    if header_of(path, content).get("format") == FORMAT:
        return Stored(path, dict(read(path).state))
    with content_of(path, "a complete safetensors file"):
        return Stored(path, dict(sorted(from_safetensors(content).items())))


def _read_torch(path: Path) -> dict[str, Tensor]:
    stored = path.read_bytes()
    try:
        content: Any = torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)
    except Exception as error:  # of the bytes alone, which may lead torch's reader to any: struct.error, OSError, …
        reason = (str(error).splitlines() or ["it is empty"])[0]
        raise FileError(f"{path}: not a torch checkpoint of tensors alone ({reason})") from None
    content = content.get("state_dict", content) if isinstance(content, Mapping) else content
    if not isinstance(content, Mapping) or not all(isinstance(v, Tensor) for v in content.values()):
        raise FileError(f"{path}: expected a state dict, names and tensors, got {type(content).__name__}")
    return dict(content)


def weights_of(state: Mapping[str, Tensor], where: Sequence[str] = ()) -> dict[str, Tensor]:
    """The weights of a state dict: tensors of at least two dimensions that are no embeddings by name, or `where`."""
    for pattern in where:
        if not any(matches(name, [pattern]) for name in state):
            raise CommandError(f"--where {pattern!r} matches no tensor; there are {', '.join(state)}")
    floating = {name: t for name, t in state.items() if t.is_floating_point()}
    if where:
        return {name: t for name, t in floating.items() if matches(name, where)}
    return {name: t for name, t in floating.items() if t.dim() > 1 and not matches(name, EMBEDDINGS)}


def build(model: str | None) -> nn.Module:
    """The network that 'package.module:function' or 'file.py:function' makes, found from the current folder too."""
    module, _, function = (model or "").partition(":")
    if not (module and function):
        wanted = "package.module:function or file.py:function, something that makes the network"
        raise CommandError(f"--model must be {wanted}, got {model!r}")
    sys.path.insert(0, "")
    try:
        made = getattr(_module(module), function)()
    except (ImportError, AttributeError, OSError, TypeError) as error:
        raise CommandError(f"--model {model}: {error}") from None
    finally:
        sys.path.remove("")
    if not isinstance(made, nn.Module):
        raise CommandError(f"--model {model} must return a torch.nn.Module, got {type(made).__name__}")
    return made


def _module(name: str) -> ModuleType:
    """A module by its name, or a file that ends in .py."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec is not None, name
    assert spec.loader is not None, name
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def filled(model: str | None, stored: Stored) -> nn.Module:
    """The network with the weights of a file, in evaluation mode."""
    network = build(model)
    check_fits(stored.path, stored.state, network.state_dict())
    network.load_state_dict(stored.state)
    return network.eval()


def example(network: nn.Module, shape: Sequence[int], batch: int) -> Tensor:
    """A batch of random inputs of a shape, of the network's type; always the same."""
    if not shape or min(shape) < 1 or batch < 1:
        raise CommandError(f"--shape must be the positive sizes of one input, as in 3 32 32, got {shape} in {batch}")
    like = next(network.parameters(), torch.empty(0))
    return torch.rand(batch, *shape, generator=torch.Generator().manual_seed(0)).to(like)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of at most 80 columns; a long first value goes on in the next line."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    widths[0] = min(widths[0], max(12, WIDTH - sum(widths[1:]) - 2 * len(widths[1:])))
    print(f"{title}\n")
    for row in (columns, *rows):
        first, *more = textwrap.wrap(row[0], widths[0]) or [""]
        rest = "".join(f"  {value:>{width}}" for value, width in zip(row[1:], widths[1:], strict=True))
        print(f"{first:<{widths[0]}}{rest}", *more, sep="\n")


def size_of(size: float) -> str:
    """Bytes for people: 1.2 MB."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one"


def _zero(tensor: Tensor) -> float:
    """The fraction of the values that is zero."""
    return 1 - count(tensor != 0) / max(1, tensor.numel())
