"""Save and load a `Powerprop`: masks, hidden weights and the sparsifier's state, beside the base optimiser's state.

The weights are saved with the model. torch's own tools carry only what stands in the state of a parameter, and some of
them (`torch.distributed.checkpoint`) only under names that are there already, into tensors of the same size. So each
weight has

    powerprop             [θ is kept, active is a mask, trainable is a mask, *shape]
    powerprop_theta       θ, where it is kept
    powerprop_active      one bit per weight, and powerprop_trainable: if there are masks or a sparsifier

and the first of them the sparsifier's numbers and words as a text, `powerprop_sparsify`, with its tensors beside it.
"""

from __future__ import annotations

import json
from collections import ChainMap, UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.masks import pack, unpack
from powerprop.weight import WeightState

__all__ = ["State", "load", "save"]

HEADER, THETA, ACTIVE, TRAINABLE = "powerprop", "powerprop_theta", "powerprop_active", "powerprop_trainable"
SPARSIFY = "powerprop_sparsify"
_TEXT_SIZE = 1024
"""The sparsifier's text is filled up to a multiple of this: its numbers change, and its tensor must keep its size."""


class Wrapper(Protocol):
    """What is saved: `Powerprop`, as far as it matters here."""

    base: Optimizer
    model: nn.Module
    masters: dict[str, WeightState]
    tracked: set[str]
    alpha_key: str
    param_groups: list[dict[str, Any]]

    @property
    def sparsify(self) -> Any:
        """The sparsifier, or None."""

    def unmask(self) -> None:
        """Take up the weights of before the first masks."""


Entry = dict[str, Tensor]
Saved = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Active, trainable and θ."""


def save(optimizer: Wrapper) -> dict[str, Any]:
    """The base optimiser's state dict with our part in the state of every weight."""
    state = _usual(optimizer, optimizer.base.state_dict())
    keys = _keys(state["param_groups"], optimizer)
    # torch.distributed.checkpoint asks for an entry of every parameter as soon as there is one of any.
    entries: dict[Any, Any] = {**{key: {} for key in keys.values()}, **state["state"]}
    for name, weight in optimizer.masters.items():
        if (key := keys.get(id(weight.param))) is not None:
            entries[key] = {**entries[key], **{n: t.clone() for n, t in _part(optimizer, name).items()}}
        elif optimizer.sparsify is not None or weight.is_masked:
            raise ValueError(f"the base optimiser no longer holds {name!r}, so that its masks cannot be saved")
    return {**state, "state": entries}


def load(optimizer: Wrapper, state: Mapping[str, Any]) -> None:
    """Load the base optimiser's state, the sparsifier's and the masks, or nothing at all."""
    _check(optimizer, state)
    found, masters = _our_parts(optimizer, state), optimizer.masters
    read = {n: _read(masters[n], part) for n, part in found.items()}
    sparsifier = _sparsifier_state(optimizer, found)
    wide = [m for n, m in masters.items() if (read[n][2] if n in read else m.kept) is not None]
    with _put_back_on_error(optimizer.base):
        with _fp32_copies(wide):
            optimizer.base.load_state_dict(_plain(optimizer, state))
        if optimizer.sparsify is not None:
            optimizer.sparsify.load_state_dict(sparsifier)
    optimizer.unmask()
    powers = {id(p): group[optimizer.alpha_key] for group in optimizer.param_groups for p in group["params"]}
    for name, saved in read.items():
        if name not in optimizer.tracked:
            masters[name].alpha = powers.get(id(masters[name].param), masters[name].alpha)
        masters[name].restore(*saved)


class State(UserDict[Any, Any]):
    """`Powerprop.state`: the base optimiser's; what is read of a weight shows our part too; writing leaves that."""

    def __init__(self, optimizer: Wrapper) -> None:
        self.data, self._optimizer = optimizer.base.state, optimizer

    def __getitem__(self, param: Any) -> Any:
        entry = self.data[param]
        name = next((n for n, m in self._optimizer.masters.items() if m.param is param), None)
        return entry if name is None else _Both(entry, _part(self._optimizer, name))

    def get(self, param: Any, default: Any = None) -> Any:
        """As for any mapping; unlike the brackets it adds nothing."""
        return self[param] if param in self.data else default

    def __setitem__(self, param: Any, entry: Any) -> None:
        self.data[param] = _stripped(entry)


class _Both(ChainMap[str, Any]):
    """The state of one weight: the base optimiser's, then our part, which can only be read."""

    def __setitem__(self, name: str, value: Any) -> None:
        if not _is_ours(name):
            super().__setitem__(name, value)


# --- our part, weight by weight ---------------------------------------------------------------------------------------


