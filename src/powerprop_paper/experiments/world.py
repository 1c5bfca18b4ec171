"""Continual World: a robot arm learns one task after the other with the same network (paper, table 4).

Every task is learned by soft actor-critic, then pruned and retrained where the method does so. Success is measured on
the way, at the end of each task's training before pruning, after it, and on all tasks at the very end.

One file has all that a run goes on from after a kill, at the boundary of two tasks and inside of one: the learners,
replay, target networks and temperature, every generator, and the simulated arm in the middle of its episode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from powerprop.continual import AGEM, EWC, MAS, VCL, EfficientPackNet, Naive, PackNet, PerfectMemory, Strategy
from powerprop.continual.data import derived_seed
from powerprop.continual.packing.packnet import Packing
from powerprop_paper import rl
from powerprop_paper.experiments import Columns, lost_runs, table
from powerprop_paper.pages import Column, Figure, Headline, Page, Percent, Section, Stat, Table
from powerprop_paper.report import Curve, Image, lines
from powerprop_paper.rl import SAC, Paused, interact, success_rate
from powerprop_paper.rl.envs import (
    ACTIONS,
    CONTINUAL_WORLD,
    OBSERVATIONS,
    MetaWorld,
    MissingMetaWorldError,
    RenderingError,
    clip,
    task_name,
    write_gif,
)
from powerprop_paper.rl.loop import agent_state, load_agent
from powerprop_paper.run import Experiment, Progress, Rows, Run, RunError
from powerprop_paper.settings import Count, EachOnce, Natural, Powers, Seeds, Settings, require
from powerprop_paper.train import CheckpointError, MetricsLog, load_checkpoint, local_device, save_checkpoint

MethodName = Literal[
    "fine-tuning", "a-gem", "ewc", "mas", "perfect-memory", "vcl", "packnet", "efficient-packnet"
]  # fmt: skip
METHODS: tuple[MethodName, ...] = get_args(MethodName)
SHOWN_AS: dict[str, tuple[str, str]] = {
    "fine-tuning": ("fine-tuning", "Naive"), "a-gem": ("A-GEM", "AGEM"), "ewc": ("EWC", "EWC"), "mas": ("MAS", "MAS"),
    "perfect-memory": ("perfect memory", "PerfectMemory"), "vcl": ("VCL", "VCL"), "packnet": ("PackNet", "PackNet"),
    "efficient-packnet": ("EfficientPackNet", "EfficientPackNet"),
}  # fmt: skip
"""The labels of methods, and the strategies by whose names curves have their colours."""
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

KEPT = 0.1
"""The fraction of all weights that a task of EfficientPackNet keeps."""
STRENGTH = 2e4
"""Of EWC and MAS: Continual World's, whose penalty has no factor of a half."""
MEMORY = 10_000
"""Transitions of each task that A-GEM keeps."""
CLIPS = 1
"""So many seeds of each row have a clip of every task."""
PROBED = 256
"""Observations of every task at which actions are compared between the end of their task and the very end."""
ENVIRONMENT, ON_THE_WAY, TABLE, CLIP = range(100, 104)
"""Purposes of random numbers, beside those of the agent itself."""
LEVEL, RESAMPLES = 0.9, 10_000
"""Of bootstrap intervals."""


