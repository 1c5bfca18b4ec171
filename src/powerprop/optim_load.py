"""Take up a saved state of `Powerprop`: all of it is read and checked before anything is changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.masks import unpack
from powerprop.master import Master
from powerprop.optim_state import ACTIVE, HEADER, PHI, SPARSIFY, TRAINABLE, is_ours, keys_of
from powerprop.stand_ins import Pairs, standing_in

if TYPE_CHECKING:
    from powerprop.optim import Powerprop

__all__ = ["load_state"]


class Saved(NamedTuple):
    """The saved part of one weight."""

    phi: Tensor | None
    theta: Tensor | None
    active: Tensor | None
    trainable: Tensor | None


def load_state(optimizer: Powerprop, state: Mapping[str, Any]) -> None:
    """Load the base optimiser's state, the sparsifier's, φ and masks, or nothing at all."""
    _check_form(optimizer, state)
    found = _our_parts(optimizer, state)
    weights = {n: _read(optimizer.masters[n], part) for n, part in found.items()}
    sparsifier = _sparsifier_state(optimizer, found)
    with _put_back_on_error(optimizer.base):
        with standing_in(optimizer.base, _stand_ins(optimizer, weights)):
            optimizer.base.load_state_dict(_without_parts(optimizer, state))
        if optimizer.sparsify is not None:
            optimizer.sparsify.load_state_dict(sparsifier)
    for name, saved in weights.items():
        optimizer.masters[name].restore(saved.phi, saved.active, saved.trainable, saved.theta)


@contextmanager
def _put_back_on_error(base: Optimizer) -> Iterator[None]:
    """torch loads a state into new objects, so that the old ones can be put back."""
    state, entries = base.state, dict(base.state)
    groups, params = base.param_groups, [group["params"] for group in base.param_groups]
    try:
        yield
    except BaseException:
        state.clear()
        state.update(entries)
        for group, own in zip(groups, params, strict=True):
            group["params"] = own
        base.state, base.param_groups = state, groups
        raise


def _check_form(optimizer: Powerprop, state: Mapping[str, Any]) -> None:
    if missing := [key for key in ("state", "param_groups") if key not in state]:
        raise ValueError(f"an optimiser's state has 'state' and 'param_groups', this one lacks {', '.join(missing)}")
    groups = state["param_groups"], optimizer.base.param_groups
    have, want = ([len(group["params"]) for group in each] for each in groups)
    if have != want:
        raise ValueError(f"the state is of groups with {have} parameters, not {want}")


# --- our part of it -------------------------------------------------------------------------------------------------


def _our_parts(optimizer: Powerprop, state: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Our part by the name of the weight: of all weights that need one, or of none if the state is a plain one."""
    keys = keys_of(state["param_groups"], optimizer.base.param_groups)
    names = {keys[id(p)]: n for n, p in optimizer.model.named_parameters() if id(p) in keys}
    names |= {keys[id(m.param)]: n for n, m in optimizer.masters.items() if id(m.param) in keys}
    found = {names.get(k, str(k)): entry for k, entry in state["state"].items() if _has_part(entry)}
    masked = [n for n, m in optimizer.masters.items() if not (m.active is m.trainable is None)]
    if not found and (optimizer.sparsify is not None or masked):
        why = f"sparsify={type(optimizer.sparsify).__name__}" if optimizer.sparsify else f"masks on {masked}"
        raise ValueError(
            f"the state holds no masks (no weight in it has {HEADER!r}), but this optimiser has {why}: it was saved by "
            f"a plain optimiser, or by a tool that drops what it does not know; wrap a new one without them to go on"
        )
    want = {n for n, m in optimizer.masters.items() if id(m.param) in keys}
    spared = {n for n in want if not (optimizer.masters[n].param.requires_grad or optimizer.sparsify or n in masked)}
    if found and not (want - spared <= set(found) <= want):  # torch.distributed.checkpoint leaves frozen weights out
        raise ValueError(f"the state is of weights {sorted(found)}, not {sorted(want)}")
    return found


def _has_part(entry: Any) -> bool:
    return isinstance(entry, Mapping) and HEADER in entry


