"""Masks: one boolean tensor per named weight, with set algebra, counts, and one bit per weight on disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from powerprop.files import content_of, read_tensors, shape_of, write_tensors
from powerprop.mask_entries import count
from powerprop.select import Where, select

__all__ = ["Masks", "pack", "unpack"]

_FORMAT = "powerprop-masks-2"


def pack(mask: Tensor) -> Tensor:
    """A boolean tensor of any shape as bytes, eight weights to each."""
    return torch.from_numpy(np.packbits(mask.detach().cpu().numpy().reshape(-1)))


def unpack(bits: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """The boolean tensor that `pack` made these bytes from."""
    size = math.prod(shape)
    if bits.dtype != torch.uint8 or bits.numel() != (size + 7) // 8:
        found = f"{bits.numel()} of {bits.dtype}"
        raise ValueError(f"a mask of shape {tuple(shape)} packs to {(size + 7) // 8} bytes, got {found}")
    flat = np.unpackbits(bits.cpu().numpy(), count=size).astype(bool)
    return torch.from_numpy(flat).reshape(tuple(shape))


class Masks(Mapping[str, Tensor]):
    """Named boolean masks. `a & b`, `a | b`, `a - b` and `~a` work weight by weight.

    masks: name -> boolean tensor of the weight's shape; True means kept.

    Examples:
        >>> masks = pp.prune(model, 0.9)
        >>> masks.save("masks.safetensors")
        >>> pp.Masks.load("masks.safetensors") == masks
        True
    """

    def __init__(self, masks: Mapping[str, Tensor]) -> None:
        for name, mask in masks.items():
            if mask.dtype != torch.bool:
                raise TypeError(f"a mask must be a bool tensor, got {mask.dtype} for {name!r}")
        self._masks = dict(masks)

    @classmethod
    def ones(cls, model: nn.Module, where: Where | None = None) -> Masks:
        """Everything kept, for the chosen weights of the model."""
        return cls({n: torch.ones_like(p, dtype=torch.bool) for n, p in select(model, where).items()})

    @classmethod
    def nonzero(cls, model: nn.Module, where: Where | None = None) -> Masks:
        """The weights of the model that are not exactly zero."""
        return cls({n: p.detach() != 0 for n, p in select(model, where).items()})

    def __getitem__(self, name: str) -> Tensor:
        return self._masks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._masks)

    def __len__(self) -> int:
        return len(self._masks)

    def __and__(self, other: Mapping[str, Tensor]) -> Masks:
        return self._combine(other, torch.logical_and)

    def __or__(self, other: Mapping[str, Tensor]) -> Masks:
        return self._combine(other, torch.logical_or)

    def __sub__(self, other: Mapping[str, Tensor]) -> Masks:
        return self._combine(other, torch.gt)

    def __invert__(self) -> Masks:
        return Masks({n: ~m for n, m in self.items()})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Masks):
            return NotImplemented
        return self.keys() == other.keys() and all(torch.equal(m, other[n].to(m.device)) for n, m in self.items())

    __hash__ = None  # type: ignore[assignment]

    def _combine(self, other: Mapping[str, Tensor], op: Callable[[Tensor, Tensor], Tensor]) -> Masks:
        if self.keys() != other.keys():
            raise ValueError(f"masks of different weights: {sorted(self)} against {sorted(other)}")
        for name, mask in self.items():
            if mask.shape != other[name].shape:
                raise ValueError(f"{name!r}: masks of shapes {tuple(mask.shape)} and {tuple(other[name].shape)}")
        return Masks({n: op(m, other[n].to(m.device)) for n, m in self.items()})

    def numel(self) -> int:
        """How many weights the masks speak of."""
        return sum(m.numel() for m in self.values())

    def count(self) -> int:
        """How many weights are kept."""
        return sum(count(m) for m in self.values())

    def density(self) -> float:
        """The fraction of weights kept."""
        return self.count() / max(1, self.numel())

    def sparsity(self) -> float:
        """The fraction of weights dropped."""
        return 1 - self.density()

    def overlap(self, other: Mapping[str, Tensor]) -> float:
        """|a ∩ b| / |a|: the fraction of the kept weights that the other masks keep too (paper, figure 2b)."""
        return (self & other).count() / max(1, self.count())

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        """Set the masked weights of the model to exactly zero; if one mask does not fit, none is applied."""
        named = dict(model.named_parameters())
        weights = {name: _weight(named, name, mask) for name, mask in self.items()}
        for name, weight in weights.items():
            weight.masked_fill_(~self[name].to(weight.device), 0)

    def save(self, path: str | Path) -> None:
        """One safetensors file at one bit per weight with a checksum, written atomically."""
        shapes = {n: list(m.shape) for n, m in self.items()}
        write_tensors(path, _FORMAT, {n: pack(m) for n, m in self.items()}, shapes)

    @classmethod
    def load(cls, path: str | Path) -> Masks:
        """Read what `save` wrote; a truncated, damaged or foreign file is an error that names it."""
        tensors, shapes = read_tensors(path, _FORMAT)
        with content_of(path):
            return cls({n: unpack(tensors[n], shape_of(s)) for n, s in shapes.items()})

    def __repr__(self) -> str:
        return f"Masks({len(self)} weights, {self.count():,} of {self.numel():,} kept, density {self.density():.4f})"


def _weight(named: Mapping[str, nn.Parameter], name: str, mask: Tensor) -> nn.Parameter:
    if name not in named:
        raise KeyError(f"the model has no weight {name!r}; it has {', '.join(named)}")
    if named[name].shape != mask.shape:
        raise ValueError(f"{name!r} has shape {tuple(named[name].shape)}, its mask {tuple(mask.shape)}")
    return named[name]
