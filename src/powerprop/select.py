"""Which parameters are weights: the ones that get α, and the ones that are pruned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.conv import _ConvNd

__all__ = ["Where", "is_weight", "matches", "select"]

Where = str | Iterable[str] | Callable[[str, nn.Parameter], bool]
"""A name pattern (`"encoder.*.weight"`), several of them, or a predicate of (name, parameter)."""

_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def is_weight(module: nn.Module, name: str) -> bool:
    """True for the weights of linear, convolutional and attention layers; biases, norms and embeddings are not."""
    if isinstance(module, nn.MultiheadAttention):
        return name in _ATTENTION
    return isinstance(module, (nn.Linear, nn.Bilinear, _ConvNd)) and name == "weight"


def matches(name: str, patterns: Iterable[str]) -> bool:
    """True if the parameter's name fits one of the shell patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def select(model: nn.Module, where: Where | None = None) -> dict[str, nn.Parameter]:
    """The chosen floating-point parameters by name, each once even if tied; by default all weights of layers.

    A weight tied to an embedding counts as an embedding and is left out by default.
    """
    if where is None:
        chosen = _default(model)
    elif callable(where):
        chosen = {n: p for n, p in model.named_parameters() if where(n, p)}
    else:
        chosen = _by_pattern(model, [where] if isinstance(where, str) else list(where))
    return {n: p for n, p in chosen.items() if p.is_floating_point()}


def _default(model: nn.Module) -> dict[str, nn.Parameter]:
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    weights = {
        id(p)
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False)
        if is_weight(module, name) and id(p) not in embeddings
    }
    return {n: p for n, p in model.named_parameters() if id(p) in weights}


def _by_pattern(model: nn.Module, patterns: list[str]) -> dict[str, nn.Parameter]:
    named = dict(model.named_parameters())
    for pattern in patterns:
        if not any(fnmatchcase(n, pattern) for n in named):
            raise ValueError(f"where={pattern!r} matches no parameter; the model has {', '.join(named) or 'none'}")
    return {n: p for n, p in named.items() if matches(n, patterns)}
