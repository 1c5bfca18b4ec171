"""The settings of an ImageNet run, and its presets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from powerprop.experiments.harness.checks import check_positive, check_settings, require
from powerprop.experiments.imagenet.cells import EXTREME, MODELS, ONESHOT_ALPHAS, TABLE_1, TABLE_2, Cell, chosen
from powerprop.train.precision import PRECISIONS

LEAST = {
    "classes": 2, "crop": 1, "resize": 1, "steps": 1, "batch": 1, "points": 2, "recalibrate": 1, "evaluations": 1,
    "every": 1, "weight_decay": 0, "warmup": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """The settings of an ImageNet run.

    Args:
        data: name of the picture set's folder, with train and val in it.
        cells: the trainings, such as "dense" or "rigl erk 0.9 x5" (see `cells.py`).
        alphas: powers of the one-shot figure; its baseline is "dense".
        seeds: runs of each.
        model: "resnet50" or "resnet18".
        width: channels of the first stage, a multiple of 8 (channels-last convolutions of 4 channels crash on a CPU).
        classes: of the data.
        crop: side of the square that the network sees.
        resize: shorter side of the picture before the middle is cropped in evaluation.
        steps: of a cycle of training.
        batch: pictures per step, over all ranks.
        momentum: of SGD (Nesterov).
        weight_decay: of the weights of layers.
        smoothing: of the labels.
        warmup: epochs in which the learning rate rises linearly to its full value.
        drops: epochs after which the learning rate falls to a tenth.
        precision: "float32", "bfloat16" or "float16".
        loaders: worker processes of each rank that decode pictures; with them jobs run in turn, not side by side.
        points: size of the grid of fractions kept after one-shot pruning, evenly spaced on a log scale up to 1.
        least: the smallest fraction kept.
        recalibrate: training batches that batch norms are measured on after one-shot pruning.
        evaluations: how often accuracy is measured in a training.
        every: steps between checkpoints.
        only: patterns of the trainings to run instead of all, where * stands for anything: "rigl * 0.9".
    """

    data: str
    cells: tuple[str, ...]
    alphas: tuple[float, ...]
    seeds: int
    model: str = "resnet50"
    width: int = 64
    classes: int = 1000
    crop: int = 224
    resize: int = 256
    steps: int = 32_000
    batch: int = 4_096
    momentum: float = 0.9
    weight_decay: float = 1e-4
    smoothing: float = 0.1
    warmup: float = 5.0
    drops: tuple[float, ...] = (30.0, 70.0, 90.0)
    precision: str = "bfloat16"
    loaders: int = 8
    points: int = 16
    least: float = 0.03
    recalibrate: int = 10
    evaluations: int = 20
    every: int = 1_000
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_settings(self, LEAST, {"model": tuple(MODELS), "precision": tuple(PRECISIONS)})
        check_positive(self, "momentum")
        require(self.width >= 8 and self.width % 8 == 0, f"width must be a multiple of 8, got {self.width}")
        require(self.crop <= self.resize, f"crop must be at most {self.resize}, the resize, got {self.crop}")
        require(0 < self.least < 1, f"least must be between 0 and 1, got {self.least}")
        require(0 <= self.smoothing < 1, f"smoothing must be in [0, 1), got {self.smoothing}")
        for alpha in self.alphas:
            require(alpha > 1, f"alpha must be above 1 (the baseline is 'dense'), got {alpha:g}")
        if not cells_of(self):
            names = ", ".join(each.name for each in chosen(self.cells, self.alphas, ()))
            raise ValueError(f"only={self.only} matches none of the trainings: {names}")


def cells_of(config: Config) -> list[Cell]:
    """The trainings that are asked for."""
    return chosen(config.cells, config.alphas, config.only)


TINY = Config(
    data="tiny-imagenet-10", cells=(), alphas=(1.375,), seeds=1, model="resnet18", width=16, classes=10, crop=64,
    resize=64, batch=64, precision="float32", loaders=0, recalibrate=4, evaluations=8, every=100,
)  # fmt: skip

PRESETS = {
    "smoke": replace(
        TINY, cells=("dense", "rigl uniform 0.9", "pp-iterative uniform 0.9", "pp-topkast-0 erk 0.9 x2"), width=8,
        crop=32, resize=32, steps=6, batch=8, points=3, recalibrate=1, evaluations=2, every=2,
    ),
    "cpu": replace(
        TINY,
        cells=(
            "dense", "rigl uniform 0.9", "iterative uniform 0.9", "pp-iterative uniform 0.9", "topkast-0 uniform 0.9",
            "pp-topkast-0 uniform 0.9",
        ),
        steps=600, points=12,
    ),
    "paper": Config(
        data="imagenet", cells=(*TABLE_1, *TABLE_2, *EXTREME), alphas=ONESHOT_ALPHAS, seeds=3,
    ),
}  # fmt: skip
