"""The map Ψ(φ) = φ|φ|^(α-1), its inverse and its slope: a reference form and a fast form.

The reference form reads like the paper (section 2). The fast form serves the optimiser: `pow` costs about ten
multiplications on a CPU, and the paper's α are all dyadic (1.125 … 5), so |φ|^(α-1) is built from products and a chain
of reciprocal square roots, in place, on buffers that the caller keeps. Tests hold the two to each other.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["abs_power", "check_alpha", "floor_of", "flush", "psi", "psi_inverse", "slope"]

_MAX_HALVINGS = 4
_MAX_PRODUCTS = 8


def check_alpha(alpha: float, name: str = "") -> float:
    """α as a float, or an error that repeats it: Ψ is defined for finite α ≥ 1."""
    whose = f" for {name!r}" if name else ""
    try:
        value = math.nan if isinstance(alpha, str) else float(alpha)
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
    """θ = Ψ(φ) = φ|φ|^(α-1), differentiable, with the exact gradient α|φ|^(α-1) at 0 too."""
    alpha = check_alpha(alpha)
    return phi if alpha == 1 else _Psi.apply(phi, alpha)  # type: ignore[no-untyped-call]


def psi_inverse(theta: Tensor, alpha: float) -> Tensor:
    """φ = Ψ⁻¹(θ) = sign(θ)|θ|^(1/α): the initialisation that keeps the function (computed in float64)."""
    alpha = check_alpha(alpha)
    if alpha == 1:
        return theta.clone()
    wide = theta.double()
    return torch.copysign(wide.abs().pow(1 / alpha), wide).to(theta.dtype)


def slope(phi: Tensor, alpha: float) -> Tensor:
    """Ψ'(φ) = α|φ|^(α-1): the factor by which large weights learn faster than small ones (equation 1)."""
    alpha = check_alpha(alpha)
    return torch.ones_like(phi) if alpha == 1 else phi.abs().pow(alpha - 1).mul_(alpha)


def flush(phi: Tensor, alpha: float) -> Tensor:
    """Set to zero, in place, every φ whose |φ|^α is no normal number: denormals are 10-100x slower on a CPU."""
    return torch.hardshrink(phi, floor_of(phi.dtype, alpha), out=phi)


@lru_cache(maxsize=256)
def floor_of(dtype: torch.dtype, alpha: float) -> float:
    """The smallest |φ| whose |φ|^α is a normal number."""
    return float(torch.finfo(dtype).tiny ** (1 / alpha))


@lru_cache(maxsize=256)
def _chain(exponent: float) -> tuple[int, tuple[int, ...]] | None:
    """exponent = n + Σ (-1/2)^j over the returned j (base -2 digits), or None if `pow` must do.

    r_j = |φ|^((-1/2)^j) is a chain of reciprocal square roots, the fastest root a CPU has.
    """
    n = math.floor(exponent)
    if n > _MAX_PRODUCTS:
        return None
    for halvings in range(_MAX_HALVINGS + 1):
        scaled = (exponent - n) * (-2) ** halvings
        if scaled == int(scaled):
            digits = _base_minus_two(int(scaled))
            return n, tuple(sorted(halvings - i for i in digits))
    return None


def _base_minus_two(number: int) -> list[int]:
    """The positions i of the ones in number = Σ (-2)^i."""
    positions, i = [], 0
    while number:
        number, digit = -(number // 2), number % 2
        if digit:
            positions.append(i)
        i += 1
    return positions


def abs_power(phi: Tensor, exponent: float, out: Tensor, scratch: Tensor) -> Tensor:
    """out = |φ|^exponent without fresh memory, exactly 0 where φ is 0; φ must hold no denormals (see `flush`).

    out and scratch have the shape of φ and alias neither it nor each other.
    """
    chain = _chain(exponent)
    if chain is None:
        return torch.abs(phi, out=out).pow_(exponent)
    n, digits = chain
    if not digits:
        return _integer_power(phi, n, out)
    _roots(phi, digits, out, scratch)
    return out if n == 0 else out.mul_(_integer_power(phi, n, scratch))


def _integer_power(phi: Tensor, n: int, out: Tensor) -> Tensor:
    """out = |φ|^n by repeated multiplication."""
    if n == 1:
        return torch.abs(phi, out=out)
    if n % 2:
        torch.pow(phi, 3, out=out).abs_()
    else:
        torch.mul(phi, phi, out=out)
    if n == 4:
        return out.mul_(out)
    for _ in range(n // 2 - 1):
        out.mul_(phi).mul_(phi)
    return out


def _roots(phi: Tensor, digits: tuple[int, ...], out: Tensor, root: Tensor) -> None:
    """out = Π_j |φ|^((-1/2)^j), the roots taken of |φ| clamped away from 0, where they would be infinite."""
    tiny = torch.finfo(phi.dtype).tiny
    torch.abs(phi, out=out)
    torch.clamp(out, min=tiny, out=root)
    first = digits[0]
    source = root
    for j in range(1, digits[-1] + 1):
        source = torch.rsqrt(source, out=out if j == first else root)
        if j != first and j in digits:
            out.mul_(root)
    if first > 0:
        # Without a factor |φ| itself the clamped roots leave a trace at φ = 0, which must stay absorbing.
        exponent = sum((-0.5) ** j for j in digits)
        torch.hardshrink(out, 1.001 * tiny**exponent, out=out)
