"""One weight behind the optimiser: its power and its two masks. The model's own parameter is the state.

θ is kept beside the parameter only where that cannot say everything: where an active mask hides values that must come
back, and where the parameter has fewer than 32 bits, in which small moves would be rounded away.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from powerprop.mask_entries import count, put_
from powerprop.sparse.pattern import Pattern
from powerprop.update import Move, match

__all__ = [
    "NO_DECAY",
    "Frozen",
    "WeightState",
    "exchanging",
    "local",
    "masked",
    "moves_of",
    "seeing",
    "sharded",
    "show",
]

NO_DECAY = (0.0, 0.0)


class WeightState:
    """The power and the masks of one weight, and θ where it must be kept.

    param: the model's parameter, which always holds the effective weight; whoever writes to it wins.
    alpha: the power; it may change at any step.
    active: the weights that the forward pass uses; None is all.
    trainable: the weights that the optimiser moves; None is all.
    kept: θ in float32 at least, or None. Where the weight is active and differs from it, the weight is right.
    decay: fractions of θ that the next step takes off active weights and off the others.
    shrink: what the next step leaves of φ.
    pattern: where in the layer these weights are, if the parameter holds some of them alone; masks and θ are of these.
    matched: whether moves are divided by the ρ of `powerprop.update.match`.
    """

    def __init__(self, name: str, param: nn.Parameter, alpha: float, matched: bool = False) -> None:
        self.name, self.param, self.alpha = name, param, alpha
        self.active: Tensor | None = None
        self.trainable: Tensor | None = None
        self.kept: Tensor | None = None
        self.pattern: Pattern | None = None
        self.decay = NO_DECAY
        self.shrink: float | Tensor = 1.0
        self.matched = matched
        self._before: Tensor | None = None
        self._own: Tensor | None = None
        self._own_grad: Tensor | None = None
        self._counted: tuple[weakref.ref[Tensor], int] | None = None
        self.sync()

    @property
    def idle(self) -> bool:
        """True if a step is the base optimiser's alone: α = 1, no masks, nothing kept."""
        return self.alpha == 1 and self.kept is None and not self.is_masked

    @property
    def is_masked(self) -> bool:
        """True if there is a mask."""
        return not (self.active is self.trainable is None)

    @property
    def weight(self) -> Tensor:
        """The effective weight in the highest precision there is."""
        return self.param.detach() if self.kept is None else self._shown()

    def theta(self) -> Tensor:
        """A copy of the weights, active or not."""
        self.sync()
        return (self.param.detach() if self.kept is None else self.kept).clone()

    def slope(self) -> Tensor:
        """Ψ'(φ) = α|w|^(1-1/α): how much faster than with α = 1 a move of w is, as one of φ."""
        theta = self.theta()
        return torch.ones_like(theta) if self.alpha == 1 else theta.abs_().pow_(1 - 1 / self.alpha).mul_(self.alpha)

    @property
    def numel(self) -> int:
        """How many weights the layer has, those that are not held included."""
        return self.param.numel() if self.pattern is None else math.prod(self.pattern.shape)

    def whole(self, mask: Tensor | None) -> Tensor:
        """One of the masks, in the shape of the layer and in memory of its own."""
        if self.pattern is not None:
            return self.pattern.mask(mask)
        return torch.ones_like(self.param, dtype=torch.bool) if mask is None else mask.clone()

    def trained_count(self) -> int:
        """How many weights are trained; counted once for each mask."""
        mask = self.trainable
        if mask is None:
            return self.param.numel()
        if self._counted is None or self._counted[0]() is not mask:
            self._counted = weakref.ref(mask), count(mask)
        return self._counted[1]

    def _shown(self) -> Tensor:
        assert self.kept is not None
        return self.kept if self.active is None else masked(self.kept, self.active)

    def sync(self) -> None:
        """Follow the parameter to where it is now, and let what was written to it win over what was kept of it."""
        shown = self.param.detach()
        self.active, self.trainable = self._here(self.active), self._here(self.trainable)
        if self.kept is None or self.kept.shape != shown.shape:
            self.kept = shown.float() if self._is_narrow and self.alpha > 1 else None
            return
        self.kept = self.kept.to(shown.device, torch.promote_types(shown.dtype, torch.float32))
        changed = shown != self.kept.to(shown.dtype)
        if self.active is not None:
            changed &= self.active
        self.kept = torch.where(changed, shown.to(self.kept.dtype), self.kept)

    def _here(self, mask: Tensor | None) -> Tensor | None:
        """A mask where the parameter is; a weight that was given another shape since needs others."""
        if mask is not None and mask.shape != self.param.shape:
            now, had = tuple(self.param.shape), tuple(mask.shape)
            raise ValueError(f"{self.name!r} has shape {now} now, but its masks have {had}: set new ones")
        return None if mask is None else mask.to(self.param.device)

    @property
    def _is_narrow(self) -> bool:
        return self.param.element_size() < 4

    # --- a step ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before the base optimiser's step: what it starts from; a narrow parameter is lent float32 memory."""
        self.sync()
        if self.kept is None:
            now, before = local(self.param.detach()), self._before
            if before is None or torch.compiler.is_compiling() or _kind(before) != _kind(now):
                self._before = now.clone()  # compiled, a buffer that is there at the second step alone compiles twice
            else:
                before.copy_(now)
        elif self._is_narrow:
            self.lend(self._shown().clone())

    def move(self) -> Move:
        """After it: where the base optimiser left the weight."""
        before = self._before if self.kept is None else local(self.kept)
        assert before is not None
        still = self.param.grad is None  # without a gradient nothing decays, as under torch's optimisers
        return Move(
            target=local(self.param.detach()),
            before=before,
            alpha=self.alpha,
            active=None if self.active is None else local(self.active),
            trainable=None if self.trainable is None else local(self.trainable),
            theta=None if self.kept is None else before,
            shrink=1.0 if still else self.shrink,
            decay=NO_DECAY if still else self.decay,
            rate=None if self.matched else 1.0,
        )

    def widen(self, memory: MutableMapping[str, Any]) -> None:
        """What the base optimiser remembers of a weight that is lent float32, in float32.

        It may have begun earlier: in its constructor, or before there were masks.
        """
        assert self._own is not None
        memory.update(_wide(memory, self._own.dtype))

    @property
    def lent(self) -> bool:
        """True while the parameter has float32 memory."""
        return self._own is not None

    def lend(self, wide: Tensor) -> None:
        """Give the parameter this float32 memory; its gradient follows, and comes back with `reclaim`."""
        own, grad = self.param.data, self.param.grad
        self.param.grad = None
        self.param.data = wide
        self.param.grad = None if grad is None else grad.to(wide.dtype)
        self._own, self._own_grad = own, grad

    def reclaim(self) -> Tensor:
        """Give the parameter its own memory and gradient again, and return what was lent, with the value it has now.

        What the optimiser did to the gradient (cleared, scaled or zeroed it) is done to the parameter's own.
        """
        assert self._own is not None
        wide, grad, own_grad = self.param.data, self.param.grad, self._own_grad
        self.param.grad = None
        self.param.data = self._own
        if grad is not None:
            self.param.grad = grad.to(self._own.dtype) if own_grad is None else own_grad.copy_(grad)
        self._own = self._own_grad = None
        return wide

    def revive(self) -> None:
        """Zeros that grew under α = 1 get the smallest magnitude of the layer, downhill: α > 1 never moves a 0."""
        if self.active is None and self.pattern is None:
            return
        value = self.weight
        zero, alive = value == 0, value[value != 0]
        zero = zero if self.active is None else zero & self.active
        down = torch.ones_like(value) if self.param.grad is None else self.param.grad.to(value.dtype).neg()
        self.put(zero, alive.abs().min().expand_as(down[zero]).copysign(down[zero]))

    def take(self, wide: Tensor) -> None:
        """Other values for a narrow weight, where it is active; the rule has no part in it."""
        self.kept = wide if self.active is None or self.kept is None else torch.where(self.active, wide, self.kept)
        self.param.detach().copy_(wide)

    def confine_gradient(self) -> None:
        """Zero the gradient where the weight is not trained, even if it is NaN or infinite there."""
        grad = self.param.grad
        if self.trainable is None or grad is None:
            return
        if grad.layout == torch.strided:
            grad.copy_(masked(grad, self.trainable))
        else:
            self.param.grad = grad * self.trainable

    def enforce(self) -> None:
        """The weights that are not active are zero, whoever moved them."""
        if self.active is not None:
            self.param.detach().copy_(masked(self.param.detach(), self.active))

    # --- masks ----------------------------------------------------------------------------------------------------

    def set_masks(self, active: Tensor | None, trainable: Tensor | None, keep: bool) -> None:
        """Choose the weights that are used and those that are trained; None means all.

        keep: hold on to the values of weights that are not active; otherwise they become zero for good.
        """
        theta, shared = self.theta(), trainable is active
        active = self._mask(active)
        trainable = active if shared else self._mask(trainable)
        if active is not None and not keep:
            theta = masked(theta, active)
        moves_unseen = active is not None and not shared and (trainable is None or bool((trainable & ~active).any()))
        self.restore(active, trainable, theta if active is not None and (keep or moves_unseen) else None, theta)

    def restore(
        self, active: Tensor | None, trainable: Tensor | None, kept: Tensor | None, theta: Tensor | None = None
    ) -> None:
        """Take up masks and what they hide; the weights stay, or become these."""
        if kept is None and self._is_narrow and (self.alpha > 1 or (theta is not None and self.kept is not None)):
            kept = (self.param.detach() if theta is None else theta).float()  # once wide, the moments stay wide
        self.active, self.trainable, self.kept, self.decay = active, trainable, kept, NO_DECAY
        if theta is not None:
            self.param.detach().copy_(theta)
        self.enforce()

    def check_mask(self, mask: Tensor | None) -> None:
        """An error that names the weight if the mask does not fit it."""
        if mask is None:
            return
        if not isinstance(mask, Tensor):
            raise TypeError(f"a mask for {self.name!r} must be a bool tensor, got {type(mask).__name__}")
        if mask.dtype != torch.bool or mask.shape != self.param.shape:
            raise ValueError(
                f"a mask for {self.name!r} must be a bool tensor of shape {tuple(self.param.shape)}, "
                f"got {mask.dtype} of shape {tuple(mask.shape)}"
            )

    def _mask(self, mask: Tensor | None) -> Tensor | None:
        """A copy with the parameter's strides, so that the kernel can walk both in memory's order."""
        self.check_mask(mask)
        if mask is None or sharded(self.param):
            return mask
        return torch.empty_like(self.param, dtype=torch.bool, requires_grad=False).copy_(mask)

    def put(self, where: Tensor, values: Tensor) -> None:
        """Give the weights at `where` these values, one for each: weights that are grown or initialised again."""
        self.sync()
        if self.kept is None:
            put_(self.param.detach(), where, values.to(self.param))
        else:
            put_(self.kept, where, values.to(self.kept))
            self.param.detach().copy_(self._shown())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_before": None, "_counted": None}