@dataclass(frozen=True)
class Config(Settings):
    """The settings of continual reinforcement learning; what is not among them is that of `rl.Settings`."""

    tasks: tuple[str, ...]
    """Meta-World's names of the tasks, in the order of training"""
    methods: Annotated[tuple[MethodName, ...], EachOnce()]
    """rows of the table"""
    alphas: Powers
    """powers of Powerpropagation for EfficientPackNet, a row for each; 1 is without"""
    seeds: Seeds
    """runs of each row"""
    steps: Count
    """of the environment per task"""
    evaluate_every: Count
    """steps between evaluations of all tasks so far"""
    episodes: Count
    """of each task in such an evaluation"""
    final_episodes: Count
    """of each task where the numbers of the table are measured"""
    observation: Literal["full", "short"] = "full"
    """39 numbers, or 12: where things are"""
    reward: Literal["v1", "v2"] = "v2"
    """version of Meta-World's rewards"""
    width: Count = rl.Settings.width
    """units of a hidden layer"""
    start: Count = rl.Settings.start
    """steps of a task before the first update"""
    updates: Count = rl.Settings.updates
    """of a training"""
    retrain_steps: Natural = rl.Settings.retrain_steps
    """updates after pruning, from the replay alone"""
    random_steps: Natural = rl.Settings.random_steps
    """steps at the beginning of a task whose actions are drawn uniformly"""
    examples: Count = rl.Settings.examples
    """transitions that EWC and MAS look at when a task ends"""
    checkpoint_every: Count = 50_000
    """steps between checkpoints inside of a task"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tasks, "tasks must be some, got none")

    @property
    def sac(self) -> rl.Settings:
        """Those of soft actor-critic."""
        return rl.Settings(
            width=self.width, start=self.start, updates=self.updates, examples=self.examples,
            random_steps=self.random_steps, retrain_steps=self.retrain_steps,
        )  # fmt: skip


TWO_TASKS: Any = {"tasks": ("faucet-close", "handle-press-side"), "methods": ("fine-tuning", "efficient-packnet")}
PRESETS = {
    "smoke": Config(
        **TWO_TASKS, alphas=(1.5,), seeds=1, steps=210, retrain_steps=5, random_steps=50, evaluate_every=105,
        episodes=1, final_episodes=1, start=50, updates=2, width=32, examples=64, checkpoint_every=60,
    ),
    "cpu": Config(
        **TWO_TASKS, alphas=(1.5,), seeds=2, steps=30_000, retrain_steps=3_000, random_steps=1_000,
        evaluate_every=2_500, episodes=5, final_episodes=50, checkpoint_every=5_000,
    ),
    "paper": Config(
        tasks=CONTINUAL_WORLD, methods=METHODS, alphas=(1.375, 1.5), seeds=20, steps=1_000_000, evaluate_every=20_000,
        episodes=10, final_episodes=100, observation="short", reward="v1",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Method:
    """A row: a method, with or without Powerpropagation."""

    name: str
    alpha: float = 1.0

    @property
    def label(self) -> str:
        """What the reader sees."""
        shown, _ = SHOWN_AS[self.name]
        return shown if self.alpha == 1 else f"Powerprop + {shown} (α = {self.alpha:g})"

    @property
    def published(self) -> tuple[str | None, str | None]:
        """Average success and forgetting in the paper."""
        return PUBLISHED.get((self.name, self.alpha), (None, None))

    @property
    def settings(self) -> dict[str, Any]:
        """Of its jobs, without the seed."""
        return {"method": self.name, "alpha": self.alpha}


def make_agent(cfg: Config, method: str, alpha: float, seed: int, device: torch.device | str) -> SAC:
    """An agent protected as a row asks. Critics begin anew with every task and need no protection; but perfect memory
    keeps the transitions of all tasks for them too."""
    protection = strategy(cfg, method, alpha)
    critic = protection if method == "perfect-memory" else Naive
    return SAC(len(OBSERVATIONS[cfg.observation]), ACTIONS, cfg.sac, actor=protection, critic=critic, seed=seed,
               device=device)  # fmt: skip


def strategy(cfg: Config, method: str, alpha: float) -> Callable[..., Strategy]:
    """What makes the learner of a row."""
    made: dict[str, Callable[..., Strategy]] = {
        "fine-tuning": Naive,
        "a-gem": partial(AGEM, memory=len(cfg.tasks) * MEMORY),
        "ewc": partial(EWC, strength=STRENGTH),
        "mas": partial(MAS, strength=STRENGTH),
        "perfect-memory": PerfectMemory,
        "vcl": partial(VCL, examples=cfg.steps, samples=1),
        "packnet": partial(PackNet, total_tasks=len(cfg.tasks)),
        "efficient-packnet": partial(
            EfficientPackNet, alpha=alpha, rate="paper", gamma=None, grid=(KEPT,), when_full="train"
        ),
    }
    return made[method]


# One job: an agent on its way from task to task.


def find_tasks(cfg: Config) -> None:
    """Meta-World must be installed and know the tasks."""
    try:
        for name in cfg.tasks:
            task_name(name)
    except MissingMetaWorldError as error:
        raise RunError(str(error)) from None


def learn(
    cfg: Config, folder: Path, progress: Progress, method: str, alpha: float, seed: int
) -> dict[str, Any]:  # fmt: skip
    """Learn all tasks, from the last checkpoint on, and measure.

    `curve` is the success of every task so far on the way; `trained`, `packed` and `final` the success on each task at
    the end of its training, after pruning and retraining, and at the very end; `moved` the largest change of an action,
    on observations of each task, from its end to the very end; `used` the fraction of the actor's weights that tasks
    use, 1 if the method does not share them out; `note` says why there are no clips.
    """
    agent = make_agent(cfg, method, alpha, seed, local_device())
    with MetricsLog(folder / "metrics.jsonl") as log:
        journey = Journey(cfg, agent, seed, folder, log, progress)
        while agent.actor.current < len(cfg.tasks):
            journey.learn_task()
    final = journey.successes(TABLE, cfg.final_episodes)
    clips, note = journey.clips(f"{method}-{alpha:g}") if seed < CLIPS else ([], "")
    return {
        **{name: journey.records[name] for name in ("curve", "trained", "packed")}, "final": final,
        "moved": journey.moved(), "used": agent.actor.used() if isinstance(agent.actor, Packing) else 1.0,
        "clips": clips, "note": note,
    }  # fmt: skip


class Journey:
    """An agent with everything that is measured and saved."""

    def __init__(
        self, cfg: Config, agent: SAC, seed: int, folder: Path, log: MetricsLog, progress: Progress
    ) -> None:  # fmt: skip
        self.cfg, self.agent, self.seed, self.folder = cfg, agent, seed, folder
        self.log, self.progress = log, progress
        self.environments = [MetaWorld(name, cfg.reward, cfg.observation) for name in cfg.tasks]
        self.records: dict[str, Any] = {"curve": [], "trained": [], "packed": [], "probes": [], "log": [0, 0]}
        self.inside: dict[str, Any] | None = None
        self.resume()
        log.rewind(*self.records["log"])

    @property
    def file(self) -> Path:
        """All that the run goes on from."""
        return self.folder / "checkpoint.pt"

    def resume(self) -> None:
        """Become what was saved, if anything was."""
        if not self.file.exists():
            return
        try:
            state = load_checkpoint(self.file)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; delete {self.file} to begin this agent anew") from None
        load_agent(self.agent, state["agent"])
        self.records, self.inside = state["records"], state["inside"]

    def save(self, inside: dict[str, Any] | None) -> None:
        """All in one file, which is the old one or the new one."""
        self.records["log"] = [self.log.position(), self.log.checksum()]
        save_checkpoint(self.file, {"agent": agent_state(self.agent), "records": self.records, "inside": inside})

    def learn_task(self) -> None:
        """One task: from its beginning, or from the step at which it was saved."""
        cfg, agent, task = self.cfg, self.agent, self.agent.actor.current
        self.arm = MetaWorld(cfg.tasks[task], cfg.reward, cfg.observation)
        paused = None
        if self.inside is None:
            agent.begin(cfg.steps)
        else:
            paused = Paused(self.inside["step"], self.inside["observation"].numpy())
            self.arm.load_state(self.inside["arm"])
        seed = derived_seed(self.seed, task, ENVIRONMENT, 0)
        interact(agent, self.arm, cfg.steps, seed, paused=paused, on_step=self.on_step)
        self.records["trained"].append(self.success(task, TABLE, cfg.final_episodes))
        agent.end()
        self.records["packed"].append(self.success(task, TABLE, cfg.final_episodes))
        self.records["probes"].append(self.probe(task))
        self.inside = None
        self.save(None)

    def on_step(self, here: Paused) -> None:
        """After every step of the environment: evaluate and save now and then."""
        cfg, total = self.cfg, self.agent.actor.current * self.cfg.steps + here.step
        if here.step % cfg.evaluate_every == 0:
            found = self.successes(ON_THE_WAY, cfg.episodes)
            self.records["curve"].append({"step": total, "success": found})
            self.log.write(total, **{f"success {name}": value for name, value in zip(cfg.tasks, found, strict=False)})
            self.progress(total / (len(cfg.tasks) * cfg.steps), {"success": found[-1]})
        if here.step % cfg.checkpoint_every == 0 or here.step == cfg.steps:
            observation = torch.from_numpy(here.observation)
            self.save({"step": here.step, "observation": observation, "arm": self.arm.state()})

    def successes(self, purpose: int, episodes: int) -> list[float]:
        """Success on every task so far, the one in hand included."""
        tasks = min(self.agent.actor.current + (self.agent.actor.now is not None), len(self.cfg.tasks))
        return [self.success(task, purpose, episodes) for task in range(tasks)]

    def success(self, task: int, purpose: int, episodes: int) -> float:
        """The same episodes every time, for every method too, so that differences are the policy's."""
        seed = derived_seed(self.seed, task, purpose)
        return success_rate(self.agent, self.environments[task], task, episodes, seed)

    def probe(self, task: int) -> list[Tensor]:
        """Some observations of a task that has ended, and the actions there."""
        x = self.agent.replay.sample(PROBED, torch.Generator().manual_seed(task)).observation
        return [x, self.actions(x, task)]

    def actions(self, observation: Tensor, task: int) -> Tensor:
        """The most likely ones."""
        found: Tensor = self.agent.actor.predict(observation, task)
        return found.cpu()

    def moved(self) -> list[float]:
        """The largest change of an action of each task since it ended; exactly 0 if the policy is bit-identical."""
        return [
            float((self.actions(x, task) - before).abs().max())
            for task, (x, before) in enumerate(self.records["probes"])
        ]

    def clips(self, row: str) -> tuple[list[str], str]:
        """A clip of every task by the agent as it is now: file names, or why there are none."""
        names = []
        try:
            for task, environment in enumerate(self.environments):
                frames = clip(self.agent, environment, task, derived_seed(self.seed, task, CLIP))
                names.append(f"clip-{row}-{task}-{environment.name}.gif")
                write_gif(frames, self.folder / names[-1])
        except RenderingError as error:
            return [], f"There are no clips: {error}."
        return names, ""