def _read(master: Master, part: Mapping[str, Any]) -> Saved:
    header = _tensor(master, part, HEADER).tolist()
    if len(header) < 4:
        raise ValueError(f"{HEADER!r} of {master.name!r} must hold at least 4 numbers, got {header}")
    alpha, has_phi, *kinds = header[:4]
    shape = tuple(int(length) for length in header[4:])
    if alpha != master.alpha:
        raise ValueError(f"{master.name!r} was saved with alpha={alpha}, not {master.alpha}")
    if shape != tuple(master.param.shape):
        raise ValueError(f"{master.name!r} was saved with shape {shape}, not {tuple(master.param.shape)}")
    value = _value(master, part) if alpha > 1 or has_phi or any(kinds) else None
    active, trainable = (
        _mask(master, part, k) if kind else None for k, kind in zip((ACTIVE, TRAINABLE), kinds, strict=True)
    )
    if active is not None and trainable is not None and torch.equal(active, trainable):
        trainable = active
    keeps_phi = alpha > 1 or bool(has_phi)
    return Saved(value if keeps_phi else None, None if keeps_phi else value, active, trainable)


def _tensor(master: Master, part: Mapping[str, Any], key: str) -> Tensor:
    value = part.get(key)
    if not isinstance(value, Tensor):
        got = "nothing" if value is None else type(value).__name__
        raise ValueError(f"the state of {master.name!r} must hold a tensor {key!r}, got {got}")
    return value


def _value(master: Master, part: Mapping[str, Any]) -> Tensor:
    value = _tensor(master, part, PHI)
    if value.shape != master.param.shape or not value.is_floating_point():
        raise ValueError(
            f"{PHI!r} of {master.name!r} must hold floating-point numbers of shape {tuple(master.param.shape)}, "
            f"got {value.dtype} of shape {tuple(value.shape)}"
        )
    return value.detach().clone()


def _mask(master: Master, part: Mapping[str, Any], key: str) -> Tensor:
    bits = _tensor(master, part, key)
    if bits.dtype != torch.uint8:
        raise ValueError(f"{key!r} of {master.name!r} must hold bytes, got {bits.dtype}")
    try:
        return unpack(bits, master.param.shape)
    except ValueError as error:
        raise ValueError(f"{key!r} of {master.name!r}: {error}") from error


# --- the sparsifier's part ------------------------------------------------------------------------------------------


def _sparsifier_state(optimizer: Powerprop, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The state that the sparsifier gave, put together again."""
    holders = [part for part in found.values() if SPARSIFY in part]
    if found and bool(holders) != (optimizer.sparsify is not None):
        have, want = (["no", "a"][x] for x in (bool(holders), optimizer.sparsify is not None))
        raise ValueError(f"the state was saved with {have} sparsify=, this optimiser has {want} sparsify=")
    if not holders:
        return {}
    try:
        text = json.loads(bytes(holders[0][SPARSIFY].cpu().tolist()))
        values, tensors, weights = text["values"], text["tensors"], text["weights"]
        state = {**values, **{key: holders[0][f"{SPARSIFY}_{key}"].clone() for key in tensors}}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{SPARSIFY!r} is not a sparsifier's state: {error!r}") from error
    for key, count in weights.items():
        state[key] = {n: p[f"{SPARSIFY}_{key}"].clone() for n, p in found.items() if f"{SPARSIFY}_{key}" in p}
        if len(state[key]) != count:
            raise ValueError(f"the sparsifier's {key!r} is that of {count} weights, the state holds {len(state[key])}")
    return state


# --- the base optimiser's part --------------------------------------------------------------------------------------


def _without_parts(optimizer: Powerprop, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict for the base optimiser, without entries of which nothing is left."""
    entries = {k: _stripped(entry) if isinstance(entry, Mapping) else entry for k, entry in state["state"].items()}
    entries = {k: entry for k, entry in entries.items() if not (isinstance(entry, Mapping) and not entry)}
    pairs = zip(state["param_groups"], optimizer.base.param_groups, strict=True)
    groups = [_with_own_alpha(saved, group, optimizer.alpha_key) for saved, group in pairs]
    return {**state, "state": entries, "param_groups": groups}


def _stripped(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not is_ours(name)}


def _with_own_alpha(saved: Mapping[str, Any], group: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A group keeps the α that it was wrapped with; that of the state is the same, or the state is a plain one."""
    rest = {name: value for name, value in saved.items() if name != key}
    return {**rest, key: group[key]} if key in group else rest


def _stand_ins(optimizer: Powerprop, weights: Mapping[str, Saved]) -> Pairs:
    """The weights whose moments are float32, though they are not: torch casts what it loads to the weight's dtype."""
    wide = {n: m.proxy is not None for n, m in optimizer.masters.items()}
    wide |= {n: saved.phi is not None for n, saved in weights.items()}
    small = [m.param for n, m in optimizer.masters.items() if wide[n] and m.param.element_size() < 4]
    return [(param, nn.Parameter(param.detach().float(), requires_grad=False)) for param in small]
