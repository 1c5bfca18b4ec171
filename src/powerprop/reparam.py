"""The textbook form: φ is the parameter, and gradients go through Ψ by the chain rule (paper, equation 1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from powerprop.power import check_alpha, psi, psi_inverse
from powerprop.select import Where, select

__all__ = ["Power", "fold", "reparametrize"]


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
    """Bake plain weights back: every Ψ(φ) becomes an ordinary parameter of the same name."""
    for module in list(model.modules()):
        if not parametrize.is_parametrized(module):
            continue
        for attribute, chain in list(module.parametrizations.items()):  # type: ignore[operator,union-attr]
            if any(isinstance(p, Power) for p in chain):
                parametrize.remove_parametrizations(module, attribute)
    return model
