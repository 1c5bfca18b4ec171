"""Which parameters are weights: the ones that get α, and the ones that are pruned."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from powerprop.sparse.linear import SparseLinear

__all__ = ["Where", "is_table", "is_weight", "matches", "name_patterns", "select"]

Where = str | Iterable[str] | Callable[[str, nn.Parameter], bool]
"""A name pattern (`"encoder.*.weight"`), several of them, or a predicate of (name, parameter)."""

_LAYERS = (nn.Linear, nn.Bilinear, _ConvNd, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

# Of classes: LlamaRMSNorm and LayerNorm2d, but not NormLinear; ViTEmbeddings and PatchEmbed.
_NORM_CLASS = re.compile(r"Norm(\dd)?$")
_EMBEDDING_CLASS = re.compile(r"Embed(ding)?s?$")
_ROUTER_CLASS = re.compile(r"(Router|Gate)$")
# Of modules: what chooses experts, if there are any beside it.
_ROUTERS = ("router", "gate")
_EXPERTS = re.compile(r"experts?$", re.IGNORECASE)
_STARTS_AT_ZERO = "lora_B"
# Of parameters: what multiplies inputs (in_proj_weight, kernel, down_proj, W_q, w1) and what is an input or is added.
_MULTIPLIES = re.compile(r"weight|kernel|(^|_)proj|^w\d*($|_)", re.IGNORECASE)
_IS_ADDED = re.compile(r"(^|_)(bias|embed|token|pos(_|$|ition)|table|prompt|latent)", re.IGNORECASE)
_OLD_PARTS = ("orig", "g", "v")
_SHOWN = 8


def is_weight(module: nn.Module, name: str, param: Tensor) -> bool:
    """True for a matrix or kernel that the module multiplies its inputs with: see `select` for the rule."""
    if isinstance(module, _LAYERS) and name.startswith("weight"):
        return isinstance(param, UninitializedParameter) or param.ndim > 1
    return _multiplies(name) is True and _is_matrix(param) and not is_table(module)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """True if the parameter's name fits one of the shell patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def name_patterns(where: object) -> list[str]:
    """The name patterns as a list, whichever way they were given; anything else is an error that repeats it."""
    several: list[Any] = list(where) if isinstance(where, Iterable) and not isinstance(where, str) else [where]
    if not all(isinstance(pattern, str) for pattern in several):
        raise TypeError(f"where must be a name pattern, several, or a predicate of (name, parameter), got {where!r}")
    return several


def select(model: nn.Module, where: Where | None = None) -> dict[str, nn.Parameter]:
    """The chosen floating-point parameters by name, each once even if tied; by default all weights.

    A weight is a matrix or kernel that multiplies inputs:

    - the weights of linear, bilinear, convolutional, recurrent and attention layers;
    - in any other module, a parameter of two or more dimensions whose name says so: *weight* or *kernel* anywhere in
      it, a part of it that is *proj…*, or *w* with an optional number as its first (Hugging Face's `Conv1D`, batched
      experts, layers of your own).

    These are not: biases, norms, embeddings and whatever is tied to one; parameters whose names say that they are
    added or are inputs themselves (*pos…*, *embed…*, *token…*, *table…*, *prompt…*, *latent…*, *bias…*); scales, which
    have at most one dimension that is larger than 1 among three or more; routers of mixtures of experts (a *router* or
    *gate* beside *experts*); the second matrix of an adapter (*lora_B*), which starts at zero.

    Parameters of two or more dimensions of which neither is known (`A_log`, `embed_weight`), and layers under a
    parametrisation (weight_norm, spectral_norm), are left out with one warning that names them. Nothing chosen at all
    is an error.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if computing := [n for n, m in model.named_modules() if isinstance(m, SparseLinear)]:
        raise ValueError(
            f"{_listed(computing)} compute sparsely and hold their active weights alone: call powerprop.densify(model) "
            f"before weights are chosen"
        )
    if where is None:
        chosen = _default(model)
    elif callable(where):
        chosen = {n: p for n, p in model.named_parameters() if where(n, p)}
    else:
        chosen = _by_pattern(model, name_patterns(where))
    chosen = {n: p for n, p in chosen.items() if p.is_floating_point()}
    if not chosen:
        raise ValueError(_nothing_chosen(model, where))
    return chosen


def _default(model: nn.Module) -> dict[str, nn.Parameter]:
    tables, weights, unknown = set(), set(), set()
    routers = _routers(model)
    for module, name, param in _owned(model):
        if module in routers:
            tables.add(id(param))
        elif isinstance(module, parametrize.ParametrizationList) or _is_old_part(module, name):
            continue
        elif is_table(module):
            tables.add(id(param))
        elif is_weight(module, name, param):
            weights.add(id(param))
        elif _is_matrix(param) and _multiplies(name) is None:
            unknown.add(id(param))
    named = dict(model.named_parameters())
    weights -= tables | {id(p) for n, p in named.items() if _STARTS_AT_ZERO in n.split(".")}
    unknown -= weights | tables
    _warn_of_skipped([n for n, p in named.items() if id(p) in unknown], _parametrised(model))
    return {n: p for n, p in named.items() if id(p) in weights}


def _owned(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every parameter with its module and its own name; in a list or dict of parameters the container's name."""
    for path, module in model.named_modules():
        container = isinstance(module, (nn.ParameterList, nn.ParameterDict))
        for name, param in module.named_parameters(recurse=False):
            yield module, path.rpartition(".")[2] if container else name, param