# The numbers of the table: average success, forgetting, and how sure they are.


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its confidence interval; of one seed there is none."""

    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        bounds = "" if self.low is None or self.high is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.mean:.2f}{bounds}"


def bootstrap(values: Sequence[float], level: float = LEVEL) -> Interval:
    """The mean and the middle 90% of means of as many values drawn again with replacement (Efron, 1979)."""
    if not values:
        raise ValueError("an interval needs at least one value, got none")
    if len(values) == 1:
        return Interval(float(values[0]), None, None)
    drawn = np.random.default_rng(0).choice(np.asarray(values, float), (RESAMPLES, len(values))).mean(1)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(fmean(values), float(low), float(high))


@dataclass(frozen=True)
class MethodRows:
    """A method with its finished runs, one for each seed."""

    method: Method
    rows: Rows

    @property
    def success(self) -> Interval:
        """Average success over all tasks at the very end."""
        return bootstrap(self.rows.values(lambda row: fmean(row["final"])))

    @property
    def forgetting(self) -> Interval:
        """Success at the end of a task's training, before pruning, minus that at the very end, averaged over tasks."""
        pairs = self.rows.values(lambda row: zip(row["trained"], row["final"], strict=True))
        return bootstrap([fmean(trained - final for trained, final in each) for each in pairs])

    @property
    def moved(self) -> float:
        """The largest change of an action of any task but the last, in any run."""
        return max((value for row in self.rows for value in row["moved"][:-1]), default=0.0)

    def curve(self, task: int) -> Curve | None:
        """The success on a task of every run against steps in all, from when it has begun."""
        known = [[each for each in row["curve"] if task < len(each["success"])] for row in self.rows]
        if not known[0]:
            return None
        steps = [each["step"] for each in known[0]]
        values = [[each["success"][task] for each in found] for found in known]
        return Curve(self.method.label, None, steps, values, method=SHOWN_AS[self.method.name][1])


