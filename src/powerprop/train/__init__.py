"""Training: the loop, evaluation, checkpoints, metrics, and many runs side by side."""

from powerprop.train.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from powerprop.train.evaluate import Score, evaluate
from powerprop.train.fit import BatchSource, NonFiniteError, fit
from powerprop.train.log import MetricsLog, read_metrics

__all__ = [
    "BatchSource",
    "CheckpointError",
    "MetricsLog",
    "NonFiniteError",
    "Score",
    "evaluate",
    "fit",
    "load_checkpoint",
    "read_metrics",
    "save_checkpoint",
]
