"""Powerprop: a wrapper that gives any `torch.optim` optimiser the Powerpropagation update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from powerprop.checks import (
    check_decay,
    check_groups,
    check_kinds,
    check_masks,
    check_still_here,
    check_weight,
    check_where,
    nothing_chosen,
)
from powerprop.mask_entries import zero_
from powerprop.masks import Masks
from powerprop.moments import moments_of
from powerprop.reparam import check_alpha
from powerprop.saved import State, load, save
from powerprop.select import Where, select
from powerprop.sparse.moving import Regrowth
from powerprop.update import power_update_
from powerprop.weight import Frozen, WeightState, exchanging, masked, moves_of, seeing, show

__all__ = ["Powerprop", "Rate", "Sparsifier"]

Rate = Literal["matched", "paper"]

_IN_TWO_CALLS = ("first_step", "second_step")
_EVERY_STEP = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
_SCALING = ("grad_scale", "found_inf")


class Sparsifier(Protocol):
    """What `sparsify=` takes: an object that moves the masks as training goes on."""

    def attach(self, optimizer: Powerprop) -> None:
        """Called once, when the optimiser is made: set the first masks."""

    def needs_gradients(self, optimizer: Powerprop) -> bool:
        """Whether `before_step` will look at gradients: then a closure is evaluated once more before that step."""

    def before_step(self, optimizer: Powerprop) -> bool:
        """Called before each step; True means that a mask update takes the place of the step."""

    def after_step(self, optimizer: Powerprop) -> None:
        """Called after each step, when the model holds its new weights."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on bit-identically."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the state that `state_dict` gave."""


class Layout(Protocol):
    """What keeps some weights in a form of its own between steps: `powerprop.sparse`."""

    def step(self, by_closure: bool) -> AbstractContextManager[None]:
        """Around a step of the optimiser, which evaluates a closure or does not."""

    def dense(self) -> AbstractContextManager[None]:
        """Inside, all weights have the form that they have in an ordinary model."""

    def gradient(self, name: str) -> Iterator[Tensor]:
        """The gradient of all weights of a layer that holds some, in blocks of rows."""

    def choose(self, name: str, survivors: Tensor, blocks: Iterator[Tensor], count: int) -> Regrowth:
        """Which others it will hold, if these stay and so many are grown by a matrix."""

    def regrow(self, name: str, moved: Regrowth, values: Tensor | float) -> None:
        """Let it hold others."""


P = ParamSpec("P")
R = TypeVar("R")


def _densely(method: Callable[Concatenate[Powerprop, P], R]) -> Callable[Concatenate[Powerprop, P], R]:
    """A method that means all weights of a layer meets them in their ordinary form."""

    @wraps(method)
    def call(self: Powerprop, /, *args: P.args, **kwargs: P.kwargs) -> R:
        layout: Layout | None = vars(self).get("compute")
        with nullcontext() if layout is None else layout.dense():
            return method(self, *args, **kwargs)

    return call


class Powerprop(Optimizer):
    """Any optimiser, with Powerpropagation: w = φ|φ|^(α-1).

        target = optim(w, ∂L/∂w),    r = α (target - w) sign(w)|w|^(1-2/α),    w ← w(1 + r)|1 + r|^(α-1)

    The update is the paper's "virtual target" (Schwarz et al. 2021, section 2), divided by φ, so that the model's
    weights are all there is. It works with any optimiser because its corrections act on ∂L/∂w alone. With α = 1 and
    no masks every step is bit for bit the base optimiser's.

    optimizer: the base optimiser, over parameters of the model. Its groups are shared, so schedulers and `GradScaler`
        work as usual, and gradient clipping too; under masks, see `clip_grad_norm_`.
    model: the module that owns the parameters; it tells weights from biases, norms and embeddings.
    alpha: the power, ≥ 1. Every group carries it as "alpha" ("powerprop_alpha" if the base optimiser has an option of
        that name itself, as RMSprop has), or its own if it came with one. It may change at any step, like a learning
        rate.
    where: which parameters get α: a name pattern, several, or a predicate of (name, parameter);
        by default the weights of all linear, convolutional and attention layers.
    sparsify: a sparse-training method, e.g. `RigL(sparsity=0.9, steps=10_000)`.
    decay: φ shrinks by lr·decay of itself in every step, past the base optimiser's arithmetic as AdamW's decay does.
        That penalises |w|^(2/α), for α = 2 the lasso's |w|: weights that are not needed go to zero, where the base
        optimiser's own decay, which is of w, leaves small ones almost as they are.
    moments: the names in the base optimiser's state that hold one number for each weight, which is cleared where masks
        change; by default those of torch's optimisers.
    rate: "matched" divides the moves of each weight tensor by one number, so that the learning rate of the plain
        optimiser serves every α (`powerprop.update.match` has the equation); "paper" is the update as printed, whose
        effective learning rate scales as α²|w|^(2-2/α) and has to be tuned for each α.

    Examples:
        >>> optimizer = pp.Powerprop(torch.optim.Adam(model.parameters(), lr=1e-3), model, alpha=2.0)
        >>> torch.nn.functional.cross_entropy(model(x), y).backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        alpha: float = 2.0,
        where: Where | None = None,
        sparsify: Sparsifier | None = None,
        decay: float = 0.0,
        moments: Iterable[str] | None = None,
        rate: Rate = "matched",
    ) -> None:
        check_kinds(optimizer, model, sparsify)
        if rate not in ("matched", "paper"):
            raise ValueError(f'rate must be "matched" or "paper", got {rate!r}')
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.alpha = check_alpha(alpha)
        self.base, self.model, self.where = optimizer, model, check_where(where)
        self.alpha_key = "powerprop_alpha" if "alpha" in optimizer.defaults else "alpha"
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        self.asks_for_closure = closure is not None and closure.default is inspect.Parameter.empty  # LBFGS
        self.sparsify: Sparsifier | None = None
        self.compute: Layout | None = None
        self.masters: dict[str, WeightState] = {}
        self.tracked: set[str] = set()
        self.frozen = Frozen()
        self.moments = None if moments is None else list(moments)
        self.rate = rate
        self.stepping = self._begun = False
        self._take_up(first=0)
        if not self.masters:
            raise ValueError(nothing_chosen(model, where))
        self.decay = check_decay(decay, self.masters)
        self.sparsify = sparsify
        self._unmasked: dict[str, Tensor] = {}
        if sparsify is not None:
            self._unmasked = {n: m.theta() for n, m in self.masters.items()}
            sparsify.attach(self)

    def unmask(self) -> None:
        """Before a state is loaded: the weights of before the first masks, unless somebody has written them since.

        A resumed run may load its weights first and wrap them second, which masks them before their own masks come.
        """
        for name, theta in self._unmasked.items():
            weight = self.masters[name]
            shown = theta if weight.active is None else masked(theta, weight.active)
            if torch.equal(shown.to(weight.param.dtype), weight.param.detach()):
                weight.restore(None, None, None, theta)
            else:  # this state may be a fresh one, whose masks hide them too
                self._unmasked[name] = weight.param.detach().clone()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base optimiser's own groups."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if "base" in vars(self):  # torch's constructor begins with none
            self.base.param_groups = groups

    @property  # type: ignore[override]
    def state(self) -> State:
        """The base optimiser's state, and with that of each weight its masks, for tools that look for them here."""
        return State(self)

    @state.setter
    def state(self, state: Any) -> None:
        if "base" in vars(self):
            self.base.state = state

    @_densely
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as for any optimiser; the weights among them get α by the same rule.

        A sparsifier has laid out its masks by then, so that no more weights can come under it; biases and norms can.
        """
        if "base" not in vars(self):  # torch's constructor hands over the groups that the base optimiser has already
            return
        self.base.add_param_group(param_group)
        try:
            self._take_up(first=len(self.param_groups) - 1)
        except (TypeError, ValueError):
            self.base.param_groups.pop()
            raise

    def _take_up(self, first: int) -> None:
        """Give α to the weights of all groups from this one on."""
        groups, key = self.param_groups[first:], self.alpha_key
        alphas = [check_alpha(g.get(key, self.alpha), f"group {number}") for number, g in enumerate(groups, first)]
        place = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        chosen = select(self.model, self.where).items()
        if self.where is None:  # what does not train is not to be masked either
            chosen = {n: p for n, p in chosen if p.requires_grad}.items()
        new = [(place[id(p)], n, p) for n, p in chosen if id(p) in place and n not in self.masters]
        if new and self.sparsify is not None:
            names = ", ".join(repr(n) for _, n, _ in new)
            raise ValueError(
                f"{type(self.sparsify).__name__} has its layers and cannot take in {names} later: "
                f"hand all weights to the optimiser before wrapping it, or leave them out through where="
            )
        for number, name, param in new:
            check_weight(name, param, alphas[number])
        check_groups([groups[number] for number, _, _ in new if alphas[number] > 1])
        for number, name, param in sorted(new, key=lambda weight: weight[0]):
            self.masters[name] = WeightState(name, param, alphas[number], self.rate == "matched")
        for group, alpha in zip(groups, alphas, strict=True):
            group[key] = alpha

    def set_alpha(self, alpha: float) -> None:
        """Another power from the next step on, in all groups; the weights, and so the function, stay."""
        alpha = check_alpha(alpha)
        self._check_leaving([w for n, w in self.masters.items() if n not in self.tracked], alpha)
        self.alpha = alpha
        for group in self.param_groups:
            group[self.alpha_key] = alpha

    def track(self, name: str) -> None:
        """Let masks hold single entries of a parameter that has no α, such as a bias."""
        self.masters[name] = WeightState(name, self.model.get_parameter(name), 1.0)
        self.tracked.add(name)

    # --- the step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the base optimiser towards its virtual target, and what Powerprop makes of it."""
        args: tuple[Any, ...] = (self, closure)
        kwargs: dict[str, Any] = {}
        for hook in self._optimizer_step_pre_hooks.values():
            args, kwargs = hook(self, args, kwargs) or (args, kwargs)
        by_closure = any(argument is not None for argument in (*args[1:], *kwargs.values()))
        with nullcontext() if self.compute is None else self.compute.step(by_closure):
            loss = self._step(*args[1:], **kwargs)
        for done in self._optimizer_step_post_hooks.values():
            done(self, args, kwargs)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch would let global hooks see this step beside the base's

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if (found := vars(self).get("found_inf")) is not None and bool(found):
            return None  # as under a GradScaler: gradients overflowed, and nothing changes
        self._read_groups()
        if closure is None:
            check_still_here(self.model, self.masters)
            if self._only_initialises():
                return self._base_step(None)
        first, self._begun, self._unmasked = not self._begun, True, {}
        if self.sparsify is not None:
            loss = None
            if closure is not None and self.sparsify.needs_gradients(self):
                with torch.enable_grad():
                    loss = closure()
            if self.sparsify.before_step(self):
                return loss
        loss = self._base_step(closure)
        self.frozen.restore()
        if self.sparsify is not None:
            if first:
                self._check_moments()
            self.sparsify.after_step(self)
        return loss

    def _base_step(self, closure: Callable[[], Any] | None) -> Any:
        """The base optimiser's step, and then what Powerprop makes of its moves."""
        busy = [m for m in self.masters.values() if not m.idle and not self.frozen.holds(m.param)]
        if closure is not None:  # growth by the base optimiser's momentum needs the gradients of all weights
            confines = not getattr(self.sparsify, "grows_by_momentum", False)
            closure = self.frozen.confined(seeing(closure, busy, confines))
        scaling = {key: vars(self)[key] for key in _SCALING if key in vars(self)}
        vars(self.base).update(scaling)
        self.stepping = True
        try:
            for weight in busy:
                weight.begin()
                if weight.lent:
                    weight.widen(self.base.state.get(weight.param, {}))
            with self.frozen.hidden() if self.frozen.parameters else nullcontext():
                loss = _plain_step(self.base)() if closure is None else self.base.step(closure)
            if busy:
                power_update_(moves_of(busy))
                show(busy)
            return loss
        finally:
            self.stepping = False
            for key in scaling:
                vars(self.base).pop(key, None)
            for weight in busy:
                if weight.lent:
                    weight.reclaim()

    def _check_moments(self) -> None:
        """A state that no mask could move with is an error as soon as there is one, not when masks move."""
        for name, weight in self.masters.items():
            list(moments_of(self.base, name, weight.param, self.moments))

    def _read_groups(self) -> None:
        """The power that each group has now, and what its learning rate leaves of φ; a bad one changes nothing."""
        masters = {id(m.param): m for n, m in self.masters.items() if n not in self.tracked}
        settings = []
        for number, group in enumerate(self.param_groups):
            alpha = check_alpha(group.get(self.alpha_key, self.alpha), f"group {number}")
            shrink = self._shrink(number, group) if self.decay and alpha > 1 else 1.0
            settings += [(number, masters[id(p)], alpha, shrink) for p in group["params"] if id(p) in masters]
        for _, weight, alpha, _ in settings:
            if weight.alpha == 1 < alpha:
                self._check_leaving([weight], alpha)
        check_groups(
            [self.param_groups[number] for number, weight, alpha, _ in settings if alpha > 1 or not weight.idle]
        )
        for _, weight, alpha, shrink in settings:
            if weight.alpha == 1 < alpha:
                weight.revive()
            weight.alpha, weight.shrink = alpha, shrink

    def _shrink(self, number: int, group: Mapping[str, Any]) -> float | Tensor:
        lr: float | Tensor = group.get("lr", 1.0)
        if isinstance(lr, Tensor):  # to look at it would make the host wait for its device
            return 1 - lr * self.decay
        if not 0 <= lr * self.decay < 1:
            text = f"group {number} would lose lr·decay = {lr:g}·{self.decay:g} of φ in a step"
            raise ValueError(f"{text}, which must be at least 0 and below 1")
        return 1 - float(lr) * self.decay

    def _check_leaving(self, weights: list[WeightState], alpha: float) -> None:
        """α may leave 1 only where there is a weight that can move."""
        for weight in weights:
            if weight.alpha == 1 < alpha:
                check_weight(weight.name, weight.param, alpha)

    def _only_initialises(self) -> bool:
        """True for the step that `torch.distributed.checkpoint` takes to learn which names the state will have.

        All learning rates and gradients are zero, and there is no state yet; it is no step of training.
        """
        if torch.compiler.is_compiling() or self._begun or self.base.state:
            return False
        rates = [group.get("lr", 1.0) for group in self.param_groups]
        if any((isinstance(lr, Tensor) and not lr.is_cpu) or float(lr) != 0 for lr in rates):
            return False
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return bool(grads) and not any(grad.any() for grad in grads)

    def __getattr__(self, name: str) -> Any:
        """What the base optimiser has beyond torch's interface: schedule-free's `train` and `eval`, for instance."""
        base = vars(self).get("base")
        if base is None or name.startswith("_") or not hasattr(base, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}, nor has its base optimiser")
        if name in _IN_TWO_CALLS:
            raise RuntimeError(
                f"{type(base).__name__}.{name} would move weights past Powerprop: hand a closure to step() instead"
            )
        base_s = getattr(base, name)
        return exchanging(base_s, self.masters.values()) if name in ("train", "eval") else base_s

    # --- masks ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @_densely
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
        for name, weight in self.masters.items():
            weight.set_masks(
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
        return Masks({n: m.whole(m.active) for n, m in self.masters.items()})

    @property
    def trainable(self) -> Masks:
        """The weights that the optimiser moves."""
        return Masks({n: m.whole(m.trainable) for n, m in self.masters.items()})

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, parameters: Iterable[nn.Parameter] | None = None) -> Tensor:
        """Scale all gradients so that those of the weights that are trained have at most this norm; returns their norm.

        parameters: of these alone, and summed in this order; by default all that are trained here.

        torch's function of this name also counts weights that masks hold still, and so clips harder than asked: at 99%
        sparsity several times. The gradients of these are scaled too, not removed: RigL and SNFS grow weights by them.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}")
        masks = {id(m.param): m.trainable for m in self.masters.values()}
        own = (p for group in self.param_groups for p in group["params"])
        every: Iterable[nn.Parameter] = own if parameters is None else parameters
        params = [p for p in every if p.grad is not None and not self.frozen.holds(p)]
        norm = get_total_norm([_trained(p, masks.get(id(p))) for p in params])
        clip_grads_with_norm_(params, max_norm, norm)
        return norm

    @torch.no_grad()
    @_densely
    def slope(self, name: str) -> Tensor:
        """Ψ'(φ) = α|φ|^(α-1) of a weight, in its shape: what a gradient or a move of w is multiplied by to be one of φ.

        Inner products of gradients belong in φ-space: weigh them by the square of this. With α = 1 it is one.
        """
        if name not in self.masters:
            raise KeyError(f"no weight {name!r} here; there are {', '.join(self.masters)}")
        return self.masters[name].slope()

    @torch.no_grad()
    @_densely
    def reset_state(self, name: str, where: Tensor) -> None:
        """Zero the base optimiser's memory (momentum, squares, …) of some entries of a weight."""
        for value in list(moments_of(self.base, name, self.masters[name].param, self.moments)):
            zero_(value, where.to(value.device))

    # --- saving -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @_densely
    def state_dict(self) -> dict[str, Any]:
        """The base optimiser's state dict, with masks, hidden weights and the sparsifier's state beside each weight."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        for weight in self.masters.values():
            weight.sync()
        state = save(self)
        for changed in self._optimizer_state_dict_post_hooks.values():
            state = changed(self, state) or state
        return state

    @torch.no_grad()
    @_densely
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken; a plain optimiser's state is taken too.

        The weights come with the model, before or after this. A state that does not fit changes nothing.
        """
        state = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state = hook(self, state) or state
        load(self, state)
        for done in self._optimizer_load_state_dict_post_hooks.values():
            done(self)

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler puts a `step` here that is bound to this very object; a copy must have its own.
        return {key: value for key, value in self.__dict__.items() if key != "step"}

    def __repr__(self) -> str:
        decay = f"decay={self.decay:g}, " if self.decay else ""
        return f"Powerprop(alpha={self.alpha:g}, {decay}{len(self.masters)} weights, base={self.base!r})"


def _plain_step(base: Optimizer) -> Callable[..., Any]:
    """The step of an optimiser; for torch.compile that of torch's own without its decorations, which break the graph.

    They call hooks, if there are any, and turn gradients off, which they are here.
    """
    if not torch.compiler.is_compiling() or not type(base).__module__.startswith("torch.optim"):
        return base.step
    hooks = (base._optimizer_step_pre_hooks, base._optimizer_step_post_hooks, *_EVERY_STEP)
    if base.defaults.get("differentiable") or any(hooks):
        return base.step
    step: Any = type(base).step
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return partial(step, base)


def _trained(parameter: nn.Parameter, mask: Tensor | None) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad if mask is None else masked(parameter.grad, mask.to(parameter.grad.device))
