"""Sparse compute: a Powerprop optimiser and a model whose layers hold their active weights alone, where that pays.

Between mask updates a layer's parameter holds the weights of its pattern (those that are used or trained) in a row; so
do its gradient, the base optimiser's memory and the masks of its `WeightState`, to which this is a weight like any
other. A step that may move masks, and whatever saves, loads or sets masks, meets the layers in their dense form, and
the patterns are made anew afterwards. Formats on disk are those of the dense form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from powerprop import kernel
from powerprop.moments import change_moments
from powerprop.optim import Powerprop
from powerprop.select import matches
from powerprop.sparse.choice import Choice, Report, pays
from powerprop.sparse.linear import Owner, Record, SparseLinear, densify
from powerprop.sparse.moving import Regrowth, regrow
from powerprop.sparse.pattern import Pattern
from powerprop.weight import WeightState

__all__ = ["SparseCompute", "sparse_compute"]

_WHOLE_MATRIX = ("Adafactor", "Muon", "Shampoo", "SOAP")
"""Optimisers that look at a weight as a matrix: on a row of numbers they would do something else."""


def sparse_compute(
    model: nn.Module, optimizer: Powerprop, batch: int = 64, layers: Sequence[str] | None = None
) -> Report:
    """Let the linear layers of a model compute with their active weights alone, from now on; says which ones do.

    The user's loop does not change, nor do state dicts, masks or, up to rounding, any number. Layers change over as
    soon as masks make it pay, and follow the masks as these move.

    optimizer: of this model; its masks say which weights are active.
    batch: the number of rows that a layer meets in a step, to measure with: batch size, times tokens.
    layers: name patterns of the weights that compute sparsely, whether it pays or not; by default those that are
        measured to be faster.

    Examples:
        >>> optimizer = pp.Powerprop(base, model, sparsify=pp.Static(0.9))
        >>> report = pp.sparse_compute(model, optimizer, layers=["0.*"])
        >>> model(x).shape
        torch.Size([128, 4])
    """
    if not isinstance(optimizer, Powerprop):
        raise TypeError(f"sparse compute needs masks: optimizer must be a Powerprop, got {type(optimizer).__name__}")
    if optimizer.model is not model:
        raise ValueError("this optimizer is of another model: sparse_compute takes the model that it was made with")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch must be a positive whole number of rows, got {batch!r}")
    _check_method(optimizer)
    densify(model)
    compute = SparseCompute(optimizer, batch, None if layers is None else list(layers))
    optimizer.compute = compute
    compute.settle()
    return compute.report


class SparseCompute(Owner):
    """The layers of one optimiser that compute sparsely, and their way there and back."""

    def __init__(self, optimizer: Powerprop, batch: int, layers: list[str] | None) -> None:
        self.optimizer, self.batch, self.forced = optimizer, batch, layers
        self.layers = dict(_candidates(optimizer))
        self.hidden: dict[str, Tensor] = {}
        self.records: dict[str, Record] = {}
        self.depth, self.loaded, self.begun = 0, False, False
        self.report = Report()
        if unknown := [p for p in layers or [] if not any(matches(n, [p]) for n in self.layers)]:
            raise ValueError(
                f"layers={unknown} match no weight of a linear layer of this optimiser: {', '.join(self.layers)}"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for layer in self.layers.values():
            if isinstance(layer, SparseLinear):
                layer.owner = self

    # --- what the optimiser asks for ------------------------------------------------------------------------------

    @contextmanager
    def step(self, by_closure: bool) -> Iterator[None]:
        """Around a step: one that may move masks meets the dense form, unless its method can do without."""
        method = self.optimizer.sparsify
        due = getattr(method, "due", False) and not moves_in_place(method)
        with self.dense(needs_gradients=not by_closure) if due else nullcontext():
            yield
        if not self.begun:
            self.begun = True
            kernel.trim()
        if self.loaded:
            self.settle()
        self._listen()

    @contextmanager
    def dense(self, needs_gradients: bool = False) -> Iterator[None]:
        """Inside, all layers and all that belongs to them have their dense form."""
        self.depth += 1
        try:
            for name, layer in self.layers.items():
                if isinstance(layer, SparseLinear):
                    self._expand(name, layer, needs_gradients)
            yield
        finally:
            self.depth -= 1
            self.settle()

    def release(self, layer: SparseLinear) -> None:
        """A layer that is about to be loaded becomes dense, until the masks are settled again."""
        self._expand(next(name for name, own in self.layers.items() if own is layer), layer)
        self.loaded = True

    def end(self) -> None:
        """All of it is dense again, and the optimiser is what it was."""
        self.forced = []
        with self.dense():
            self.optimizer.compute = None

    def settle(self) -> None:
        """Give every layer that it pays for the sparse form of its masks."""
        if self.depth or self.optimizer.compute is not self:
            return
        self.loaded = False
        self.report = Report(self._settled(name, layer) for name, layer in self.layers.items())
        self._listen()

    def _listen(self) -> None:
        """Layers take notes in the backward pass before a step that grows weights by the gradient of all."""
        method = self.optimizer.sparsify
        wanted = (
            method is not None
            and method.needs_gradients(self.optimizer)
            and not getattr(method, "grows_at_random", False)
        )
        for layer in self.layers.values():
            if isinstance(layer, SparseLinear):
                layer.record = (layer.record or Record()) if wanted else None

    # --- one layer ------------------------------------------------------------------------------------------------

    def _settled(self, name: str, layer: nn.Linear) -> Choice:
        weight = self.optimizer.masters[name]
        if isinstance(layer, SparseLinear):
            return Choice(name, layer.pattern.shape, layer.pattern.count, "sparse")
        shape = (layer.out_features, layer.in_features)
        if (covered := _covered(weight)) is None or (reason := _unfit(layer)):
            reason = "all weights are used or trained" if covered is None else reason
            return Choice(name, shape, weight.param.numel(), "dense", reason=reason)
        pattern = Pattern.of(covered)
        if self.forced is None:
            choice = pays(name, pattern, layer.weight.dtype, self.batch)
        else:
            form = "sparse" if matches(name, self.forced) else "dense"
            choice = Choice(name, shape, pattern.count, form, reason="as asked")
        if choice.form == "sparse":
            self._compress(name, layer, pattern)
        return choice

    def _compress(self, name: str, layer: nn.Linear, pattern: Pattern) -> None:
        """Keep the weights of the pattern alone, here and wherever there is one number for each weight."""
        weight = self.optimizer.masters[name]
        param = weight.param
        weight.sync()
        change_moments(self.optimizer.base, name, param, self.optimizer.moments, pattern.gather)
        alike = weight.trainable is weight.active
        active, trainable = (None if m is None else pattern.gather(m) for m in (weight.active, weight.trainable))
        grad = None if param.grad is None else pattern.gather(param.grad)
        if weight.kept is not None:
            self.hidden[name] = weight.kept
            weight.kept = None if alike else pattern.gather(weight.kept)
        weight.active = weight.trainable = None
        if not alike:
            weight.active, weight.trainable = active, None if trainable is None or trainable.all() else trainable
        weight.pattern = pattern
        values = pattern.gather(param.detach())
        SparseLinear.take(layer, pattern, values, weight.active, self).record = self.records.pop(name, None)
        param.grad = grad

    def _expand(self, name: str, layer: SparseLinear, needs_gradient: bool = False) -> None:
        """The way back."""
        weight, param, pattern = self.optimizer.masters[name], layer.values, layer.pattern
        grad = param.grad
        if grad is not None:
            noted = needs_gradient and layer.record is not None
            grad = torch.cat(list(self.gradient(name))) if noted else pattern.scatter(grad)
        weight.sync()
        change_moments(self.optimizer.base, name, param, self.optimizer.moments, pattern.scatter)
        hidden = self.hidden.pop(name, None)
        if hidden is not None:
            weight.kept = pattern.scatter(param.detach() if weight.kept is None else weight.kept, onto=hidden)
        alike = weight.active is None
        weight.active = pattern.mask(weight.active)
        weight.trainable = weight.active if alike else pattern.mask(weight.trainable)
        weight.pattern = None
        if layer.record is not None:
            self.records[name] = layer.record
        layer.fill(pattern.scatter(param.detach()))
        param.grad = grad

    # --- what a method that moves masks in place asks for ---------------------------------------------------------

    def gradient(self, name: str) -> Iterator[Tensor]:
        """The gradient of all weights of a layer, some rows at a time."""
        layer = self.layers[name]
        assert isinstance(layer, SparseLinear)
        grad, record, pattern = layer.values.grad, layer.record, layer.pattern
        assert grad is not None
        if record is not None and record.parts:
            return record.gradient(pattern)
        if grad.any():
            raise RuntimeError(
                f"{type(self.optimizer.sparsify).__name__} chooses weights by the gradient of all of them, but that of "
                f"{name!r} was made before it was known to be asked for: call backward() after sparse_compute or "
                "load_state_dict"
            )
        return (grad.new_zeros(end - start, pattern.shape[1]) for start, end in pattern.row_blocks())

    def choose(self, name: str, survivors: Tensor, blocks: Iterator[Tensor], count: int) -> Regrowth:
        """What becomes of a layer if only these stay and so many others are grown by a matrix."""
        layer = self.layers[name]
        assert isinstance(layer, SparseLinear)
        return regrow(layer.pattern, survivors, blocks, count)

    def regrow(self, name: str, moved: Regrowth, values: Tensor | float) -> None:
        """Take up a new pattern: who stays keeps what it has, who is grown gets these values and no memory."""
        weight, layer = self.optimizer.masters[name], self.layers[name]
        param = weight.param
        change_moments(self.optimizer.base, name, param, self.optimizer.moments, moved.carried)
        grad = None if param.grad is None else moved.carried(param.grad)
        weight.pattern = moved.pattern
        SparseLinear.take(layer, moved.pattern, moved.carried(param.detach(), values), None, self)
        param.grad = grad


def moves_in_place(method: object) -> bool:
    """True if mask updates need no matrix of a layer; each class says so for itself, as subclasses may differ."""
    return bool(vars(type(method)).get("moves_in_place")) and getattr(method, "pattern", None) is None


# --- what can compute sparsely ----------------------------------------------------------------------------------------


def _candidates(optimizer: Powerprop) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers whose weights the optimiser holds, by the weights' names."""
    found: dict[int, list[nn.Module]] = {}
    for module in optimizer.model.modules():
        for param in module.parameters(recurse=False):
            found.setdefault(id(param), []).append(module)
    for name, weight in optimizer.masters.items():
        owners = found.get(id(weight.param), [])
        if len(owners) == 1 and type(owners[0]) is nn.Linear and owners[0].weight is weight.param:
            yield name, owners[0]