def show(weights: Iterable[WeightState]) -> None:
    """Weights that were lent float32 memory have their own again, with the values of now."""
    for weight in weights:
        if weight.lent:
            wide = weight.reclaim()
            weight.param.copy_(wide)


def seeing(closure: Callable[[], Any], weights: list[WeightState], confines: bool) -> Callable[[], Any]:
    """The closure, evaluated at the weights as the base optimiser has moved them, in the model's own precision.

    Masks hold meanwhile: what is not active is zero, and what is not trained has no gradient (confines), lest the next
    evaluation see a move that will be undone.
    """

    def evaluate() -> Any:
        lent = [(weight, weight.reclaim()) for weight in weights if weight.lent]
        for weight, wide in lent:
            weight.param.detach().copy_(wide)
        for weight in weights:
            weight.enforce()
        with torch.enable_grad():
            loss = closure()
        for weight in weights if confines else ():
            weight.confine_gradient()
        for weight, wide in lent:
            weight.lend(wide)
        return loss

    return evaluate


def exchanging(method: Callable[..., Any], weights: Iterable[WeightState]) -> Callable[..., Any]:
    """A method that puts other values into the weights (averages, say): masks hold, and no move is made of it."""

    @torch.no_grad()
    def exchange(*args: Any, **kwargs: Any) -> Any:
        for weight in weights:
            weight.begin()
        try:
            return method(*args, **kwargs)
        finally:
            for weight in weights:
                if weight.lent:
                    weight.take(weight.reclaim())
                weight.enforce()

    return exchange


