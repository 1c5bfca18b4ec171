"""Powerpropagation for PyTorch: networks that train sparse, stay accurate and never forget."""

from powerprop import export
from powerprop.allocate import at_most, half
from powerprop.continual import EfficientPackNet, PackNet
from powerprop.export.file import load, save
from powerprop.flops import Flops, count_flops, layer_densities
from powerprop.kernel import backend
from powerprop.masks import Masks
from powerprop.optim import Powerprop
from powerprop.recalibrate import recalibrate
from powerprop.reparam import fold, psi, psi_inverse, reparametrize, slope
from powerprop.sparse.compute import sparse_compute
from powerprop.sparse.linear import densify
from powerprop.sparsify import DSR, SET, SNFS, SNIP, IterativePruning, RigL, Static, TopKAST
from powerprop.sparsify.prune import magnitude_masks, prune, sparsity

__version__ = "0.2.0"

__all__ = [
    "DSR",
    "SET",
    "SNFS",
    "SNIP",
    "EfficientPackNet",
    "Flops",
    "IterativePruning",
    "Masks",
    "PackNet",
    "Powerprop",
    "RigL",
    "Static",
    "TopKAST",
    "at_most",
    "backend",
    "count_flops",
    "densify",
    "export",
    "fold",
    "half",
    "layer_densities",
    "load",
    "magnitude_masks",
    "prune",
    "psi",
    "psi_inverse",
    "recalibrate",
    "reparametrize",
    "save",
    "slope",
    "sparse_compute",
    "sparsity",
]
