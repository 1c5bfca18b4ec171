"""What `Powerprop` saves: φ, masks and the sparsifier's state as tensors beside the base optimiser's, weight by weight.

torch's own tools carry only what stands in the state of a parameter, and some of them (`torch.distributed.checkpoint`)
load only names that the optimiser has already, into tensors of the same size. So every weight always has

    powerprop             [α, φ is kept, active is a mask, trainable is a mask, *shape]
    powerprop_phi         φ, or the weight itself where masks need no φ; left out where there is nothing to keep
    powerprop_active      one bit per weight, and powerprop_trainable: left out if there are no masks and no sparsifier

and one of them has the sparsifier's numbers and words as a text, `powerprop_sparsify`, and its tensors beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from powerprop.masks import pack
from powerprop.master import Master

if TYPE_CHECKING:
    from powerprop.optim import Powerprop

__all__ = ["ACTIVE", "HEADER", "PHI", "SPARSIFY", "TRAINABLE", "State", "is_ours", "keys_of", "parts", "with_parts"]

HEADER, PHI, ACTIVE, TRAINABLE = "powerprop", "powerprop_phi", "powerprop_active", "powerprop_trainable"
SPARSIFY = "powerprop_sparsify"

_TEXT_SIZE = 1024
"""The sparsifier's text is filled up to a multiple of this: its numbers change, and its tensor must keep its size."""


def keys_of(saved: list[dict[str, Any]], groups: list[dict[str, Any]]) -> dict[int, Any]:
    """The key in a saved state of every parameter, by the parameter's id."""
    pairs = [zip(s["params"], g["params"], strict=True) for s, g in zip(saved, groups, strict=True)]
    return {id(param): key for pair in pairs for key, param in pair}


def with_parts(optimizer: Powerprop, state: Mapping[str, Any]) -> dict[str, Any]:
    """The base optimiser's state dict with our part in the state of every weight."""
    keys = keys_of(state["param_groups"], optimizer.base.param_groups)
    # torch.distributed.checkpoint asks for an entry of every parameter as soon as there is one of any.
    entries = {**{key: {} for key in keys.values()}, **state["state"]}
    for name, part in parts(optimizer).items():
        master = optimizer.masters[name]
        if (key := keys.get(id(master.param))) is not None:
            entries[key] = {**entries[key], **{k: t.clone() for k, t in part.items()}}
        elif optimizer.sparsify is not None or not (master.active is master.trainable is None):
            raise ValueError(f"the base optimiser no longer holds {name!r}, so that its masks cannot be saved")
    return {**state, "state": entries}


def parts(optimizer: Powerprop, only: str | None = None) -> dict[str, dict[str, Tensor]]:
    """Our part of the state of every weight, or of one. The sparsifier's own goes with the first that is trained."""
    masters, sparsify = optimizer.masters, optimizer.sparsify
    found = {name: _part(masters[name], sparsify is not None) for name in (masters if only is None else [only])}
    if sparsify is not None:
        first = next((n for n, m in masters.items() if m.param.requires_grad), next(iter(masters)))
        own = _sparsifier_part(sparsify.state_dict(), masters, first)
        found = {name: {**part, **own.get(name, {})} for name, part in found.items()}
    return found


def _part(master: Master, masked: bool) -> dict[str, Tensor]:
    kept = [x is not None for x in (master.phi, master.active, master.trainable)]
    part = {HEADER: torch.tensor([master.alpha, *kept, *master.param.shape], dtype=torch.float64, device="cpu")}
    if masked or any(kept):
        part[PHI] = master.theta() if master.phi is None else master.phi
    if masked or any(kept[1:]):
        part |= {ACTIVE: _bits(master, master.active), TRAINABLE: _bits(master, master.trainable)}
    return {name: tensor.to(master.param.device) for name, tensor in part.items()}


def _bits(master: Master, mask: Tensor | None) -> Tensor:
    return pack(torch.ones_like(master.param, dtype=torch.bool) if mask is None else mask)


def _sparsifier_part(
    state: Mapping[str, Any], masters: Mapping[str, Master], first: str
) -> dict[str, dict[str, Tensor]]:
    """Numbers and words as text, tensors by name, and tensors of every weight with that weight."""
    text: dict[str, Any] = {"values": {}, "tensors": [], "weights": {}}
    own: dict[str, dict[str, Tensor]] = {first: {}}
    for key, value in state.items():
        if isinstance(value, Tensor):
            text["tensors"].append(key)
            own[first][f"{SPARSIFY}_{key}"] = value
        elif isinstance(value, Mapping) and all(n in masters and isinstance(t, Tensor) for n, t in value.items()):
            text["weights"][key] = len(value)
            for name, tensor in value.items():
                own.setdefault(name, {})[f"{SPARSIFY}_{key}"] = tensor
        elif _survives_as_text(value):
            text["values"][key] = value
        else:
            raise TypeError(
                f"a sparsifier's state may hold tensors, tensors by the name of a weight, numbers and words, "
                f"got {key}={value!r}"
            )
    own[first][SPARSIFY] = _as_bytes(json.dumps(text))
    return {n: {k: t.to(masters[n].param.device) for k, t in tensors.items()} for n, tensors in own.items()}


def _survives_as_text(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _as_bytes(text: str) -> Tensor:
    encoded = text.encode()
    encoded += b" " * (-len(encoded) % _TEXT_SIZE)
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


class State(MutableMapping[Any, Any]):
    """`Powerprop.state`: the base optimiser's state, and with that of each weight our part, for tools that ask for it.

    Whatever is written goes to the base optimiser.
    """

    def __init__(self, optimizer: Powerprop) -> None:
        self._base: MutableMapping[Any, Any] = optimizer.base.state
        self._optimizer = optimizer

    def __getitem__(self, param: Any) -> Any:
        entry = self._base[param]
        name = next((n for n, m in self._optimizer.masters.items() if m.param is param), None)
        return entry if name is None else Entry(entry, parts(self._optimizer, name)[name])

    def get(self, param: Any, default: Any = None) -> Any:
        """As for any mapping; unlike the brackets it adds nothing."""
        return default if param not in self._base else self[param]

    def __contains__(self, param: object) -> bool:
        return param in self._base

    def __setitem__(self, param: Any, value: Any) -> None:
        entry = isinstance(value, Mapping)
        self._base[param] = {k: v for k, v in value.items() if not is_ours(k)} if entry else value

    def __delitem__(self, param: Any) -> None:
        del self._base[param]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


class Entry(MutableMapping[str, Any]):
    """The state of one weight. Our part can be read; it follows the weight by itself, and takes nothing written."""

    def __init__(self, base: MutableMapping[str, Any], part: Mapping[str, Tensor]) -> None:
        self._base, self._part = base, part

    def __getitem__(self, name: str) -> Any:
        return self._part[name] if name in self._part else self._base[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if not is_ours(name):
            self._base[name] = value

    def __delitem__(self, name: str) -> None:
        del self._base[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._base, *self._part])

    def __len__(self) -> int:
        return len(self._base) + len(self._part)


def is_ours(name: object) -> bool:
    """True for the names of our part."""
    return isinstance(name, str) and (name == HEADER or name.startswith(f"{HEADER}_"))