class Frozen:
    """What an optimiser leaves bit-identical, whatever its momentum, its decay or the forward passes do.

    A frozen parameter is shown to the base optimiser without a gradient, which every one of torch takes for "leave it
    alone", decay and momentum included. A frozen buffer gets its value back after every step: forward passes change
    running statistics, no optimiser does.

    parameters: biases, norms, heads; weights with an α have masks of their own.
    buffers: their values at this moment are the ones that stay.
    """

    def __init__(self, parameters: Iterable[nn.Parameter] = (), buffers: Iterable[Tensor] = ()) -> None:
        self.parameters = {id(parameter): parameter for parameter in parameters}
        self.buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]

    def holds(self, parameter: nn.Parameter) -> bool:
        """True for a frozen parameter."""
        return id(parameter) in self.parameters

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside, frozen parameters have no gradient."""
        gradients = [(p, p.grad) for p in self.parameters.values() if p.grad is not None]
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def confined(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, after which frozen parameters have no gradient either: optimisers call it inside their step."""

        def evaluate() -> Any:
            loss = closure()
            for parameter in self.parameters.values():
                parameter.grad = None
            return loss

        return evaluate

    @torch.no_grad()
    def restore(self) -> None:
        """All buffers as they were when they were frozen."""
        for buffer, kept in self.buffers:
            buffer.copy_(kept)


