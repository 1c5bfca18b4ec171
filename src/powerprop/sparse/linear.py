"""A linear layer that holds its active weights alone and computes with them, forward and backward.

It is the model's own `nn.Linear`, whose parameter of that name holds the weights of a pattern in a row. Activations go
from layer to layer as [features, batch], seen by everybody else as the (batch, features) that they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from powerprop.sparse import products
from powerprop.sparse.pattern import Pattern

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, None]

__all__ = ["Owner", "Record", "SparseLinear", "densify"]


class Owner(Protocol):
    """What has a part in a layer's form beside the layer itself: an optimiser with its memory of the weights."""

    def release(self, layer: SparseLinear) -> None:
        """Make the layer dense."""

    def end(self) -> None:
        """Make all layers dense, for good."""


class Record:
    """What went through a layer in the backward passes since gradients were cleared: its dense gradient in two factors.

    ∂L/∂W = Σ gᵢ xᵢᵀ,   columns x of its inputs, g of the gradients of its outputs
    """

    def __init__(self) -> None:
        self.parts: list[tuple[Tensor, Tensor]] = []
        self.pass_ = -1

    def add(self, weight: nn.Parameter, x: Tensor, g: Tensor) -> None:
        """Of one use of the layer in one backward pass; a new pass after gradients were cleared begins anew."""
        now = torch._C._current_graph_task_id()
        if now != self.pass_ and (weight.grad is None or not weight.grad.any()):
            self.parts.clear()
        self.pass_ = now
        self.parts.append((x, g))

    def gradient(self, pattern: Pattern) -> Iterator[Tensor]:
        """∂L/∂W of all weights, some rows at a time."""
        xs, gs = zip(*self.parts, strict=True)
        x, g = torch.cat(xs, 1).t(), torch.cat(gs, 1)
        return (g[start:end] @ x for start, end in pattern.row_blocks())


class SparseLinear(nn.Linear):
    """y = x Wᵀ + b for a sparse W. Made by `sparse_compute`, and undone by `densify`.

    pattern: where the weights are.
    used: the pattern of those that are not zero and where they are among the weights, if some are trained unused.
    record: what goes by in backward passes, if somebody will ask for the gradient of all weights.
    owner: who must know when the layer becomes dense.
    """

    pattern: Pattern
    used: tuple[Pattern, Tensor] | None
    record: Record | None
    owner: Owner | None

    @property
    def values(self) -> nn.Parameter:
        """The weights of the pattern, a parameter like any other."""
        return cast(nn.Parameter, self._parameters["weight"])

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The matrix, for whoever asks: made anew, with gradients to the weights of the pattern."""
        return self.pattern.scatter(self.values)

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`, for any number of leading dimensions."""
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"this layer takes (..., {self.in_features}), got an input of shape {tuple(x.shape)}")
        y: Tensor = _Product.apply(x.reshape(-1, self.in_features), self.values, self.bias, self)  # type: ignore[no-untyped-call]
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weights={self.pattern.count:,}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight if keep_vars else self.pattern.scatter(self.values.detach())

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """A matrix with other weights makes the layer dense, until masks are loaded too or a step is taken."""
        key = f"{prefix}weight"
        matrix = state_dict.get(key)
        if isinstance(matrix, Tensor) and matrix.shape == self.pattern.shape:
            values = self.pattern.gather(matrix)
            if int(matrix.count_nonzero()) == int(values.count_nonzero()):
                return super()._load_from_state_dict({**state_dict, key: values}, prefix, *rest)
        self.densify()
        return nn.Linear._load_from_state_dict(self, state_dict, prefix, *rest)

    def densify(self) -> None:
        """Become an ordinary linear layer again."""
        if self.owner is not None:
            self.owner.release(self)
        else:
            self.fill(self.pattern.scatter(self.values.detach()))

    def fill(self, matrix: Tensor) -> None:
        """Become an ordinary linear layer with this matrix."""
        put(self.values, matrix)
        for name in ("pattern", "used", "record", "owner"):
            delattr(self, name)
        self.__class__ = nn.Linear  # type: ignore[assignment]

    @staticmethod
    def take(layer: nn.Linear, pattern: Pattern, values: Tensor, used: Tensor | None, owner: Owner) -> SparseLinear:
        """Make a linear layer, or one of this kind, hold these weights alone."""
        made = cast(SparseLinear, layer)
        put(cast(nn.Parameter, made._parameters["weight"]), values)
        made.__class__ = SparseLinear
        made.pattern, made.owner, made.record = pattern, owner, None
        made.used = None if used is None else (Pattern.of(pattern.mask(used)), used.nonzero().squeeze(1))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """A copy belongs to nobody, unless its owner is copied too and takes it."""
        return {**self.__dict__, "owner": None}


def densify(model: nn.Module) -> None:
    """Turn all layers of a model, and what its optimiser keeps of them, back to their dense form, for good.

    Examples:
        >>> optimizer = pp.Powerprop(base, model, sparsify=pp.Static(0.9))
        >>> report = pp.sparse_compute(model, optimizer, layers=["0.*"])
        >>> pp.densify(model)
    """
    for layer in [m for m in model.modules() if isinstance(m, SparseLinear)]:
        if isinstance(layer, SparseLinear):  # an owner ends for all of its layers at once
            layer.densify() if layer.owner is None else layer.owner.end()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, bias: Tensor | None, layer: SparseLinear) -> Tensor:
        columns, pattern, used = _columns(x), layer.pattern, layer.used
        ctx.save_for_backward(columns, values)
        ctx.layer, ctx.pattern = layer, pattern
        if used is not None:
            products.check_values(pattern, values, columns)
            pattern, values = used[0], values.index_select(0, used[1])
        return products.forward(pattern, values, columns, bias).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        return _gradients_once(ctx, grad) if torch.is_grad_enabled() else _gradients(ctx, grad)


def _gradients(ctx: Any, grad: Tensor) -> Gradients:
    (x, values), g = ctx.saved_tensors, _columns(grad)
    wants_x, wants_values, wants_bias, _ = ctx.needs_input_grad
    dx, dv, db = products.backward(ctx.pattern, values, x, g, wants_x, wants_bias)
    if wants_values and (record := vars(ctx.layer).get("record")) is not None:
        record.add(ctx.layer.values, x, g)
    return None if dx is None else dx.t(), dv if wants_values else None, db, None


_gradients_once: Callable[[Any, Tensor], Gradients] = once_differentiable(_gradients)
"""For who asks for a graph of the gradients too; it takes a third of the time of a small product."""


def put(weight: nn.Parameter, data: Tensor) -> None:
    """Give a parameter other memory, of another shape too; graphs that were made with the old are void."""
    weight.grad = None
    weight.data = data.new_empty(0, dtype=torch.float16)  # another type makes autograd forget the shape it knew
    weight.data = data
    torch.autograd.graph.increment_version(weight)


def _columns(x: Tensor) -> Tensor:
    """(n, features) as columns side by side: a view if it comes from a layer of this kind."""
    turned = x.t()
    return turned if turned.is_contiguous() else products.transposed(x)