def _part(optimizer: Wrapper, name: str) -> Entry:
    weight, sparsify = optimizer.masters[name], optimizer.sparsify
    kept = [x is not None for x in (weight.kept, weight.active, weight.trainable)]
    part = {HEADER: torch.tensor([*kept, *weight.param.shape], dtype=torch.float64, device="cpu")}
    if weight.kept is not None:
        part[THETA] = weight.kept
    if sparsify is not None or weight.is_masked:
        ones = torch.ones_like(weight.param, dtype=torch.bool)
        for key, mask in ((ACTIVE, weight.active), (TRAINABLE, weight.trainable)):
            part[key] = pack(ones if mask is None else mask)
    if sparsify is not None and name == _holder(optimizer):
        part |= _sparsifier_part(sparsify.state_dict())
    return {key: tensor.to(weight.param.device) for key, tensor in part.items()}


def _read(weight: WeightState, part: Mapping[str, Any]) -> Saved:
    shape = weight.param.shape

    def mask(key: str) -> Tensor:
        bits = _tensor(weight, part, key)
        try:
            return unpack(bits, shape)
        except ValueError as error:
            raise ValueError(f"{key!r} of {weight.name!r}: {error}") from error

    header = _tensor(weight, part, HEADER).tolist()
    if len(header) < 3:
        raise ValueError(f"{HEADER!r} of {weight.name!r} must hold at least 3 numbers, got {header}")
    if (saved := tuple(int(length) for length in header[3:])) != shape:
        raise ValueError(f"{weight.name!r} was saved with shape {saved}, not {tuple(shape)}")
    active, trainable = mask(ACTIVE) if header[1] else None, mask(TRAINABLE) if header[2] else None
    if active is not None and trainable is not None and torch.equal(active, trainable):
        trainable = active
    theta = _tensor(weight, part, THETA) if header[0] else None
    if theta is not None and not (theta.shape == shape and theta.is_floating_point()):
        raise ValueError(
            f"{THETA!r} of {weight.name!r} must hold floating-point numbers of shape {tuple(shape)}, "
            f"got {theta.dtype} of shape {tuple(theta.shape)}"
        )
    return active, trainable, None if theta is None else theta.detach().clone()


def _tensor(weight: WeightState, part: Mapping[str, Any], key: str) -> Tensor:
    value = part.get(key)
    if not isinstance(value, Tensor):
        got = "nothing" if value is None else type(value).__name__
        raise ValueError(f"the state of {weight.name!r} must hold a tensor {key!r}, got {got}")
    return value


