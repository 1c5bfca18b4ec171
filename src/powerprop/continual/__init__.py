"""Continual learning: one network, task after task, nothing forgotten.

learner = EfficientPackNet(model, lambda params: torch.optim.SGD(params, lr=0.5), alpha=1.375, gamma=0.99)
learner.learn(task)                  # again and again; or begin, step and end in a loop of your own
learner.predict(x, task=3)           # the task is known
learner.predict(x)                   # the task is inferred
"""

from powerprop.continual.boundaries.changepoint import ChangePointDetector
from powerprop.continual.boundaries.finder import BoundaryFinder
from powerprop.continual.combine import combine
from powerprop.continual.der import DER, DERpp
from powerprop.continual.distill import LwF
from powerprop.continual.fisher import diagonal_fisher
from powerprop.continual.gem import AGEM, GEM
from powerprop.continual.generative import DGR, RtF
from powerprop.continual.hat import HAT
from powerprop.continual.icarl import ICaRL
from powerprop.continual.likelihood import log_likelihood
from powerprop.continual.loop import learn_stream
from powerprop.continual.memory import Memory
from powerprop.continual.metrics import Accuracies, accuracy_on
from powerprop.continual.now import Rehearsal, Stateful
from powerprop.continual.objective import Classification, Elbo, MultiLabel, Objective, OneVsRest, Regression
from powerprop.continual.packing.base import Packing
from powerprop.continual.packing.efficient import EfficientPackNet
from powerprop.continual.packing.infer import INFERENCES, entropy_gradient, infer
from powerprop.continual.packing.packnet import PackNet
from powerprop.continual.packing.search import GRID, sparsest
from powerprop.continual.packing.subnets import Subnetworks
from powerprop.continual.packing.taskmasks import TaskMasks
from powerprop.continual.project import GPM, OWM
from powerprop.continual.registry import STRATEGIES, load_learner
from powerprop.continual.regularise import EWC, MAS, SI, Laplace
from powerprop.continual.replay import ER, JointTraining, PerfectMemory
from powerprop.continual.source import Source
from powerprop.continual.strategy import Naive, Strategy
from powerprop.continual.supsup import SupSup
from powerprop.continual.task import SCENARIOS, Prediction, Scenario, Task, make_task
from powerprop.continual.vcl import VCL

__all__ = [
    "AGEM",
    "DER",
    "DGR",
    "ER",
    "EWC",
    "GEM",
    "GPM",
    "GRID",
    "HAT",
    "INFERENCES",
    "MAS",
    "OWM",
    "SCENARIOS",
    "SI",
    "STRATEGIES",
    "VCL",
    "Accuracies",
    "BoundaryFinder",
    "ChangePointDetector",
    "Classification",
    "DERpp",
    "EfficientPackNet",
    "Elbo",
    "ICaRL",
    "JointTraining",
    "Laplace",
    "LwF",
    "Memory",
    "MultiLabel",
    "Naive",
    "Objective",
    "OneVsRest",
    "PackNet",
    "Packing",
    "PerfectMemory",
    "Prediction",
    "Regression",
    "Rehearsal",
    "RtF",
    "Scenario",
    "Source",
    "Stateful",
    "Strategy",
    "Subnetworks",
    "SupSup",
    "Task",
    "TaskMasks",
    "accuracy_on",
    "combine",
    "diagonal_fisher",
    "entropy_gradient",
    "infer",
    "learn_stream",
    "load_learner",
    "log_likelihood",
    "make_task",
    "sparsest",
]
