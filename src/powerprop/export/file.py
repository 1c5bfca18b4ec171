"""Models as files: the weights that are not zero, and where they are, as a bitmask or as gaps.

    bits:  one bit per weight
    gaps:  one byte per value, the number of zeros before it; 255 means 255 zeros and no value yet

Gaps are smaller where less than one weight in eight is left. The zeros after the last value have bytes too, so that a
few bytes cannot declare a tensor of any size. The file is safetensors with a checksum of all its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from powerprop.export.exported import Exported, Plan
from powerprop.export.measure import sparse
from powerprop.files import FileError, content_of, read_tensors, shape_of, write_tensors
from powerprop.mask_entries import count
from powerprop.masks import pack, unpack

__all__ = ["FORMAT", "Content", "Sizes", "TensorSize", "check_fits", "encode", "load", "read", "save", "write"]

FORMAT = "powerprop-model-2"
STEP = 255
Places = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Parts = dict[str, Tensor]
"""{"dense"}, {"bits", "values"} or {"gaps", "values"}."""


@dataclass(frozen=True)
class TensorSize:
    """One tensor of a file: how it is stored, how much of it is not zero, and its bytes there and if it were dense."""

    shape: tuple[int, ...]
    dtype: str
    form: str
    nonzero: int
    bytes: int
    dense_bytes: int

    @classmethod
    def of(cls, parts: Parts, shape: tuple[int, ...]) -> TensorSize:
        """What these parts take."""
        form, *_ = parts
        values = parts["dense" if form == "dense" else "values"]
        stored, dense = sum(t.nbytes for t in parts.values()), math.prod(shape) * values.element_size()
        return cls(shape, str(values.dtype)[6:], form, count(values != 0), stored, dense)


class Sizes(dict[str, TensorSize]):
    """The tensors of a file by name, with the bytes of the whole file; prints as a summary."""

    file_bytes: int

    @property
    def dense_bytes(self) -> int:
        """What the tensors take as they are in memory."""
        return sum(size.dense_bytes for size in self.values())

    @property
    def ratio(self) -> float:
        """Bytes of the file for each byte of the tensors."""
        return self.file_bytes / max(1, self.dense_bytes)

    def __str__(self) -> str:
        return f"{self.file_bytes:,} bytes, {self.ratio:.1%} of {self.dense_bytes:,} dense"


@dataclass(frozen=True)
class Content:
    """What a file holds: the state dict, its sizes there, and the plan of an export if it has one."""

    state: dict[str, Tensor]
    sizes: Sizes
    plan: Plan | None = None


def save(model: nn.Module, path: str | Path, plan: Plan | None = None) -> Sizes:
    """Write the model's state dict, each tensor dense or as its non-zero values, whichever is smaller; returns sizes.

    The values come back bit for bit, but for the sign of zeros. Tensors that share memory (tied weights) are stored
    once. The file is written atomically, holds a checksum of its content, and nothing in it is ever executed.

    plan: of an export (`exported.plan`), to be followed where the file is read: see `powerprop.export.load`.

    Examples:
        >>> masks = pp.prune(model, 0.9)
        >>> sizes = pp.save(model, "net.safetensors")
    """
    return write(model.state_dict(), path, plan)


def load(path: str | Path, model: nn.Module) -> nn.Module:
    """Put what `save` wrote into a model of the same structure, and return it.

    A damaged or foreign file, and a model with other names, shapes or types, are errors; the model stays as it was.

    Examples:
        >>> sizes = pp.save(model, "net.safetensors")
        >>> model = pp.load("net.safetensors", model)
    """
    _load(path, model)
    return model


def load_sparse(path: str | Path, model: nn.Module, example: Any) -> Exported:
    """Read a file into a model and export it by the plan in the file; without a plan it is measured here.

    Examples:
        >>> sizes = pp.save(model, "net.safetensors", plan=pp.export.sparse(model, x).plan)
        >>> fast = pp.export.load("net.safetensors", model, x)
    """
    return sparse(model, example, plan=_load(path, model).plan)


def _load(path: str | Path, model: nn.Module) -> Content:
    content = read(path)
    check_fits(path, content.state, model.state_dict())
    model.load_state_dict(content.state)
    return content


def write(state: Mapping[str, Any], path: str | Path, plan: Plan | None = None) -> Sizes:
    """`save` for a state dict."""
    parts: dict[str, Parts] = {}
    shapes: dict[str, list[int]] = {}
    tied: dict[str, str] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            kind = f"of layout {tensor.layout}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise TypeError(f"only plain tensors can be saved, {name!r} is {kind}")
        first = owners.setdefault(_memory(name, tensor), name)
        if first != name:
            tied[name] = first
        else:
            shapes[name], parts[name] = list(tensor.shape), encode(tensor)
    tensors = {f"{part}:{name}": t for name, each in parts.items() for part, t in each.items()}
    data = {"shapes": shapes, "tied": tied, "plan": None if plan is None else plan.to_json()}
    write_tensors(path, FORMAT, tensors, data)
    return _sizes(path, parts, {name: tuple(shape) for name, shape in shapes.items()}, tied)


def read(path: str | Path) -> Content:
    """Read and check a file that `save` wrote, without a model."""
    tensors, data = read_tensors(path, FORMAT)
    with content_of(path):
        shapes, tied, plan = {n: shape_of(s) for n, s in data["shapes"].items()}, data["tied"], data["plan"]
        parts = {name: _parts(tensors, name) for name in shapes}
        state = {name: decode(parts[name], shape) for name, shape in shapes.items()}
        state |= {name: state[first] for name, first in tied.items()}
        sizes = _sizes(path, parts, shapes, tied)
        return Content(state, sizes, None if plan is None else Plan.from_json(plan))


def _parts(tensors: Mapping[str, Tensor], name: str) -> Parts:
    found = {p: tensors[f"{p}:{name}"] for p in ("dense", "bits", "gaps", "values") if f"{p}:{name}" in tensors}
    if not found:
        raise ValueError(f"{name!r} is missing")
    return found


def _memory(name: str, tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same numbers in the same memory."""
    if not tensor.numel() or tensor.device.type == "meta":
        return (name,)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _sizes(
    path: str | Path, parts: dict[str, Parts], shapes: dict[str, tuple[int, ...]], tied: dict[str, str]
) -> Sizes:
    sizes = Sizes({name: TensorSize.of(each, shapes[name]) for name, each in parts.items()})
    for name, first in tied.items():
        sizes[name] = TensorSize(shapes[first], sizes[first].dtype, f"as {first}", sizes[first].nonzero, 0, 0)
    sizes.file_bytes = Path(path).stat().st_size
    return sizes


