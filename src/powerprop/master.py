"""One weight behind the optimiser: its master parameter φ and its two masks, kept in step with the model's weight.

The model holds the effective weight w = Ψ(φ) ⊙ active. The base optimiser moves w to a virtual target, and `absorb`
turns that move into one of φ (paper, section 2); the arithmetic is in `absorb.py`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from powerprop.absorb import Chunk, absorb_linear, absorb_power, chunks, confine, keep, laid_out_like, masked
from powerprop.fused.kernel import kernel
from powerprop.mask_entries import count, put_
from powerprop.power import abs_power, flush, psi_inverse

__all__ = ["NO_DECAY", "Master"]

NO_DECAY = (0.0, 0.0)


class Master:
    """φ of one weight, with its masks.

    name: the parameter's name in the model.
    param: the model's parameter, which always holds the effective weight.
    alpha: the power; 1 needs no φ unless masks freeze or hide weights whose value must be kept.
    compiled: |φ|^(α-1) by the compiled kernel, which takes the steps too.
    """

    def __init__(self, name: str, param: nn.Parameter, alpha: float, compiled: bool = False) -> None:
        self.name, self.param, self.alpha, self.compiled = name, param, alpha, compiled
        self.active: Tensor | None = None
        self.trainable: Tensor | None = None
        self.phi: Tensor | None = None
        self.factor: Tensor | None = None
        self.proxy: nn.Parameter | None = None
        self.decay = NO_DECAY
        self.shrink = 1.0
        self._counted: tuple[weakref.ref[Tensor], int] | None = None
        self._chunks: list[Chunk] | None = None
        self._place: tuple[Any, ...] = ()
        self._version = self._stepped_from = self._memory = -1
        if alpha > 1:
            self._derive()

    @property
    def idle(self) -> bool:
        """True if there is nothing to do: α = 1 and no masks, the base optimiser alone."""
        return self.phi is None and self.active is None and self.trainable is None

    @property
    def weight(self) -> nn.Parameter:
        """What the base optimiser moves: the parameter, or its float32 proxy if that has fewer bits."""
        return self.param if self.proxy is None else self.proxy

    def theta(self) -> Tensor:
        """Ψ(φ), all of it, whether active or not."""
        if self.phi is None:
            return self.param.detach()
        return self.phi.clone() if self.alpha == 1 else self.phi * self._known_power()

    def slope(self) -> Tensor:
        """Ψ'(φ) = α|φ|^(α-1): how much faster than with α = 1 the weight moves."""
        self.sync()
        return torch.ones_like(self.param) if self.alpha == 1 else self._known_power() * self.alpha

    def trained_count(self) -> int:
        """How many weights are trained; counted once for each mask."""
        mask = self.trainable
        if mask is None:
            return self.param.numel()
        if self._counted is None or self._counted[0]() is not mask:
            self._counted = weakref.ref(mask), count(mask)
        return self._counted[1]

    # --- where φ comes from -------------------------------------------------------------------------------------

    def _derive(self) -> None:
        """φ = Ψ⁻¹(w), in float32 at least; w is set to Ψ(φ), which differs from it by rounding alone."""
        self._make_proxy()
        source = self.weight.detach()
        self.phi = flush(psi_inverse(source, self.alpha), self.alpha) if self.alpha > 1 else source.clone()
        self._refresh()

    @property
    def ours(self) -> bool:
        """True if nobody but us has written to the weight since we last did."""
        return self.param._version == self._version

    def _make_proxy(self) -> None:
        """A float32 stand-in for a weight of fewer bits, whose small updates would be lost in rounding."""
        small = self.param.element_size() < 4
        self.proxy = nn.Parameter(self.param.detach().float(), requires_grad=False) if small else None

    def _refresh(self) -> None:
        """Compute |φ|^(α-1) and the weight anew from φ."""
        assert self.phi is not None
        if self.alpha > 1:
            self._keep_power()
            self._chunks = None
        self._write()

    def _keep_power(self) -> None:
        """Keep |φ|^(α-1) for the next step, unless the kernel computes it again in no time."""
        ours = kernel() if self.compiled else None
        self.factor = None if ours is not None and ours.recomputes(self.alpha) else self._power()

    def _known_power(self) -> Tensor:
        return self._power() if self.factor is None else self.factor

    def _power(self) -> Tensor:
        """|φ|^(α-1) in memory of its own; the hot path does the same in place."""
        assert self.phi is not None
        if self.compiled and (ours := kernel()) is not None:
            return ours.power(self.phi, self.alpha)
        return abs_power(self.phi, self.alpha - 1, torch.empty_like(self.phi), torch.empty_like(self.phi))

    def _shown(self) -> Tensor:
        """Ψ(φ) ⊙ active."""
        theta = self.theta()
        if self.active is None:
            return theta
        return masked(theta, self.active)

    def _write(self) -> None:
        self.weight.detach().copy_(self._shown())
        self.publish()

    def publish(self) -> None:
        """The weight is ours again, and the model shows it in its own precision."""
        if self.proxy is not None:
            self.param.detach().copy_(self.proxy)
        self._version = self.param._version

    def sync(self) -> None:
        """Respect what was written to the weight from outside: φ is derived anew wherever w is no longer Ψ(φ).

        Weights that the active mask hides keep their φ.
        """
        self.follow()
        if self.ours or self.phi is None:
            return
        changed = self.param.detach() != self._shown().to(self.param.dtype)
        if self.active is not None:
            changed &= self.active
        if changed.any():
            self._adopt(changed)
        self._version = self.param._version

    def _adopt(self, changed: Tensor) -> None:
        assert self.phi is not None
        outside = psi_inverse(self.param.detach().to(self.phi.dtype), self.alpha)
        self.phi.copy_(torch.where(changed, outside, self.phi))
        if self.alpha > 1:
            flush(self.phi, self.alpha)
        self._refresh()

    def follow(self) -> None:
        """Go along when the parameter's storage moves (model.to(device), a new .data)."""
        place = (self.param.data_ptr(), self.param.device, self.param.dtype, self.param.stride())
        if place == self._place:
            return
        shared = self.trainable is self.active
        if self.active is not None:
            self.active = laid_out_like(self.active.to(self.param.device), self.param)
        if self.trainable is not None:
            self.trainable = self.active if shared else laid_out_like(self.trainable.to(self.param.device), self.param)
        if self.phi is not None:
            wide = torch.promote_types(self.param.dtype, torch.float32)
            self.phi = laid_out_like(self.phi.to(self.param.device, wide), self.param)
            self._make_proxy()
            if self.alpha > 1:
                self._keep_power()
            if self.proxy is not None:
                self.proxy.detach().copy_(self._shown())
        self._place, self._chunks = place, None

    # --- masks --------------------------------------------------------------------------------------------------

    def set_masks(self, active: Tensor | None, trainable: Tensor | None, keep: bool) -> None:
        """Choose the weights that are used and those that are trained; None means all.

        keep: hold on to the values of weights that are not active; otherwise they become zero for good.
        """
        self.sync()
        shared = trainable is active
        active = self._mask(active)
        trainable = active if shared else self._mask(trainable)
        same = shared or trainable is None or (active is not None and torch.equal(active, trainable))
        if self.phi is None and (active is not None or trainable is not None) and (keep or not same):
            self._derive()
        self.active, self.trainable, self._chunks, self.decay = active, trainable, None, NO_DECAY
        if not keep and active is not None:
            self._drop(active)
        elif self.phi is not None:
            self._write()
        if self.alpha == 1 and active is None and trainable is None:
            self.phi = self.proxy = None

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
        self.check_mask(mask)
        if mask is None:
            return None
        return laid_out_like(mask.detach().to(self.param.device, copy=True), self.param)

    def _drop(self, kept: Tensor) -> None:
        for buffer in (self.phi, self.factor, self.weight.detach()):
            if buffer is not None:
                buffer.copy_(masked(buffer, kept))
        self.publish()

    def put(self, where: Tensor, values: Tensor) -> None:
        """Give the weights at `where` these values, one for each: weights that are grown or initialised again."""
        self.sync()
        if self.phi is None:
            put_(self.param.detach(), where, values.to(self.param))
            self._version = self.param._version
        else:
            put_(self.phi, where, psi_inverse(values.to(self.phi), self.alpha))
            self._refresh()

    # --- the hot path -------------------------------------------------------------------------------------------

    def absorb(self) -> None:
        """After the base optimiser's step: turn its move of the weight into one of φ, and show Ψ(φ) ⊙ active."""
        if self.phi is None:
            for c in self._cut():
                if c.active is not None:
                    keep(c.weight_bits, c.active)
        else:
            for c in self._cut():
                if self.alpha == 1:
                    absorb_linear(c, self.decay)
                else:
                    absorb_power(c, self.alpha, self.decay, self.shrink)
        self.publish()

    def _cut(self) -> list[Chunk]:
        """Views of all buffers where they are now: optimisers may give a weight other memory (`p.data = ...`)."""
        if self._chunks is None or self._memory != self.weight.data_ptr():
            if self.proxy is None:
                self.follow()
            if self.alpha > 1 and self.factor is None:
                self.factor = self._power()
            weight = self.weight.detach()
            self._memory = weight.data_ptr()
            self._chunks = chunks(weight, self.phi, self.factor, self.active, self.trainable)
        return self._chunks

    def before_step(self) -> None:
        """Remember the weight's version, to see whether the base optimiser moves it."""
        self.sync()
        self._stepped_from = self.weight._version

    @property
    def written(self) -> bool:
        """True if the weight was surely written to since `before_step`; fused optimisers and `.data` leave no trace."""
        return self.weight._version != self._stepped_from

    def confine_gradient(self) -> None:
        """Zero the gradient where the weight is not trained, even if it is NaN or infinite there."""
        grad = self.param.grad
        if self.trainable is None or grad is None:
            return
        if grad.dtype == self.weight.dtype and grad.stride() == self.weight.stride():
            confine(grad, self._cut())
        else:
            grad.copy_(masked(grad, self.trainable))

    # --- saving -------------------------------------------------------------------------------------------------

    def restore(
        self, phi: Tensor | None, active: Tensor | None, trainable: Tensor | None, theta: Tensor | None = None
    ) -> None:
        """Take up saved φ and masks, or θ where there is no φ.

        A weight that we were the last to write, by wrapping it if by nothing else, becomes Ψ(φ) ⊙ active. One that
        somebody else has written since is not touched: the next step compares it with φ, and it wins where it differs.
        """
        ours = self.ours
        self.active = self._mask(active)
        self.trainable = self.active if trainable is active else self._mask(trainable)
        self.phi, self.factor, self.decay, self._place, self._version = phi, None, NO_DECAY, (), -1
        self.proxy = None if phi is None else self.proxy
        self.follow()
        if ours and phi is not None:
            self._write()
        elif ours and theta is not None:
            self.param.detach().copy_(theta if self.active is None else masked(theta.to(self.param), self.active))
            self.publish()

    def accept(self, ours: bool) -> None:
        """Count what was written to the weight since as ours, if it was ours before."""
        self._version = self.param._version if ours else -1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_chunks": None, "_counted": None, "_place": (), "_version": self.ours}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.accept(state["_version"])
