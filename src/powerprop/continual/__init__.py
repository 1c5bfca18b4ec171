"""Continual learning: one network, task after task, nothing forgotten.

learner = EfficientPackNet(model, lambda params: torch.optim.SGD(params, lr=0.5), alpha=1.375, gamma=0.99)
learner.learn(task)                  # again and again
learner.predict(x, task=3)           # the task is known
learner.predict(x)                   # the task is inferred
"""

from powerprop.continual.boundaries.changepoint import ChangePointDetector
from powerprop.continual.boundaries.finder import BoundaryFinder
from powerprop.continual.loop import learn_stream
from powerprop.continual.metrics import Accuracies, accuracy_on
from powerprop.continual.packing.infer import METHODS, entropy_gradient, infer
from powerprop.continual.packing.packnet import EfficientPackNet, PackNet
from powerprop.continual.packing.search import GRID
from powerprop.continual.packing.subnets import Subnetworks
from powerprop.continual.packing.taskmasks import TaskMasks
from powerprop.continual.strategy import Stateful, Strategy
from powerprop.continual.task import SCENARIOS, Prediction, Scenario, Task, make_task

__all__ = [
    "GRID",
    "METHODS",
    "SCENARIOS",
    "Accuracies",
    "BoundaryFinder",
    "ChangePointDetector",
    "EfficientPackNet",
    "PackNet",
    "Prediction",
    "Scenario",
    "Stateful",
    "Strategy",
    "Subnetworks",
    "Task",
    "TaskMasks",
    "accuracy_on",
    "entropy_gradient",
    "infer",
    "learn_stream",
    "make_task",
]
