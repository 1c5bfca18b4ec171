"""Data sets held whole in memory, batches and task streams made from them."""

from powerprop.data.batches import Batches, crop_and_flip
from powerprop.data.images import Images, Part, Splits, mean_std, normalise, to_float
from powerprop.data.load import load
from powerprop.data.locate import DataCorrupt, DataNotFound
from powerprop.data.rotated import rotated
from powerprop.data.streams import Stream, Task, permuted, split

__all__ = [
    "Batches",
    "DataCorrupt",
    "DataNotFound",
    "Images",
    "Part",
    "Splits",
    "Stream",
    "Task",
    "crop_and_flip",
    "load",
    "mean_std",
    "normalise",
    "permuted",
    "rotated",
    "split",
    "to_float",
]