def check_fits(path: str | Path, state: Mapping[str, Tensor], wanted: Mapping[str, Any]) -> None:
    """An error that names the file and the first differences, if a state dict is not of this model."""
    problems = [f"the model has no {name!r}" for name in state if name not in wanted]
    problems += [f"the file has no {name!r}" for name in wanted if name not in state]
    for name in (n for n in state if n in wanted):
        for what in ("shape", "dtype"):
            here, there = getattr(wanted[name], what), getattr(state[name], what)
            if here != there:
                problems.append(f"{name!r} has {what} {_show(there)} in the file and {_show(here)} in the model")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise FileError(f"{path} is of another model: {'; '.join(problems[:5])}{more}")


def _show(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


# --- tensors as bytes -------------------------------------------------------------------------------------------------


def encode(tensor: Tensor) -> Parts:
    """The smallest of {"dense"}, {"bits", "values"} and {"gaps", "values"}. Zeros of either sign count as zero."""
    flat = tensor.detach().flatten()
    kept = flat != 0
    values = flat[kept]
    places = {"bits": pack(kept), "gaps": to_gaps(np.flatnonzero(kept.cpu().numpy()), flat.numel())}
    form = min(places, key=lambda name: places[name].numel())
    if flat.nbytes <= places[form].numel() + values.nbytes:
        return {"dense": tensor.detach().contiguous()}
    return {form: places[form], "values": values}


def decode(parts: Parts, shape: tuple[int, ...]) -> Tensor:
    """The tensor that `encode` made these parts from; what does not fit is an error before anything is allocated."""
    if "dense" in parts:
        if tuple(parts["dense"].shape) != shape:
            raise ValueError(f"a tensor of shape {tuple(parts['dense'].shape)} is declared as {shape}")
        return parts["dense"]
    values, size = parts["values"], math.prod(shape)
    places = np.flatnonzero(unpack(parts["bits"], (size,))) if "bits" in parts else from_gaps(parts["gaps"], size)
    if values.ndim != 1 or len(places) != len(values):
        raise ValueError(f"{tuple(values.shape)} values for {len(places)} places in a tensor of shape {shape}")
    result = torch.zeros(size, dtype=values.dtype)
    result[torch.from_numpy(places)] = values
    return result.view(shape)


def to_gaps(places: Places, size: int) -> Tensor:
    """Rising places in a tensor of a size as gaps: 0 1 5 -> 0 0 3, and 255 for every 255 zeros after them."""
    gaps = np.diff(places, prepend=-1) - 1
    last = int(places[-1]) + 1 if len(places) else 0
    code = np.full(len(gaps) + int((gaps // STEP).sum()) + (size - last) // STEP, STEP, dtype=np.uint8)
    code[np.cumsum(gaps // STEP + 1) - 1] = gaps % STEP
    return torch.from_numpy(code)


def from_gaps(code: Tensor, size: int) -> Places:
    """The places that `to_gaps` made this code from; other sizes than it stands for are errors."""
    if code.dtype != torch.uint8 or code.ndim != 1:
        raise ValueError(f"expected gaps as a row of bytes, got {code.dtype} {tuple(code.shape)}")
    steps = code.numpy().astype(np.int64)
    ends = steps != STEP
    stored = int(steps.sum()) + int(ends.sum())
    if not stored <= size < stored + STEP:
        raise ValueError(f"it declares {size:,} values and stores {stored:,}")
    places: Places = np.cumsum(steps + ends)[ends] - 1
    return places
