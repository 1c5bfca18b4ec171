"""Models as files: safetensors that hold the weights that are not zero, checked when they are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from powerprop.export.encode import decode, encode, unstored
from powerprop.export.plan import Plan
from powerprop.files import FileError, write_atomically
from powerprop.mask_entries import count
from powerprop.tensorfiles import content_of, shape_of

__all__ = ["FORMAT", "Content", "Sizes", "TensorSize", "check_fits", "load", "metadata_of", "read", "save", "write"]

FORMAT = "powerprop-model-1"
PARTS = ("dense", "bits", "gaps", "values")
UNSTORED = 2**24
"""Zeros that no byte of a file need stand for, in all: older files do not store those that come last."""


@dataclass(frozen=True)
class TensorSize:
    """One tensor of a file: how it is stored, how much of it is not zero, and its bytes there and if it were dense."""

    shape: tuple[int, ...]
    dtype: str
    form: str
    nonzero: int
    bytes: int
    dense_bytes: int


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
    """
    return write(model.state_dict(), path, plan)


def load(path: str | Path, model: nn.Module) -> nn.Module:
    """Put what `save` wrote into a model of the same structure, and return it.

    A damaged or foreign file, and a model with other names, shapes or types, are errors; the model stays as it was.
    """
    state = read(path).state
    check_fits(path, state, model.state_dict())
    model.load_state_dict(state)
    return model


def write(state: Mapping[str, Any], path: str | Path, plan: Plan | None = None) -> Sizes:
    """`save` for a state dict."""
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    tied: dict[str, str] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise TypeError(f"only plain tensors can be saved, {name!r} is {_kind(tensor)}")
        first = owners.setdefault(_memory(name, tensor), name)
        if first != name:
            tied[name] = first
            continue
        shapes[name] = list(tensor.shape)
        tensors |= {f"{part}:{name}": value.cpu().clone() for part, value in encode(tensor).items()}
    metadata = {"format": FORMAT, "shapes": json.dumps(shapes), "tied": json.dumps(tied)}
    if plan is not None:
        metadata["plan"] = plan.to_json()
    content = to_safetensors(tensors, {**metadata, "sha256": _checksum(tensors, metadata)})
    write_atomically(path, content)
    return _sizes(tensors, shapes, tied, len(content))


def read(path: str | Path) -> Content:
    """Read and check a file that `save` wrote, without a model."""
    content = Path(path).read_bytes()
    with content_of(path, "a complete safetensors file of powerprop"):
        metadata = metadata_of(content)
        if metadata.get("format") != FORMAT:
            raise FileError(f"{path}: expected a file of format {FORMAT!r}, got {metadata.get('format')!r}")
        tensors = from_safetensors(content)
        if metadata.pop("sha256", None) != _checksum(tensors, metadata):
            raise FileError(f"{path}: the content does not have the checksum that was saved with it; it is damaged")
        shapes = {name: shape_of(shape) for name, shape in json.loads(metadata["shapes"]).items()}
        tied = json.loads(metadata["tied"])
        _check_stored(tensors, shapes)
        state = {name: decode(_parts(tensors, name), shape) for name, shape in shapes.items()}
        state |= {name: state[first] for name, first in tied.items()}
        plan = Plan.from_json(metadata["plan"]) if "plan" in metadata else None
        return Content(state, _sizes(tensors, shapes, tied, len(content)), plan)


def _check_stored(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """An error if tensors are declared that the bytes of the file do not stand for, before they take any memory."""
    missing = sum(unstored(_parts(tensors, name), shape) for name, shape in shapes.items())
    if missing > UNSTORED:
        raise ValueError(f"it declares {missing:,} values more than it stores")


def metadata_of(content: bytes) -> dict[str, str]:
    """The metadata of a safetensors file, which begins with the length of its JSON header."""
    length = int.from_bytes(content[:8], "little")
    if not 2 <= length <= len(content) - 8:
        raise ValueError("its header is cut off")
    header = json.loads(content[8 : 8 + length])
    return dict(header.get("__metadata__", {}).items())


def _parts(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    found = {
        part: tensors[f"{part}:{name}"] for part in ("dense", "bits", "gaps", "values") if f"{part}:{name}" in tensors
    }
    if not found:
        raise ValueError(f"{name!r} is missing")
    return found


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 of all names, types, shapes, bytes and metadata."""
    digest = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}\n{tensor.dtype}\n{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _memory(name: str, tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same numbers in the same memory."""
    if not tensor.numel() or tensor.device.type == "meta":
        return (name,)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _kind(value: Any) -> str:
    return f"of layout {value.layout}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _sizes(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], tied: Mapping[str, str], file_bytes: int
) -> Sizes:
    sizes = Sizes()
    for name, shape in shapes.items():
        parts = _parts(tensors, name)
        values = parts.get("dense", parts.get("values"))
        assert values is not None
        form = next(iter(parts))
        stored = sum(t.numel() * t.element_size() for t in parts.values())
        dense = torch.Size(shape).numel() * values.element_size()
        sizes[name] = TensorSize(tuple(shape), str(values.dtype)[6:], form, count(values != 0), stored, dense)
    for name, first in tied.items():
        sizes[name] = TensorSize(sizes[first].shape, sizes[first].dtype, f"as {first}", sizes[first].nonzero, 0, 0)
    sizes.file_bytes = file_bytes
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
