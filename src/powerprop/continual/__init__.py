"""Continual learning: one network, task after task, nothing forgotten.

learner = EfficientPackNet(model, lambda params: torch.optim.SGD(params, lr=0.5), alpha=1.375, gamma=0.99)
learner.learn(task)                  # again and again; or begin, step and end in a loop of your own
learner.predict(x, task=3)           # the task is known
learner.predict(x)                   # the task is inferred
"""

from powerprop.continual.boundaries import BoundaryFinder, ChangePointDetector
from powerprop.continual.combine import combine
from powerprop.continual.data import Source
from powerprop.continual.evaluate import Accuracies, accuracy_on, learn_stream
from powerprop.continual.gem import AGEM, GEM
from powerprop.continual.generative_replay import DGR, RtF
from powerprop.continual.gradient_projection import GPM, OWM
from powerprop.continual.hat import HAT
from powerprop.continual.icarl import ICaRL
from powerprop.continual.importance import diagonal_fisher
from powerprop.continual.loading import load_learner
from powerprop.continual.lwf import LwF
from powerprop.continual.memory import Memory
from powerprop.continual.objective import Classification, Elbo, MultiLabel, Objective, OneVsRest, Regression
from powerprop.continual.packing.efficient import GRID, EfficientPackNet, sparsest
from powerprop.continual.packing.packnet import Packing, PackNet
from powerprop.continual.packing.subnetworks import Subnetworks
from powerprop.continual.packing.supermasks import SupSup
from powerprop.continual.packing.task_inference import INFERENCES, entropy_gradient, infer
from powerprop.continual.packing.task_masks import TaskMasks
from powerprop.continual.regularization import EWC, MAS, SI, Laplace
from powerprop.continual.replay import DER, ER, DERpp, JointTraining, PerfectMemory
from powerprop.continual.strategy import KINDS, Naive, Rehearsal, Stateful, Strategy
from powerprop.continual.task import SCENARIOS, Prediction, Scenario, Task, make_task
from powerprop.continual.vcl import VCL

__all__ = [
    "AGEM", "DER", "DGR", "ER", "EWC", "GEM", "GPM", "GRID", "HAT", "INFERENCES", "MAS", "OWM", "SCENARIOS", "SI",
    "STRATEGIES", "VCL", "Accuracies", "BoundaryFinder", "ChangePointDetector", "Classification", "DERpp",
    "EfficientPackNet", "Elbo", "ICaRL", "JointTraining", "Laplace", "LwF", "Memory", "MultiLabel", "Naive",
    "Objective", "OneVsRest", "PackNet", "Packing", "PerfectMemory", "Prediction", "Regression", "Rehearsal", "RtF",
    "Scenario", "Source", "Stateful", "Strategy", "Subnetworks", "SupSup", "Task", "TaskMasks", "accuracy_on",
    "combine", "diagonal_fisher", "entropy_gradient", "infer", "learn_stream", "load_learner", "make_task",
    "sparsest",
]  # fmt: skip

STRATEGIES = {name: KINDS[name] for name in sorted(__all__, key=str.casefold) if name in KINDS}
"""All methods by name: those that are exported here."""