# The page.

INTRO = (
    "One network learns tasks of a simulated robot arm (Meta-World) by soft actor-critic, one after the other, and "
    "never acts in an earlier task again. Actor and critics are learners of the library's strategies; nothing is "
    "written anew for reinforcement learning."
)
PAPER = (
    "Table 4 and the hyper-parameters of appendix D: six tasks of a million steps in Meta-World's version of 2019. Its "
    "numbers stand beside ours for orientation; today's tasks, their rewards and this run's length are others."
)
INTERVALS = (
    "Success: the task is solved at any step of an episode of 200. In brackets: 90% bootstrap confidence intervals "
    "over seeds, which mean little with two or three of them."
)
WAY = "Mean over seeds with a band of one standard deviation; dashed lines are changes of task."
SHOWN = "The first seed, the most likely actions, up to half a second after success."


def main(cfg: Config, run: Run) -> Page:
    """Learn all tasks with every method from all seeds, and say what was found."""
    run.prepare(lambda: find_tasks(cfg))
    powers = {name: cfg.alphas if name == "efficient-packnet" else (1.0,) for name in cfg.methods}
    methods = [Method(name, alpha) for name, own in powers.items() for alpha in own]
    rows = run.map(learn, [{**m.settings, "seed": seed} for seed in range(cfg.seeds) for m in methods])
    measured = [MethodRows(m, found) for m in methods if (found := rows.where(**m.settings).finished)]
    lost = lost_runs(rows, lambda row: Method(row["method"], row["alpha"]).label)
    if not measured:
        raise RunError(f"every run diverged: {'; '.join(lost)}")
    clips = clips_of(cfg, measured)
    sections = [
        Section("Success and forgetting", INTERVALS, tables=[main_table(measured), task_table(cfg, measured)]),
        Section("Success on the way", WAY, success_curves(cfg, measured)),
        *([Section("The arm at the very end", SHOWN, clips)] if clips else []),
        *Section.diverged(lost),
    ]
    both = [(m, each) for m in measured for each in (("success", m.success), ("forgetting", m.forgetting))]
    intervals = {f"{what} {m.method.label}": [each.mean, each.low, each.high] for m, (what, each) in both}
    note = (
        f"This run: {' → '.join(cfg.tasks)}, {cfg.steps:,} steps each, {cfg.retrain_steps:,} updates of retraining "
        f"where a method prunes, {cfg.runs}, rewards {cfg.reward}, observations {cfg.observation!r}, "
        f"{cfg.final_episodes} episodes per number, the same for every method."
    )
    return Page(
        "Robot tasks one after another", f"{INTRO}\n\n{note} {rows.finished.notes}".strip(), sections, PAPER,
        [Stat(m.method.label, f"{m.success.mean:.2f}", f"forgetting {m.forgetting.mean:.2f}") for m in measured],
        headline(measured), intervals,
    )  # fmt: skip


