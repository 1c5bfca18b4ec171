"""Powerprop: a wrapper that gives any `torch.optim` optimiser the Powerpropagation update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from powerprop.absorb import masked
from powerprop.entries import zero_
from powerprop.freeze import Frozen
from powerprop.masks import Masks, pack, unpack
from powerprop.master import Master
from powerprop.power import check_alpha
from powerprop.select import Where, select

__all__ = ["Powerprop", "Sparsifier"]


class Sparsifier(Protocol):
    """What `sparsify=` takes: an object that moves the masks as training goes on."""

    def attach(self, optimizer: Powerprop) -> None:
        """Called once, when the optimiser is made: set the first masks."""

    def before_step(self, optimizer: Powerprop) -> bool:
        """Called with fresh gradients before each step; True means that a mask update takes the place of the step."""

    def after_step(self, optimizer: Powerprop) -> None:
        """Called after each step, when the model holds its new weights."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on bit-identically."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the state that `state_dict` gave."""


class Powerprop(Optimizer):
    """Any optimiser, with Powerpropagation: w = φ|φ|^(α-1).

        target = optim(w, ∂L/∂w),    φ += (target - w) · α|φ|^(α-1),    w = φ|φ|^(α-1) ⊙ active

    The model always holds plain effective weights w; φ and the masks live here. The update is the paper's
    "virtual target" (Schwarz et al. 2021, section 2), which works with any optimiser because its corrections act on
    ∂L/∂w alone. With α = 1 and no masks every step is bit for bit the base optimiser's.

    optimizer: the base optimiser, over parameters of the model. Its groups are shared, so schedulers and `GradScaler`
        work as usual, and gradient clipping too; under masks, see `clip_grad_norm_`. A group may carry its own
        "alpha" ("powerprop_alpha" if the base optimiser has an option of that name itself, as RMSprop has).
    model: the module that owns the parameters; it tells weights from biases, norms and embeddings.
    alpha: the power, ≥ 1. The effective learning rate scales as α²|w|^(2-2/α): tune the rate for each α.
    where: which parameters get α: a name pattern, several, or a predicate of (name, parameter);
        by default the weights of all linear, convolutional and attention layers.
    sparsify: a sparse-training method, e.g. `RigL(sparsity=0.9, steps=10_000)`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        alpha: float = 2.0,
        where: Where | None = None,
        sparsify: Sparsifier | None = None,
    ) -> None:
        _check_kinds(optimizer, model, sparsify)
        self.alpha = check_alpha(alpha)
        self.base, self.model, self.where = optimizer, model, _repeatable(where)
        self.sparsify: Sparsifier | None = None
        self.masters: dict[str, Master] = {}
        self.frozen = Frozen()
        self.stepping = False
        self._alpha_key = "powerprop_alpha" if "alpha" in optimizer.defaults else "alpha"
        self.asks_for_closure = _asks_for_closure(optimizer)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._share()
        if not self.masters:
            raise ValueError(_nothing_chosen(model, where))
        self.sparsify = sparsify
        if sparsify is not None:
            sparsify.attach(self)

    def _share(self) -> None:
        """The groups and the state are the base optimiser's own objects, not copies."""
        self.param_groups = self.base.param_groups
        self.state = self.base.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as for any optimiser; the weights among them get α by the same rule.

        A sparsifier has laid out its masks by then, so that no more weights can come under it; biases and norms can.
        """
        if any(param_group is group for group in self.base.param_groups):
            self._take_up(param_group)
            return
        self.base.add_param_group(param_group)
        self._share()
        try:
            self._take_up(self.base.param_groups[-1])
        except (TypeError, ValueError):
            self.base.param_groups.pop()
            raise

    def _take_up(self, group: dict[str, Any]) -> None:
        number = [g is group for g in self.base.param_groups].index(True)
        alpha = check_alpha(group.get(self._alpha_key, self.alpha), f"group {number}")
        mine = {id(p) for p in group["params"]}
        chosen = select(self.model, self.where).items()
        new = {n: p for n, p in chosen if id(p) in mine and n not in self.masters}
        if new and self.sparsify is not None:
            raise ValueError(
                f"{type(self.sparsify).__name__} has its layers and cannot take in {', '.join(map(repr, new))} later: "
                f"hand all weights to the optimiser before wrapping it, or leave them out through where="
            )
        self.masters |= {n: self._master(n, p, alpha) for n, p in new.items()}

    def _master(self, name: str, param: nn.Parameter, alpha: float) -> Master:
        if isinstance(param, UninitializedParameter):
            raise ValueError(f"{name!r} has no shape yet: run one forward pass before wrapping the optimiser")
        return Master(name, param, alpha)

    # --- the step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the base optimiser towards its virtual target, then φ and the model's weights."""
        if self.sparsify is not None:
            first, closure = _evaluated(closure)
            if self.sparsify.before_step(self):
                return first
        busy = [m for m in self.masters.values() if not m.idle and not self.frozen.holds(m.param)]
        for master in busy:
            master.before_step()
        if closure is not None and self.asks_for_closure:
            closure = _confined(closure, busy)
        with self.frozen.hidden(), self._proxied(closure) as wrapped:
            self.stepping = True
            try:
                loss = self.base.step() if wrapped is None else self.base.step(wrapped)
            finally:
                self.stepping = False
        for master in busy:
            if master.written or self._has_step(master.param):
                master.absorb()
        self.frozen.restore()
        if self.sparsify is not None:
            self.sparsify.after_step(self)
        return loss

    def _has_step(self, param: nn.Parameter) -> bool:
        """True if the base optimiser holds the parameter and a gradient for it, and so may have moved it unseen."""
        return param.grad is not None and any(param is p for group in self.base.param_groups for p in group["params"])

    @contextmanager
    def _proxied(self, closure: Callable[[], Any] | None = None) -> Iterator[Callable[[], Any] | None]:
        """Let the base optimiser see float32 stand-ins for half-precision weights, here and only here."""
        pairs = [(m.param, m.proxy) for m in self.masters.values() if m.proxy is not None]
        if not pairs:
            yield closure
            return
        _lend_gradients(pairs)
        self._swap(pairs)
        try:
            yield None if closure is None else _lending(closure, pairs)
        finally:
            self._swap([(proxy, param) for param, proxy in pairs])
            for _, proxy in pairs:
                proxy.grad = None

    def _swap(self, pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        new = {id(old): (old, now) for old, now in pairs}
        for group in self.base.param_groups:
            group["params"] = [new[id(p)][1] if id(p) in new else p for p in group["params"]]
        for old, now in new.values():
            if old in self.base.state:
                self.base.state[now] = self.base.state.pop(old)

    # --- masks --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def set_masks(
        self,
        active: Mapping[str, Tensor] | None = None,
        trainable: Mapping[str, Tensor] | None = None,
        keep: bool = True,
    ) -> None:
        """Choose which weights the forward pass uses (active) and which the optimiser moves (trainable); None is all.

        Weights that are not trainable stay bit-identical whatever the base optimiser does. Weights that are not
        active are exactly zero in the model; keep says whether their values come back when they are active again.
        """
        for masks in (active, trainable):
            unknown = set(masks or ()) - set(self.masters)
            if unknown:
                raise KeyError(f"masks for {sorted(unknown)}, but the weights here are {sorted(self.masters)}")
        for name, master in self.masters.items():
            master.set_masks(
                None if active is None else active.get(name),
                None if trainable is None else trainable.get(name),
                keep,
            )

    def freeze(self, parameters: Iterable[nn.Parameter] = (), buffers: Iterable[Tensor] = ()) -> None:
        """Hold these parameters and buffers, and no others, bit-identical through every step from now on.

        For what has no mask: biases, norms, heads, running statistics. Weights with an α are held by `set_masks`.
        """
        self.frozen = Frozen(parameters, buffers)

    @property
    def active(self) -> Masks:
        """The weights that the forward pass uses."""
        return Masks({n: _or_ones(m.active, m.param) for n, m in self.masters.items()})

    @property
    def trainable(self) -> Masks:
        """The weights that the optimiser moves."""
        return Masks({n: _or_ones(m.trainable, m.param) for n, m in self.masters.items()})

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that those of the weights that are trained have at most this norm; returns their norm.

        torch's function of this name also counts weights that masks hold still, and so clips harder than asked: at 99%
        sparsity several times. The gradients of these are scaled too, not removed: RigL and SNFS grow weights by them.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}")
        masks = {id(m.param): m.trainable for m in self.masters.values()}
        every = [p for group in self.param_groups for p in group["params"]]
        params = [p for p in every if p.grad is not None and not self.frozen.holds(p)]
        norm = get_total_norm([_among(p.grad, masks.get(id(p))) for p in params])
        clip_grads_with_norm_(params, max_norm, norm)
        return norm

    @torch.no_grad()
    def reset_state(self, name: str, where: Tensor) -> None:
        """Zero the base optimiser's memory (momentum, squares, …) of some entries of a weight."""
        param = self.masters[name].param
        for value in self.base.state.get(param, {}).values():
            if isinstance(value, Tensor) and value.shape == param.shape:
                zero_(value, where.to(value.device))

    # --- saving -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The base optimiser's state dict, with φ, the masks and the sparsifier's state under "powerprop"."""
        state = self.base.state_dict()
        state["powerprop"] = {
            "weights": {n: _pack_master(m) for n, m in self.masters.items()},
            "sparsify": None if self.sparsify is None else self.sparsify.state_dict(),
        }
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken; a plain optimiser's state is taken too, with φ from the weights.

        The model's weights are loaded separately; wherever they are not Ψ(φ) ⊙ active, the weights win.
        """
        own = state_dict.get("powerprop")
        self._check_groups(state_dict["param_groups"])
        if own is not None:
            self._check_state(own)
            if self.sparsify is not None:  # before the weights: it refuses what does not fit
                self.sparsify.load_state_dict(own["sparsify"])
            for name, saved in own["weights"].items():
                _unpack_master(self.masters[name], saved)
        with self._proxied():
            self.base.load_state_dict({k: v for k, v in state_dict.items() if k != "powerprop"})
        self._share()

    def _check_groups(self, saved: list[dict[str, Any]]) -> None:
        have, want = ([len(group["params"]) for group in groups] for groups in (saved, self.base.param_groups))
        if have != want:
            raise ValueError(f"the state is of groups with {have} parameters, not {want}")

    def _check_state(self, own: Mapping[str, Any]) -> None:
        if set(own["weights"]) != set(self.masters):
            raise ValueError(f"the state is of weights {sorted(own['weights'])}, not {sorted(self.masters)}")
        if (own["sparsify"] is None) != (self.sparsify is None):
            have, want = (["no", "a"][x is not None] for x in (own["sparsify"], self.sparsify))
            raise ValueError(f"the state was saved with {have} sparsify=, this optimiser has {want} sparsify=")
        for name, saved in own["weights"].items():
            master, shape = self.masters[name], tuple(saved["shape"])
            if saved["alpha"] != master.alpha:
                raise ValueError(f"{name!r} was saved with alpha={saved['alpha']}, not {master.alpha}")
            if shape != tuple(master.param.shape):
                raise ValueError(f"{name!r} was saved with shape {shape}, not {tuple(master.param.shape)}")

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler puts a `step` here that is bound to this very object; a copy must have its own.
        return {key: value for key, value in self.__dict__.items() if key != "step"}

    def __repr__(self) -> str:
        return f"Powerprop(alpha={self.alpha:g}, {len(self.masters)} weights, base={self.base!r})"


def _check_kinds(optimizer: object, model: object, sparsify: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, Powerprop):
        raise TypeError(f"this optimizer is a Powerprop already, wrap its .base instead: {optimizer!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if sparsify is not None and (isinstance(sparsify, type) or not hasattr(sparsify, "attach")):
        raise TypeError(f"sparsify must be a method such as RigL(sparsity=0.9, steps=10_000), got {sparsify!r}")


def _repeatable(where: Where | None) -> Where | None:
    """Patterns as a list: it is asked once for every group."""
    return where if where is None or isinstance(where, str) or callable(where) else list(where)


def _among(grad: Tensor, mask: Tensor | None) -> Tensor:
    return grad if mask is None else masked(grad, mask.to(grad.device))


def _nothing_chosen(model: nn.Module, where: Where | None) -> str:
    names = [n for n, _ in model.named_parameters()]
    shown = ", ".join([*names[:5], *(["..."] if names[5:] else [])])
    return (
        f"no weight to give alpha to: the optimiser holds none that where={where!r} chooses among the model's "
        f"parameters: {shown or 'none'}; does it hold this model's parameters, not a copy's? where= chooses others"
    )


def _or_ones(mask: Tensor | None, param: Tensor) -> Tensor:
    return torch.ones_like(param, dtype=torch.bool) if mask is None else mask.clone()


def _evaluated(closure: Callable[[], Any] | None) -> tuple[Any, Callable[[], Any] | None]:
    """The closure's first loss, with its gradients, and a closure that does not compute that one again."""
    if closure is None:
        return None, None
    with torch.enable_grad():
        first = closure()
    known = [first]
    return first, lambda: known.pop() if known else closure()