def _wide(value: Any, narrow: torch.dtype) -> Any:
    """The same containers with float32 for this type of number."""
    if isinstance(value, Mapping):
        return {key: _wide(part, narrow) for key, part in value.items()}
    if isinstance(value, list):
        return [_wide(part, narrow) for part in value]
    return value.float() if isinstance(value, Tensor) and value.dtype == narrow else value


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in its own memory."""
    return tensor.to_local() if sharded(tensor) else tensor  # type: ignore[attr-defined]


def sharded(tensor: Tensor) -> bool:
    """True for a DTensor. Nobody has one before its module is loaded, and loading it takes half as long as torch."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def moves_of(weights: Sequence[WeightState]) -> list[Move]:
    """What the base optimiser did to these; a tensor whose parts the ranks have is matched as a whole."""
    moves, cut = [weight.move() for weight in weights], defaultdict(list)
    for place, weight in enumerate(weights):
        if sharded(weight.param):
            cut[_cut_over(weight.param)].append(place)
    for groups, places in cut.items():
        for place, move in zip(places, match([moves[p] for p in places], partial(_added, groups)), strict=True):
            moves[place] = move
    return moves


def _cut_over(tensor: Any) -> tuple[Any, ...]:
    """The process groups whose ranks have different parts of a DTensor."""
    each = enumerate(tensor.placements)
    return tuple(tensor.device_mesh.get_group(dim) for dim, placement in each if not placement.is_replicate())


def _added(groups: tuple[Any, ...], sums: Tensor) -> Tensor:
    for group in groups:
        torch.distributed.all_reduce(sums, group=group)
    return sums


def masked(tensor: Tensor, mask: Tensor) -> Tensor:
    """A copy that is zero where the mask is, whatever stood there."""
    return torch.where(mask, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()
