"""The rows of the table: which strategy protects the actor, which the critics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from powerprop.continual import AGEM, EWC, MAS, VCL, EfficientPackNet, Naive, PackNet, PerfectMemory, Strategy
from powerprop.experiments.harness.experiment import Job
from powerprop.experiments.rl.config import Config
from powerprop.rl import SAC
from powerprop.rl.envs import ACTIONS, OBSERVATIONS

LABELS = {
    "fine-tuning": "fine-tuning", "a-gem": "A-GEM", "ewc": "EWC", "mas": "MAS", "perfect-memory": "perfect memory",
    "vcl": "VCL", "packnet": "PackNet", "efficient-packnet": "EfficientPackNet",
}  # fmt: skip
PUBLISHED: dict[tuple[str, float], tuple[str, str]] = {
    ("fine-tuning", 1.0): ("0.00 [0.00, 0.00]", "0.87 [0.84, 0.89]"),
    ("a-gem", 1.0): ("0.02 [0.01, 0.04]", "0.89 [0.86, 0.91]"),
    ("ewc", 1.0): ("0.66 [0.61, 0.71]", "0.07 [0.04, 0.11]"),
    ("mas", 1.0): ("0.61 [0.56, 0.66]", "-0.01 [-0.04, 0.01]"),
    ("perfect-memory", 1.0): ("0.36 [0.32, 0.40]", "0.07 [0.05, 0.10]"),
    ("vcl", 1.0): ("0.52 [0.47, 0.57]", "-0.01 [-0.03, 0.01]"),
    ("packnet", 1.0): ("0.80 [0.76, 0.84]", "0.02 [0.04, 0.00]"),
    ("efficient-packnet", 1.375): ("0.82 [0.77, 0.87]", "0.01 [0.03, 0.01]"),
    ("efficient-packnet", 1.5): ("0.86 [0.82, 0.90]", "0.00 [-0.02, 0.02]"),
}
"""Average success and forgetting in the paper's table 4: six tasks of a million steps."""


@dataclass(frozen=True)
class Arm:
    """A row: a method, with or without Powerpropagation."""

    method: str
    alpha: float

    @property
    def label(self) -> str:
        """What the reader sees."""
        shown = LABELS[self.method]
        return shown if self.alpha == 1 else f"Powerprop + {shown} (α = {self.alpha:g})"

    def job(self, seed: int) -> Job:
        """One run."""
        key = self.method if self.alpha == 1 else f"{self.method}-alpha{self.alpha:g}"
        return Job(f"{key}-seed{seed}", {"method": self.method, "alpha": self.alpha, "seed": seed})


def arms(config: Config) -> list[Arm]:
    """All rows; EfficientPackNet has one for each power."""
    powers = {method: config.alphas if method == "efficient-packnet" else (1.0,) for method in config.methods}
    return [Arm(method, alpha) for method, own in powers.items() for alpha in own]


def make_agent(config: Config, arm: Arm, seed: int, device: torch.device) -> SAC:
    """An agent protected as a row asks. Perfect memory keeps the transitions of all tasks, for its critics too."""
    protection = strategy(config, arm)
    both = config.critic == "protected" or arm.method == "perfect-memory"
    return SAC(
        len(OBSERVATIONS[config.observation]), ACTIONS, config.settings(), actor=protection,
        critic=protection if both else Naive, reset_critic=config.critic == "reset", seed=seed, device=device,
    )  # fmt: skip


def strategy(config: Config, arm: Arm) -> Callable[..., Strategy]:
    """What makes the learner of a row. The strengths are Continual World's, whose penalty has no factor of a half."""
    tasks = len(config.tasks)
    made: dict[str, Callable[..., Strategy]] = {
        "fine-tuning": Naive,
        "a-gem": partial(AGEM, memory=tasks * config.memory),
        "ewc": partial(EWC, strength=config.ewc),
        "mas": partial(MAS, strength=config.mas),
        "perfect-memory": PerfectMemory,
        "vcl": partial(VCL, examples=config.steps, samples=1),
        "packnet": partial(PackNet, total_tasks=tasks),
        "efficient-packnet": partial(EfficientPackNet, alpha=arm.alpha, gamma=None, grid=(config.kept,)),
    }
    return made[arm.method]