def main_table(measured: Sequence[MethodRows]) -> Table:
    """One row per method, the paper's values beside ours."""
    columns: Columns = [
        ("", lambda m: m.method.label), ("average success", lambda m: str(m.success)),
        ("forgetting", lambda m: str(m.forgetting)), ("largest change of an action", lambda m: f"{m.moved:.3g}"),
        (Percent("weights used (%)", None, 0), lambda m: fmean(m.rows.values("used"))),
        (Column("paper: success", paper=True), lambda m: m.method.published[0]),
        (Column("paper: forgetting", paper=True), lambda m: m.method.published[1]),
    ]  # fmt: skip
    caption = (
        "Average success over all tasks at the very end. Forgetting: success at the end of a task's training, before "
        "pruning, minus that at the very end, averaged over tasks. Change of an action: between the end of its task "
        "and the very end, on observations of all tasks but the last; 0 means bit-identical."
    )
    return table("All methods", columns, measured, caption)


def task_table(cfg: Config, measured: Sequence[MethodRows]) -> Table:
    """Success on each task when it was trained, packed, and at the very end."""

    def value(task: int, m: MethodRows) -> str:
        means = [fmean(row[name][task] for row in m.rows) for name in ("trained", "packed", "final")]
        return " → ".join(f"{each:.2f}" for each in means)

    columns: Columns = [
        ("", lambda m: m.method.label),
        *((f"{name}: trained, packed, end", partial(value, task)) for task, name in enumerate(cfg.tasks)),
    ]
    return table("Every task", columns, measured, "Mean success over seeds. Packed: after pruning and retraining.")


def success_curves(cfg: Config, measured: Sequence[MethodRows]) -> list[Figure]:
    """A figure for every task: success of all methods against total steps."""
    drawn, changes = [], [task * cfg.steps for task in range(1, len(cfg.tasks))]
    for task, name in enumerate(cfg.tasks):
        curves = [curve for m in measured if (curve := m.curve(task))]
        if curves:
            drawn.append(Figure(
                f"success-{task}-{name}", lines, curves, title=f"Task {task + 1}: {name}", xlabel="steps in all",
                ylabel="success", percent=True, changes=(changes, []), wide=True,
            ))  # fmt: skip
    return drawn


def clips_of(cfg: Config, measured: Sequence[MethodRows]) -> list[Image]:
    """The clips of the first run of every row that has some."""
    images = []
    for m in measured:
        for task, name in enumerate(m.rows[0]["clips"]):
            success = f"success in {m.rows[0]['final'][task]:.0%} of episodes at the very end"
            what = f"{m.method.label}, {cfg.tasks[task]}: {success}"
            images.append(Image(m.rows[0].file(name), f"Clip of the robot arm. {what}", what))
    return images


def headline(measured: Sequence[MethodRows]) -> Headline:
    """The best row."""
    best = max(measured, key=lambda m: m.success.mean)
    printed = best.method.published[0]
    what = f"average success of {best.method.label}"
    return Headline(what, str(best.success), f"{printed} (six tasks)" if printed else "")


EXPERIMENTS = {
    "continual-world": Experiment(
        "continual-world", "robot tasks one after another, by soft actor-critic", "table 4", PRESETS, main
    ),
}
