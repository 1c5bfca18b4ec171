"""Checkpoints of any origin as state dicts, and the networks that they belong to."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from torch import Tensor, nn

from powerprop.export.files import FORMAT, check_fits, metadata_of, read
from powerprop.files import FileError

__all__ = ["CommandError", "Stored", "build", "example", "filled", "read_state", "weights_of"]

EMBEDDINGS = ("*embed*", "*wte.*", "*wpe.*")
"""Names by which embeddings are known in a state dict, which says nothing of the layers."""


class CommandError(ValueError):
    """An argument of a command that cannot be."""


@dataclass(frozen=True)
class Stored:
    """A state dict and the file it came from."""

    path: Path
    state: dict[str, Tensor]
    file_bytes: int


def read_state(path: Path) -> Stored:
    """The state dict of a powerprop file, of any other safetensors file, or of a torch checkpoint without code."""
    if not path.is_file():
        raise FileError(f"{path} is not there, or not a file")
    return Stored(path, _read(path), path.stat().st_size)


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        return _read_torch(path)
    content = path.read_bytes()
    try:
        if metadata_of(content).get("format") == FORMAT:
            return read(path).state
        return dict(sorted(from_safetensors(content).items()))
    except FileError:
        raise
    except (SafetensorError, ValueError, AttributeError) as error:
        raise FileError(f"{path}: not a complete safetensors file ({error})") from None


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise FileError(f"{path}: not a torch checkpoint of tensors alone ({str(error).splitlines()[0]})") from None
    content = content.get("state_dict", content) if isinstance(content, Mapping) else content
    if not isinstance(content, Mapping) or not all(isinstance(v, Tensor) for v in content.values()):
        raise FileError(f"{path}: expected a state dict, names and tensors, got {type(content).__name__}")
    return dict(content)


def weights_of(state: Mapping[str, Tensor], where: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The weights of a state dict: tensors of at least two dimensions that are no embeddings by name, or `where`."""
    for pattern in where:
        if not any(fnmatchcase(n, pattern) for n in state):
            raise CommandError(f"--where {pattern!r} matches no tensor; there are {', '.join(state)}")
    if where:
        chosen = {n: t for n, t in state.items() if any(fnmatchcase(n, p) for p in where)}
    else:
        chosen = {n: t for n, t in state.items() if t.dim() > 1 and not any(fnmatchcase(n, p) for p in EMBEDDINGS)}
    return {n: t for n, t in chosen.items() if t.is_floating_point()}


def build(model: str | None) -> nn.Module:
    """The network that 'package.module:function' makes, found from the current folder too."""
    module, _, function = (model or "").partition(":")
    if not (module and function):
        raise CommandError(f"--model must be package.module:function, something that makes the network, got {model!r}")
    sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, TypeError) as error:
        raise CommandError(f"--model {model}: {error}") from None
    finally:
        sys.path.remove("")
    if not isinstance(made, nn.Module):
        raise CommandError(f"--model {model} must return a torch.nn.Module, got {type(made).__name__}")
    return made


def filled(model: str | None, stored: Stored) -> nn.Module:
    """The network with the weights of a file, in evaluation mode."""
    network = build(model)
    check_fits(stored.path, stored.state, network.state_dict())
    network.load_state_dict(stored.state)
    return network.eval()


def example(network: nn.Module, shape: tuple[int, ...], batch: int) -> Tensor:
    """A batch of random inputs of a shape, of the network's type; always the same."""
    if not shape or min(shape) < 1 or batch < 1:
        raise CommandError(f"--shape must be the positive sizes of one input, as in 3 32 32, got {shape} in {batch}")
    like = next(network.parameters(), torch.empty(0))
    return torch.rand(batch, *shape, generator=torch.Generator().manual_seed(0)).to(like)
