"""Learners on disk: one safetensors file with a JSON text in its header, and no pickle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from powerprop.optim import Powerprop
from powerprop.tensorfiles import read_tensors, write_tensors

__all__ = ["below", "check_settings", "check_shapes", "load_weights", "read_learner", "weights", "write_learner"]

FORMAT = "powerprop-learner-2"


def write_learner(path: str | Path, tensors: dict[str, Tensor], data: dict[str, Any]) -> None:
    """Write tensors and plain data as one file with a checksum, whole or not at all."""
    write_tensors(path, FORMAT, tensors, data)


def read_learner(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_learner` wrote, onto the CPU; a truncated, damaged or foreign file is an error that names it."""
    return read_tensors(path, FORMAT)


def check_settings(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """A learner goes on as it began; what an older file does not tell is not compared."""
    for name, value in own.items():
        if saved.get(name, value) != value:
            raise ValueError(f"the saved learner has {name} {saved[name]!r}, this one has {value!r}")


def check_shapes(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """The same names with the same shapes, or an error with all that differ."""
    there, here = ({(n, tuple(t.shape)) for n, t in tensors.items()} for tensors in (saved, own))
    if there != here:
        only = [dict(sorted(one - other)) for one, other in ((there, here), (here, there))]
        raise ValueError(f"of the weights that differ the saved learner has {only[0]}, this one has {only[1]}")


def weights(model: nn.Module, optimizer: Powerprop) -> dict[str, Tensor]:
    """All that a model holds. Of a weight with α only φ is kept; the model's weight is Ψ(φ)."""
    masters = optimizer.masters
    rest = {f"model/{n}": t for n, t in model.state_dict().items() if n not in masters}
    return rest | {f"phi/{n}": m.theta() if m.phi is None else m.phi for n, m in masters.items()}


@torch.no_grad()
def load_weights(model: nn.Module, optimizer: Powerprop, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `weights` gave; no weight is masked afterwards."""
    optimizer.set_masks(None, None)
    model.load_state_dict(below("model", tensors), strict=False)
    phi = below("phi", tensors)
    for name, master in optimizer.masters.items():
        if master.alpha > 1 or phi[name].dtype != master.param.dtype:
            master.restore(phi[name].clone(), None, None)
        master.param.copy_(phi[name] if master.phi is None else master.theta())


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with "prefix/", without it."""
    return {n[len(prefix) + 1 :]: t for n, t in tensors.items() if n.startswith(f"{prefix}/")}