def _asks_for_closure(optimizer: Optimizer) -> bool:
    """True if a step cannot do without a closure: such optimisers (LBFGS) evaluate it several times in one step."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _confined(closure: Callable[[], Any], masters: list[Master]) -> Callable[[], Any]:
    """The closure, with gradients of trainable weights alone, lest its next evaluation see moves that masks undo."""

    def confined() -> Any:
        loss = closure()
        for master in masters:
            master.confine_gradient()
        return loss

    return confined


def _lend_gradients(pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
    for param, proxy in pairs:
        proxy.grad = None if param.grad is None else param.grad.to(proxy.dtype)


def _lending(closure: Callable[[], Any], pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> Callable[[], Any]:
    """The closure evaluates the model at the stand-ins' values and hands its gradients to them."""

    def lent() -> Any:
        with torch.no_grad():
            for param, proxy in pairs:
                param.copy_(proxy)
        loss = closure()
        _lend_gradients(pairs)
        return loss

    return lent


def _pack_master(master: Master) -> dict[str, Any]:
    masks = {"active": master.active, "trainable": master.trainable}
    return {
        "alpha": master.alpha,
        "shape": list(master.param.shape),
        "phi": None if master.phi is None else master.phi.clone(),
        **{k: None if m is None else pack(m) for k, m in masks.items()},
    }


def _unpack_master(master: Master, saved: Mapping[str, Any]) -> None:
    masks = [None if saved[k] is None else unpack(saved[k], tuple(saved["shape"])) for k in ("active", "trainable")]
    phi = saved["phi"]
    master.restore(None if phi is None else phi.clone(), *masks)