def _covered(weight: WeightState) -> Tensor | None:
    """The weights that are used or trained; None if it is all of them."""
    if weight.active is None or weight.trainable is None:
        return None
    return weight.active | weight.trainable


def _unfit(layer: nn.Linear) -> str:
    """Why a layer cannot compute sparsely, or nothing."""
    if layer.weight.device.type != "cpu" or layer.weight.dtype not in (torch.float32, torch.float64):
        return f"{layer.weight.dtype} on {layer.weight.device}; float32 or float64 on a CPU can"
    return ""


def _check_method(optimizer: Powerprop) -> None:
    """An error for what needs numbers that sparse compute does not have."""
    method, base = optimizer.sparsify, optimizer.base
    label = type(method).__name__
    if getattr(method, "grows_by_momentum", False):
        raise ValueError(
            f"{label} chooses weights by the momentum of all of them, which needs the dense gradient at every step: "
            "there is nothing to save by sparse compute; RigL needs it at mask updates alone"
        )
    if getattr(method, "backward_sparsity", None) == 0:
        raise ValueError(
            f"{label} with backward_sparsity=0 trains all weights, which needs the dense gradient at every step: give "
            "it a backward_sparsity"
        )
    if method is not None and not hasattr(method, "due"):
        raise ValueError(f"{label} must say by an attribute `due` whether its next step may move masks")
    if type(base).__name__ in _WHOLE_MATRIX:
        raise ValueError(
            f"{type(base).__name__} looks at each weight as a matrix, and would take other steps with the active "
            "weights alone"
        )
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise ValueError("sparse compute is for one process: the gradients of several are not put together")
