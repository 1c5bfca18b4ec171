"""Powerprop: a wrapper that gives any `torch.optim` optimiser the Powerpropagation update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from powerprop.absorb import masked
from powerprop.closures import asks_for_closure, confined, evaluated
from powerprop.freeze import Frozen
from powerprop.fused.build import why_not
from powerprop.fused.kernel import kernel
from powerprop.fused.step import Absorption, OnePass, is_known
from powerprop.mask_entries import zero_
from powerprop.masks import Masks
from powerprop.master import Master
from powerprop.optim_checks import check_decay, check_kinds, check_masks, check_weight, check_where, nothing_chosen
from powerprop.optim_load import load_state
from powerprop.optim_state import State, with_parts
from powerprop.power import check_alpha
from powerprop.select import Where, select
from powerprop.stand_ins import lent, standing_in

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
    fused: whether float32 weights on a CPU are moved by compiled code, in one pass over memory; around `SGD`, `Adam`
        and `AdamW` that pass takes the base optimiser's step as well. None: wherever there is a C compiler, but not in
        a distributed run, whose machines may differ. True: or an error. False: by torch alone. The results are the
        same to rounding; each way by itself is the same to the bit whenever it is run.
    decay: φ shrinks by lr·decay of itself in every step, past the base optimiser's arithmetic as AdamW's decay does.
        That penalises |w|^(2/α), for α = 2 the lasso's |w|: weights that are not needed go to zero, where the base
        optimiser's own decay, which is of w, leaves small ones almost as they are.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        alpha: float = 2.0,
        where: Where | None = None,
        sparsify: Sparsifier | None = None,
        fused: bool | None = None,
        decay: float = 0.0,
    ) -> None:
        check_kinds(optimizer, model, sparsify, fused)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.alpha = check_alpha(alpha)
        self.base, self.model, self.where = optimizer, model, check_where(where)
        self.alpha_key = "powerprop_alpha" if "alpha" in optimizer.defaults else "alpha"
        self.asks_for_closure = asks_for_closure(optimizer)
        self.sparsify: Sparsifier | None = None
        self.masters: dict[str, Master] = {}
        self.frozen = Frozen()
        self.stepping = False
        self.fused = _is_fused(fused)
        self._one_pass: OnePass | None = None
        self._absorption: Absorption | None = None
        self._alphas: dict[nn.Parameter, float] = {}
        self._take_up(first=0)
        if not self.masters:
            raise ValueError(nothing_chosen(model, where))
        self.decay = check_decay(decay, self.masters)
        self.sparsify = sparsify
        if sparsify is not None:
            sparsify.attach(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base optimiser's own groups."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if hasattr(self, "base"):  # torch's constructor begins with none
            self.base.param_groups = groups

    @property  # type: ignore[override]
    def state(self) -> State:
        """The base optimiser's state, and with that of each weight φ and masks, for tools that look for them here."""
        return State(self)

    @state.setter
    def state(self, state: Any) -> None:
        if hasattr(self, "base"):
            self.base.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as for any optimiser; the weights among them get α by the same rule.

        A sparsifier has laid out its masks by then, so that no more weights can come under it; biases and norms can.
        """
        if not hasattr(self, "base"):  # torch's constructor hands over the groups that the base optimiser has already
            return
        self.base.add_param_group(param_group)
        try:
            self._take_up(first=len(self.param_groups) - 1)
        except (TypeError, ValueError):
            self.base.param_groups.pop()
            raise

    def _take_up(self, first: int) -> None:
        """Give α to the weights of all groups from this one on."""
        groups = self.param_groups[first:]
        key, default = self.alpha_key, self.alpha
        alphas = [check_alpha(g.get(key, default), f"group {number}") for number, g in enumerate(groups, first)]
        place = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        chosen = select(self.model, self.where).items()
        new = [(place[id(p)], n, p) for n, p in chosen if id(p) in place and n not in self.masters]
        if new and self.sparsify is not None:
            names = ", ".join(repr(n) for _, n, _ in new)
            raise ValueError(
                f"{type(self.sparsify).__name__} has its layers and cannot take in {names} later: "
                f"hand all weights to the optimiser before wrapping it, or leave them out through where="
            )
        for number, name, param in new:
            check_weight(name, param, alphas[number])
        for number, name, param in sorted(new, key=lambda weight: weight[0]):
            self.masters[name] = Master(name, param, alphas[number], self.fused)
        self._alphas |= {g["params"][0]: alpha for g, alpha in zip(groups, alphas, strict=True) if g["params"]}

    # --- the step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the base optimiser towards its virtual target, then φ and the model's weights."""
        self._check_alphas()
        self._shrink()
        if closure is None and self._only_initialises():
            return self._initialise()
        if self.sparsify is not None:
            first, closure = evaluated(closure)
            if self.sparsify.before_step(self):
                return first
        loss = self._step(closure)
        self.frozen.restore()
        if self.sparsify is not None:
            self.sparsify.after_step(self)
        return loss

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """In one pass if that can be, else the base optimiser's step first and what becomes of it second."""
        self._meet_kernel()
        if self._one_pass is not None:
            loss, closure = evaluated(closure)
            if self._one_pass.step():
                return loss
        busy = [m for m in self.masters.values() if not m.idle and not self.frozen.holds(m.param)]
        for master in busy:
            master.before_step()
        if closure is not None and self.asks_for_closure:
            closure = confined(closure, busy)
        loss = self._base_step(closure)
        held = self._held([m for m in busy if not m.written])
        moved = [m for m in busy if m.written or id(m.param) in held]
        if self._absorption is not None:
            self._absorption.absorb(moved)
        else:
            for master in moved:
                master.absorb()
        return loss

    def _meet_kernel(self) -> None:
        """The kernel's tables are made with the first step, and never copied or saved."""
        if self.fused and self._absorption is None and (ours := kernel()) is not None:
            self._absorption = Absorption(ours)
            self._one_pass = OnePass(self, ours) if is_known(self.base) else None

    def _base_step(self, closure: Callable[[], Any] | None) -> Any:
        pairs = [(m.param, m.proxy) for m in self.masters.values() if m.proxy is not None]
        closure = lent(self.frozen.confined(closure), pairs)
        with self.frozen.hidden(), standing_in(self.base, pairs):
            self.stepping = True
            try:
                return self.base.step() if closure is None else self.base.step(closure)
            finally:
                self.stepping = False

    def _held(self, unseen: list[Master]) -> set[int]:
        """The parameters with a gradient that the base optimiser holds, and so may have moved without a trace."""
        if all(master.param.grad is None for master in unseen):
            return set()
        return {id(p) for group in self.param_groups for p in group["params"] if p.grad is not None}

    def _check_alphas(self) -> None:
        for number, group in enumerate(self.param_groups):
            alpha = group.get(self.alpha_key, self.alpha)
            was = self._alphas.get(group["params"][0], alpha) if group["params"] else alpha
            if alpha != was:
                raise ValueError(
                    f"group {number} was wrapped with alpha={was:g}, which cannot become {alpha!r} later: φ belongs to "
                    f"its α; wrap the base optimiser anew"
                )

    def _shrink(self) -> None:
        """What this step leaves of φ, by the learning rate that its group has now."""
        if not self.decay:
            return
        masters = {id(m.param): m for m in self.masters.values()}
        for number, group in enumerate(self.param_groups):
            lr = float(group.get("lr", 1.0))
            if not 0 <= lr * self.decay < 1:
                text = f"group {number} would lose lr·decay = {lr:g}·{self.decay:g} of φ in a step"
                raise ValueError(f"{text}, which must be at least 0 and below 1")
            for master in (masters[id(p)] for p in group["params"] if id(p) in masters):
                master.shrink = 1 - lr * self.decay

    def _only_initialises(self) -> bool:
        """True for the step that `torch.distributed.checkpoint` takes to learn which names the state will have.

        All learning rates and gradients are zero, and there is no state yet.
        """
        if self.base.state or any(float(group.get("lr", 1.0)) != 0 for group in self.param_groups):
            return False
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return bool(grads) and not any(grad.any() for grad in grads)

    def _initialise(self) -> Any:
        """It is no step of training: neither the sparsifier counts it, nor does φ follow it."""
        ours = {name: master.ours for name, master in self.masters.items()}
        loss = self._base_step(None)
        for name, master in self.masters.items():
            master.accept(ours[name])
        return loss

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
            check_masks(masks or {}, self.masters)
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
        norm = get_total_norm([self._trained(p.grad, masks.get(id(p))) for p in params])
        clip_grads_with_norm_(params, max_norm, norm)
        return norm

    def _trained(self, grad: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return grad
        ours = kernel() if self.fused else None
        return masked(grad, mask.to(grad.device)) if ours is None else ours.masked(grad, mask)

    @torch.no_grad()
    def slope(self, name: str) -> Tensor:
        """Ψ'(φ) = α|φ|^(α-1) of a weight, in its shape: what a gradient or a move of w is multiplied by to be one of φ.

        Inner products of gradients belong in φ-space: weigh them by the square of this. With α = 1 it is one.
        """
        if name not in self.masters:
            raise KeyError(f"no weight {name!r} here; there are {', '.join(self.masters)}")
        return self.masters[name].slope()

    @torch.no_grad()
    def reset_state(self, name: str, where: Tensor) -> None:
        """Zero the base optimiser's memory (momentum, squares, …) of some entries of a weight."""
        param = self.masters[name].param
        for value in self.base.state.get(param, {}).values():
            if isinstance(value, Tensor) and value.shape == param.shape:
                zero_(value, where.to(value.device))

    # --- saving -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The base optimiser's state dict, with φ, masks and the sparsifier's state in the state of each weight."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        for master in self.masters.values():
            master.sync()
        state = with_parts(self, self.base.state_dict())
        for changed in self._optimizer_state_dict_post_hooks.values():
            state = changed(self, state) or state
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken; a plain optimiser's state is taken too, with φ from the weights.

        The model's weights may be loaded before wrapping, after it, or after this. They win wherever somebody wrote
        them after us and they are not Ψ(φ) ⊙ active. A state that does not fit is refused, and changes nothing.
        """
        state = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state = hook(self, state) or state
        load_state(self, state)
        for done in self._optimizer_load_state_dict_post_hooks.values():
            done(self)

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler puts a `step` here that is bound to this very object; a copy must have its own.
        state = {key: value for key, value in self.__dict__.items() if key != "step"}
        return {**state, "_one_pass": None, "_absorption": None}

    def __repr__(self) -> str:
        decay = f"decay={self.decay:g}, " if self.decay else ""
        return f"Powerprop(alpha={self.alpha:g}, {decay}{len(self.masters)} weights, base={self.base!r})"


def _is_fused(wanted: bool | None) -> bool:
    """Whether compiled code is used; see `Powerprop`."""
    if wanted is None:
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        return not (several and torch.distributed.get_world_size() > 1) and kernel() is not None
    if wanted and kernel() is None:
        raise RuntimeError(f"fused=True needs the compiled step, but {why_not()}; fused=None does without")
    return wanted


def _or_ones(mask: Tensor | None, param: Tensor) -> Tensor:
    return torch.ones_like(param, dtype=torch.bool) if mask is None else mask.clone()
