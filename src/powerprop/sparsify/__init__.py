"""Sparse training: the methods that `Powerprop(..., sparsify=...)` takes."""

from powerprop.sparsify.at_init import SNIP, Static
from powerprop.sparsify.base import Method
from powerprop.sparsify.dsr import DSR
from powerprop.sparsify.dynamic import SET, SNFS, RigL
from powerprop.sparsify.iterative import IterativePruning
from powerprop.sparsify.topkast import TopKAST

__all__ = ["DSR", "SET", "SNFS", "SNIP", "IterativePruning", "Method", "RigL", "Static", "TopKAST"]