def _routers(model: nn.Module) -> set[nn.Module]:
    """What chooses among experts: a mistake there is one of whole layers, and there is hardly anything to gain."""
    found = set()
    for parent in model.modules():
        children = dict(parent.named_children())
        if any(_EXPERTS.search(name) for name in children):
            routers = (m for n, m in children.items() if n in _ROUTERS or _ROUTER_CLASS.search(type(m).__name__))
            found |= {module for router in routers for module in router.modules()}
    return found


def _by_pattern(model: nn.Module, wanted: list[str]) -> dict[str, nn.Parameter]:
    named = dict(model.named_parameters())
    for pattern in wanted:
        if not any(fnmatchcase(n, pattern) for n in named):
            raise ValueError(f"where={pattern!r} matches no parameter; the model has {_listed(named)}")
    return {n: p for n, p in named.items() if matches(n, wanted)}


# --- what a parameter is ------------------------------------------------------------------------------------------


def _is_matrix(param: Tensor) -> bool:
    """Two or more dimensions, and not the scale of one channel each, such as (C, 1, 1)."""
    return param.ndim == 2 or (param.ndim > 2 and sum(size > 1 for size in param.shape) > 1)


def is_table(module: nn.Module) -> bool:
    """True for norms and embeddings; layers of torch that are called so (a patch embedding) are still layers."""
    if isinstance(module, _LAYERS):
        return False
    kind = type(module).__name__
    known = isinstance(module, (*_NORMS, *_EMBEDDINGS))
    return known or bool(_NORM_CLASS.search(kind) or _EMBEDDING_CLASS.search(kind))


def _multiplies(name: str) -> bool | None:
    """Whether the parameter's name says that it multiplies inputs, that it does not, or (None) neither or both."""
    if _IS_ADDED.search(name):  # down_proj_bias is a bias and rel_pos_w a table, but who knows what embed_weight is
        return None if _MULTIPLIES.search("_" + name.rpartition("_")[2]) else False
    return True if _MULTIPLIES.search(name) else None


# --- what is left out, and said -----------------------------------------------------------------------------------


def _parametrised(model: nn.Module) -> list[str]:
    """The names of weights that are computed from other parameters, in torch's new and in its old way."""
    found = []
    for path, module in model.named_modules():
        chains = module.parametrizations.items() if parametrize.is_parametrized(module) else ()
        originals = {name: list(chain.parameters(recurse=False)) for name, chain in chains}
        parts = {name: max(params, key=Tensor.numel) for name, params in originals.items() if params}
        parts |= {n.rpartition("_")[0]: p for n, p in module.named_parameters(recurse=False) if _is_old_part(module, n)}
        found += [f"{path}.{name}".lstrip(".") for name, p in parts.items() if is_weight(module, name, p)]
    return found


def _is_old_part(module: nn.Module, name: str) -> bool:
    """True for weight_orig, weight_g and weight_v, from which hooks make the module's weight."""
    stem, _, part = name.rpartition("_")
    return part in _OLD_PARTS and isinstance(module.__dict__.get(stem), Tensor)


def _warn_of_skipped(unknown: list[str], parametrised: list[str]) -> None:
    reasons = {
        "computed by a parametrisation; remove it first (by `fold` if it is ours)": parametrised,
        "the name does not say whether it multiplies inputs": unknown,
    }
    if said := "; ".join(f"{_listed(names)}: {reason}" for reason, names in reasons.items() if names):
        text = f"not chosen as weights: {said}. Choose by where= what is meant"
        warnings.warn(text, stacklevel=_first_level_outside())


def _first_level_outside() -> int:
    """The stack level, for the caller's warning, of the code that called this library, perhaps through torch."""
    inside = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return level


def _nothing_chosen(model: nn.Module, where: Where | None) -> str:
    named = model.named_parameters()
    shapes = [f"{n} {'of no shape yet' if isinstance(p, UninitializedParameter) else tuple(p.shape)}" for n, p in named]
    kind = f"of the floating-point parameters of this {type(model).__name__}"
    reason = f"none {kind} is known to multiply inputs" if where is None else f"where={where!r} chooses none {kind}"
    return f"no weight was chosen: {reason}; it has {_listed(shapes)}; where= chooses others"


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = [f"and {len(every) - _SHOWN} more"] if len(every) > _SHOWN else []
    return ", ".join([*every[:_SHOWN], *more]) or "none"
