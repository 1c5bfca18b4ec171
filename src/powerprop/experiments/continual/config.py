"""The settings of a continual-learning experiment."""

from __future__ import annotations

from dataclasses import dataclass

from powerprop.continual import GRID
from powerprop.experiments.continual.checks import check_config


@dataclass(frozen=True)
class Config:
    """The settings of a continual-learning experiment.

    Args:
        data: name of the data set.
        stream: "permuted" (the pixels of every task in an order of its own), "rotated" (the images at an angle of its
            own) or "split" (some classes per task).
        model: "mlp" (two hidden layers, one output layer for all tasks) or "alexnet" (one output layer per task).
        tasks: how many; a split stream has the classes of the data in equal parts.
        alphas: powers; 1 is the method without Powerpropagation.
        lr: learning rate at α = 1.
        seeds: runs of each arm: first weights, order of pixels, batches.
        steps: of training per task.
        retrain_steps: after pruning.
        gamma: fraction of the dense validation accuracy that a sub-network must keep.
        methods: "efficient-packnet" (the paper's: all weights take part, pruned at once), "frugal-packnet" (the same
            learner, pruned gradually, with the weights of earlier tasks that `reuse` says, and masks over frozen
            weights when a layer is full), "packnet".
        frugal_gamma: the gamma of "frugal-packnet".
        prunings: how often "frugal-packnet" prunes further inside the retraining steps; 0 prunes at once.
        pruning_steps: between two of these prunings.
        reuse: the weights of earlier tasks that take part while "frugal-packnet" trains a new one: "all" or those of
            the "output" layer.
        share: the largest fraction of a layer's weights that a task of "frugal-packnet" may take for itself.
        scale_lr: let the learning rate grow with α so that a weight of size `magnitude` learns equally fast:
            lr·α²|w|^(2-2/α) is the same for all α. Otherwise all have the same.
        magnitude: a typical weight.
        momentum: of SGD.
        decay: let the learning rate fall to zero along these phases: "training", "retraining".
        spread: the standard deviation of the first weights, and of those that are initialised again, in units of
            Glorot's. Small ones leave the largest weights to those that have learned something.
        clip: the largest norm of a gradient, as `Strategy` takes it; 0 is any.
        shift: training images of alexnet are moved by up to so many pixels, and half of them mirrored; 0 leaves them as
            they are.
        batch: images per step.
        width: units of a hidden layer of the mlp.
        precision: "float32" or "bfloat16". Of the mlp: of the factors in products of matrices, all else is float32; of
            alexnet: of the passes of training, networks are measured and pruned in float32.
        candidates: settings to choose from, each such as "lr=0.1 gamma=0.98 clip=1", for every method and power by
            itself: the best on validation images of the first tasks among those that leave room for all.
        tuning_tasks: so many tasks decide.
        search: how the sparsity of a task is found: "linear", "binary" or "taylor".
        grid: kept fractions to choose from; "frugal-packnet" goes on below the last, down to 0.05%.
        distribution: "global" ranks all weights together, "uniform" keeps the same fraction of each layer.
        images: only the last so many training images of the data are used; 0 means all.
        validation: the last so many training images of the data decide the sparsity.
        test: the first so many test images of a task are measured; 0 means all.
        matrix: measure all tasks after each one, and the whole test set with inferred tasks at the end.
        groups: sizes of the groups of images whose task is inferred together.
        infer_at: numbers of tasks after which inference is probed, besides the last.
        probed: so many tasks, evenly spaced, are probed.
        probe: test images of each.
    """

    data: str
    stream: str
    tasks: int
    alphas: tuple[float, ...]
    lr: float
    seeds: int
    steps: int
    retrain_steps: int
    gamma: float
    model: str = "mlp"
    methods: tuple[str, ...] = ("efficient-packnet",)
    frugal_gamma: float = 0.96
    prunings: int = 3
    pruning_steps: int = 100
    reuse: str = "output"
    share: float = 1.0
    scale_lr: bool = True
    magnitude: float = 0.03
    momentum: float = 0.0
    decay: tuple[str, ...] = ()
    spread: float = 1.0
    clip: float = 0.0
    shift: int = 0
    batch: int = 64
    width: int = 1000
    precision: str = "float32"
    candidates: tuple[str, ...] = ()
    tuning_tasks: int = 2
    search: str = "linear"
    grid: tuple[float, ...] = GRID
    distribution: str = "global"
    images: int = 0
    validation: int = 5000
    test: int = 0
    matrix: bool = True
    groups: tuple[int, ...] = (1, 4, 16, 64, 128)
    infer_at: tuple[int, ...] = ()
    probed: int = 10
    probe: int = 512

    def __post_init__(self) -> None:
        check_config(self)
