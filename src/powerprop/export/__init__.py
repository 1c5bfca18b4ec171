"""From a trained network to a smaller, faster one: sparse inference, files, ONNX."""

from powerprop.export.exported import Choice, Exported, Plan
from powerprop.export.file import Sizes
from powerprop.export.file import load_sparse as load
from powerprop.export.measure import choose, sparse
from powerprop.export.programs import onnx, program, smaller

__all__ = ["Choice", "Exported", "Plan", "Sizes", "choose", "load", "onnx", "program", "smaller", "sparse"]