def _our_parts(optimizer: Wrapper, state: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Our part by the name of the weight: of all weights that need one, or of none if the state is a plain one."""
    keys, masters = _keys(state["param_groups"], optimizer), optimizer.masters
    names = {keys[id(p)]: n for n, p in optimizer.model.named_parameters() if id(p) in keys}
    names |= {keys[id(m.param)]: n for n, m in masters.items() if id(m.param) in keys}
    entries = {k: e for k, e in state["state"].items() if isinstance(e, Mapping) and HEADER in e}
    found = {names.get(k, str(k)): entry for k, entry in entries.items()}
    masked = [n for n, m in masters.items() if m.is_masked]
    if not found and (optimizer.sparsify is not None or masked):
        why = f"sparsify={type(optimizer.sparsify).__name__}" if optimizer.sparsify else f"masks on {masked}"
        raise ValueError(
            f"the state holds no masks (no weight in it has {HEADER!r}), but this optimiser has {why}: it was saved by "
            f"a plain optimiser, or by a tool that drops what it does not know; wrap a new one without them to go on"
        )
    want = {n for n, m in masters.items() if id(m.param) in keys}
    spared = {n for n in want if not (masters[n].param.requires_grad or optimizer.sparsify or n in masked)}
    if found and not (want - spared <= set(found) <= want):  # torch.distributed.checkpoint leaves frozen weights out
        raise ValueError(f"the state is of weights {sorted(found)}, not {sorted(want)}")
    return found


# --- the sparsifier's part --------------------------------------------------------------------------------------------


def _holder(optimizer: Wrapper) -> str:
    """The weight whose state holds the sparsifier's."""
    masters = optimizer.masters
    return next((n for n, m in masters.items() if m.param.requires_grad), next(iter(masters)))


def _sparsifier_part(state: Mapping[str, Any]) -> Entry:
    """Tensors, and tensors by name, under names of their own; numbers and words as text."""
    tensors: Entry = {}
    values: dict[str, Any] = {}
    groups: dict[str, list[str]] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            tensors[key] = value
        elif isinstance(value, Mapping) and value and all(isinstance(t, Tensor) for t in value.values()):
            groups[key] = list(value)
            tensors |= {f"{key}.{name}": tensor for name, tensor in value.items()}
        else:
            values[key] = value
            with suppress(TypeError, ValueError):
                if json.loads(json.dumps(value)) == value:
                    continue
            kinds = "a sparsifier's state may hold tensors, tensors by name, numbers and words"
            raise TypeError(f"{kinds}, got {key}={value!r}")
    encoded = json.dumps({"values": values, "groups": groups, "tensors": list(tensors)}).encode()
    text = torch.frombuffer(bytearray(encoded + b" " * (-len(encoded) % _TEXT_SIZE)), dtype=torch.uint8)
    return {SPARSIFY: text, **{f"{SPARSIFY}_{key}": tensor for key, tensor in tensors.items()}}


def _sparsifier_state(optimizer: Wrapper, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The state that the sparsifier gave, put together again."""
    holders = [part for part in found.values() if SPARSIFY in part]
    if found and bool(holders) != (optimizer.sparsify is not None):
        have, want = (["no", "a"][x] for x in (bool(holders), optimizer.sparsify is not None))
        raise ValueError(f"the state was saved with {have} sparsify=, this optimiser has {want} sparsify=")
    if not holders:
        return {}
    try:
        text = json.loads(bytes(holders[0][SPARSIFY].cpu().tolist()))
        tensors = {key: holders[0][f"{SPARSIFY}_{key}"].clone() for key in text["tensors"]}
        groups = {key: {n: tensors.pop(f"{key}.{n}") for n in names} for key, names in text["groups"].items()}
        return {**text["values"], **tensors, **groups}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{SPARSIFY!r} is not a sparsifier's state: {error!r}") from error


# --- the base optimiser's part ----------------------------------------------------------------------------------------


def _check(optimizer: Wrapper, state: Mapping[str, Any]) -> None:
    if missing := [key for key in ("state", "param_groups") if key not in state]:
        raise ValueError(f"an optimiser's state has 'state' and 'param_groups', this one lacks {', '.join(missing)}")
    have, want = ([len(group["params"]) for group in each] for each in (state["param_groups"], optimizer.param_groups))
    if have != want:
        raise ValueError(f"the state is of groups with {have} parameters, not {want}")
    if any(isinstance(entry, Mapping) and f"{HEADER}_phi" in entry for entry in state["state"].values()):
        raise ValueError(
            "the state was saved by powerprop 0.1, which kept φ in it; weights are the state now: load the model's "
            "weights and wrap a new optimiser"
        )


def _usual(optimizer: Wrapper, state: dict[str, Any]) -> dict[str, Any]:
    """The usual form, around the state of an optimiser that has a form of its own (Lookahead, for one)."""
    if "param_groups" in state:
        return state
    numbers = iter(range(sum(len(group["params"]) for group in optimizer.param_groups)))
    key = optimizer.alpha_key
    groups = [{key: g[key], "params": [next(numbers) for _ in g["params"]]} for g in optimizer.param_groups]
    return {"state": {}, "param_groups": groups, "base": state}


def _plain(optimizer: Wrapper, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict for the base optimiser alone; groups of a plain optimiser's state keep the α that they have."""
    key = optimizer.alpha_key
    pairs = zip(state["param_groups"], optimizer.param_groups, strict=True)
    groups = [{key: own[key], **saved} for saved, own in pairs]
    if "base" in state:
        for own, saved in zip(optimizer.param_groups, groups, strict=True):
            own[key] = saved[key]
        return dict(state["base"])
    stripped = {k: _stripped(entry) for k, entry in state["state"].items()}
    entries = {k: entry for k, entry in stripped.items() if not isinstance(entry, Mapping) or entry}
    return {**state, "state": entries, "param_groups": groups}


def _keys(saved: list[dict[str, Any]], optimizer: Wrapper) -> dict[int, Any]:
    """The key in a saved state of every parameter, by the parameter's id."""
    pairs = [zip(s["params"], g["params"], strict=True) for s, g in zip(saved, optimizer.param_groups, strict=True)]
    return {id(param): key for pair in pairs for key, param in pair}


def _is_ours(name: object) -> bool:
    return isinstance(name, str) and (name == HEADER or name.startswith(f"{HEADER}_"))


def _stripped(entry: Any) -> Any:
    return {n: v for n, v in entry.items() if not _is_ours(n)} if isinstance(entry, Mapping) else entry


@contextmanager
def _fp32_copies(weights: list[WeightState]) -> Iterator[None]:
    """torch casts what it loads to the weight's precision; the moments of weights with θ are float32."""
    narrow = [w for w in weights if w.param.element_size() < 4]
    for weight in narrow:
        weight.lend(weight.param.detach().float())
    try:
        yield
    finally:
        for weight in narrow:
            weight.reclaim()


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
