"""Ψ(φ) = φ|φ|^(α-1), and the textbook form: φ is the parameter, with gradients through Ψ (paper, equation 1)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize

from powerprop.select import Where, select

__all__ = ["Power", "check_alpha", "fold", "psi", "psi_inverse", "reparametrize", "slope"]


def check_alpha(alpha: float, name: str = "") -> float:
    """α as a float, or an error that repeats it: Ψ is defined for finite α ≥ 1."""
    whose = f" for {name!r}" if name else ""
    try:
        value = math.nan if isinstance(alpha, (str, bool)) else float(alpha)
    except OverflowError:  # of an integer beyond all floats
        raise ValueError(f"alpha must be a finite number >= 1, got {alpha!s:.10}… beyond all floats{whose}") from None
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"alpha must be a finite number >= 1, got {alpha!r}{whose}") from None
    if not (math.isfinite(value) and value >= 1.0):
        raise ValueError(f"alpha must be a finite number >= 1, got {alpha!r}{whose}")
    return value


class _Psi(torch.autograd.Function):
    """Ψ with its own backward: autograd through |φ|^(α-1) gives NaN at φ = 0 for 1 < α < 2."""

    @staticmethod
    def forward(ctx: Any, phi: Tensor, alpha: float) -> Tensor:
        ctx.save_for_backward(phi)
        ctx.alpha = alpha
        return phi * phi.abs().pow(alpha - 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (phi,) = ctx.saved_tensors
        return grad * slope(phi, ctx.alpha), None


def psi(phi: Tensor, alpha: float) -> Tensor:
    """θ = Ψ(φ) = φ|φ|^(α-1), differentiable, with the exact gradient α|φ|^(α-1) at 0 too.

    Examples:
        >>> pp.psi(torch.tensor([-3.0, 0.0, 2.0]), 2.0)
        tensor([-9.,  0.,  4.])
    """
    alpha = check_alpha(alpha)
    return phi if alpha == 1 else _Psi.apply(phi, alpha)  # type: ignore[no-untyped-call]


def psi_inverse(theta: Tensor, alpha: float) -> Tensor:
    """φ = Ψ⁻¹(θ) = sign(θ)|θ|^(1/α): the initialisation that keeps the function (computed in float64).

    Examples:
        >>> pp.psi_inverse(torch.tensor([-9.0, 0.0, 4.0]), 2.0)
        tensor([-3.,  0.,  2.])
    """
    alpha = check_alpha(alpha)
    if alpha == 1:
        return theta.clone()
    wide = theta.double()
    return torch.copysign(wide.abs().pow(1 / alpha), wide).to(theta.dtype)


def slope(phi: Tensor, alpha: float) -> Tensor:
    """Ψ'(φ) = α|φ|^(α-1): the factor by which large weights learn faster than small ones (equation 1).

    Examples:
        >>> pp.slope(torch.tensor([-3.0, 0.0, 2.0]), 2.0)
        tensor([6., 0., 4.])
    """
    alpha = check_alpha(alpha)
    return torch.ones_like(phi) if alpha == 1 else phi.abs().pow(alpha - 1).mul_(alpha)


class Power(nn.Module):
    """w = φ|φ|^(α-1) as a `torch.nn.utils.parametrize` parametrisation; its inverse initialises φ from w."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = check_alpha(alpha)

    def forward(self, phi: Tensor) -> Tensor:
        """Ψ(φ)."""
        return psi(phi, self.alpha)

    def right_inverse(self, theta: Tensor) -> Tensor:
        """Ψ⁻¹(θ)."""
        return psi_inverse(theta, self.alpha)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"alpha={self.alpha:g}"


def reparametrize(model: nn.Module, alpha: float, where: Where | None = None) -> nn.Module:
    """Replace each weight w by φ = sign(w)|w|^(1/α), w = φ|φ|^(α-1) computed in the forward pass; the function stays.

    The reference twin of `Powerprop`: with plain SGD both take the same steps. An optimiser made afterwards sees
    φ itself, so Adam and its kin undo part of the effect (paper, section 2 and appendix A).

    Examples:
        >>> before = model(x)
        >>> torch.allclose(pp.reparametrize(model, alpha=2.0)(x), before, atol=1e-5)
        True
    """
    alpha = check_alpha(alpha)
    _refuse_tied(model)
    chosen = select(model, where)
    for name, weight in chosen.items():
        if alpha > 1 and weight.numel() and not weight.detach().any():
            raise ValueError(f"{name!r} is all zero: φ = 0 is a fixed point for alpha = {alpha:g} > 1; initialise it")
    for name in chosen:
        owner, _, attribute = name.rpartition(".")
        parametrize.register_parametrization(model.get_submodule(owner), attribute, Power(alpha))
    return model


def _refuse_tied(model: nn.Module) -> None:
    """A parametrisation belongs to one module, so a weight that two of them share would come apart."""
    owners: dict[int, str] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if owners.setdefault(id(weight), name) != name:
            raise ValueError(
                f"{name!r} and {owners[id(weight)]!r} are one weight: use Powerprop, which keeps them tied"
            )


@torch.no_grad()
def fold(model: nn.Module) -> nn.Module:
    """Bake plain weights back: every Ψ(φ) becomes an ordinary parameter of the same name.

    Examples:
        >>> textbook = pp.reparametrize(model, alpha=2.0)    # train it, then
        >>> model = pp.fold(textbook)
    """
    for module in list(model.modules()):
        if not parametrize.is_parametrized(module):
            continue
        for attribute, chain in list(module.parametrizations.items()):  # type: ignore[operator,union-attr]
            if any(isinstance(p, Power) for p in chain):
                parametrize.remove_parametrizations(module, attribute)
    return model
