"""From a trained network to a smaller, faster one: sparse inference, files, ONNX."""

from powerprop.export.exported import Exported
from powerprop.export.files import Sizes
from powerprop.export.model import load, sparse
from powerprop.export.plan import Choice, Plan, choose
from powerprop.export.programs import onnx, program, smaller

__all__ = ["Choice", "Exported", "Plan", "Sizes", "choose", "load", "onnx", "program", "smaller", "sparse"]
