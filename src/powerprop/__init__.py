"""Powerpropagation for PyTorch: networks that train sparse, stay accurate and never forget."""

from powerprop.allocate import at_most, half
from powerprop.masks import Masks
from powerprop.optim import Powerprop
from powerprop.power import psi, psi_inverse, slope
from powerprop.reparam import fold, reparametrize
from powerprop.sparsify.prune import magnitude_masks, prune, sparsity

__version__ = "0.1.0"

__all__ = [
    "Masks",
    "Powerprop",
    "at_most",
    "fold",
    "half",
    "magnitude_masks",
    "prune",
    "psi",
    "psi_inverse",
    "reparametrize",
    "slope",
    "sparsity",
]
