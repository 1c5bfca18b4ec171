"""The settings of continual reinforcement learning, and its presets."""

from __future__ import annotations

from dataclasses import dataclass, fields

from powerprop.experiments.harness.checks import check_alphas, check_positive, check_settings, require
from powerprop.rl.envs import CONTINUAL_WORLD, OBSERVATIONS, REWARDS
from powerprop.rl.sac import Settings

METHODS = (
    "fine-tuning", "a-gem", "ewc", "mas", "perfect-memory", "vcl", "packnet", "efficient-packnet",
)  # fmt: skip
CRITICS = ("reset", "protected")
LEAST = {
    "steps": 1, "width": 1, "layers": 1, "batch": 1, "train_every": 1, "replay": 1, "examples": 1, "episodes": 1,
    "evaluate_every": 1, "checkpoint_every": 1, "memory": 1, "ewc": 0, "mas": 0, "clip": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """The settings of the experiment.

    Args:
        tasks: Meta-World's names of the tasks, in the order of training.
        methods: the rows of the table.
        alphas: powers of Powerpropagation for EfficientPackNet, a row for each; 1 is without.
        seeds: runs of each row.
        steps: of the environment per task.
        retrain_steps: updates after pruning, from the replay alone.
        random_steps: steps at the beginning of a task whose actions are drawn uniformly.
        evaluate_every: steps between evaluations of all tasks so far.
        episodes: of each task in such an evaluation.
        final_episodes: of each task where the numbers of the table are measured.
        kept: fraction of all weights that a task of EfficientPackNet keeps.
        ewc: strength of EWC.
        mas: strength of MAS.
        memory: transitions of each task that A-GEM keeps.
        observation: "full" (39 numbers) or "short" (12, where things are).
        reward: version of Meta-World's rewards, "v1" or "v2".
        critic: "reset" on task change, as in the paper, or "protected" by the method itself.
        width: units of a hidden layer.
        layers: hidden layers.
        batch: transitions per update.
        discount: of later rewards.
        lr: learning rate of Adam.
        clip: the largest norm of a gradient; 0 is any.
        target_std: of actions before squashing, which the temperature aims at.
        polyak: the share of themselves that target networks keep in each update.
        replay: transitions that are kept of the task in hand.
        start: steps of a task before the first update.
        train_every: steps between trainings.
        updates: of a training.
        examples: transitions that EWC and MAS look at when a task ends.
        clips: so many seeds of each row have a clip of every task; 0 draws none.
        checkpoint_every: steps between checkpoints inside of a task.
    """

    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    alphas: tuple[float, ...]
    seeds: int
    steps: int
    retrain_steps: int
    random_steps: int
    evaluate_every: int
    episodes: int
    final_episodes: int
    kept: float = 0.1
    ewc: float = 2e4
    mas: float = 2e4
    memory: int = 10_000
    observation: str = "full"
    reward: str = "v2"
    critic: str = "reset"
    width: int = Settings.width
    layers: int = Settings.layers
    batch: int = Settings.batch
    discount: float = Settings.discount
    lr: float = Settings.lr
    clip: float = Settings.clip
    target_std: float = Settings.target_std
    polyak: float = Settings.polyak
    replay: int = Settings.replay
    start: int = Settings.start
    train_every: int = Settings.train_every
    updates: int = Settings.updates
    examples: int = Settings.examples
    clips: int = 1
    checkpoint_every: int = 50_000

    def __post_init__(self) -> None:
        choices = {"methods": METHODS, "observation": tuple(OBSERVATIONS), "reward": REWARDS, "critic": CRITICS}
        check_settings(self, LEAST, choices)
        check_alphas(self.alphas)
        check_positive(self, "lr", "target_std", "final_episodes")
        require(bool(self.tasks), "tasks must be some, got none")
        require(len(set(self.methods)) == len(self.methods) > 0, f"methods must be some, each once, got {self.methods}")
        require(0 < self.kept <= 1, f"kept must be in (0, 1], got {self.kept}")
        for name in ("discount", "polyak"):
            require(0 <= getattr(self, name) < 1, f"{name} must be in [0, 1), got {getattr(self, name)}")
        require(self.start >= 1, f"start must be at least 1, the first step, got {self.start}")

    def settings(self) -> Settings:
        """Those of soft actor-critic."""
        return Settings(**{each.name: getattr(self, each.name) for each in fields(Settings)})


PRESETS = {
    "smoke": Config(
        tasks=("faucet-close", "handle-press-side"), methods=("fine-tuning", "efficient-packnet"), alphas=(1.5,),
        seeds=1, steps=210, retrain_steps=5, random_steps=50, evaluate_every=105, episodes=1, final_episodes=1,
        start=50, updates=2, width=32, examples=64,
    ),
    "cpu": Config(
        tasks=("faucet-close", "handle-press-side"), methods=("fine-tuning", "efficient-packnet"), alphas=(1.5,),
        seeds=2, steps=30_000, retrain_steps=3_000, random_steps=1_000, evaluate_every=2_500, episodes=5,
        final_episodes=50, checkpoint_every=5_000,
    ),
    "paper": Config(
        tasks=CONTINUAL_WORLD, methods=METHODS, alphas=(1.375, 1.5), seeds=20, steps=1_000_000, retrain_steps=100_000,
        random_steps=10_000, evaluate_every=20_000, episodes=10, final_episodes=100, observation="short", reward="v1",
    ),
}  # fmt: skip
