"""Training: the loop, evaluation, checkpoints, metrics, and many runs side by side."""

from powerprop.training import NonFiniteError
from powerprop_paper.train.distributed import BatchSource, local_device
from powerprop_paper.train.fit import CheckpointError, fit, load_checkpoint, save_checkpoint, triangle
from powerprop_paper.train.log import MetricsLog, StepCount, TaskLog, read_metrics
from powerprop_paper.train.precision import Precision, Score, accuracy_in, evaluate, matmul_precision, precision_note

__all__ = [
    "BatchSource", "CheckpointError", "MetricsLog", "NonFiniteError", "Precision", "Score", "StepCount", "TaskLog",
    "accuracy_in", "evaluate", "fit", "load_checkpoint", "local_device", "matmul_precision",
    "precision_note", "read_metrics", "save_checkpoint", "triangle",
]  # fmt: skip
