"""Continual World: a robot arm learns one task after the other with the same network (paper, table 4).

Every task is learned by soft actor-critic, then pruned and retrained where the method does so. Success is measured on
the way, at the end of each task's training before pruning, after it, and on all tasks at the very end.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powerprop.continual.packing.base import Packing
from powerprop.continual.seeds import derived_seed
from powerprop.experiments.harness.experiment import Experiment, Findings, Job, Results, RunError
from powerprop.experiments.harness.parallel import Progress
from powerprop.experiments.rl.checkpoints import load_boundary, load_inside, save_boundary, save_inside
from powerprop.experiments.rl.config import PRESETS, Config
from powerprop.experiments.rl.methods import Arm, arms, make_agent
from powerprop.experiments.rl.report import findings, read_runs
from powerprop.rl import SAC, interact, success_rate
from powerprop.rl.clips import RenderingError, clip, write_gif
from powerprop.rl.envs import MetaWorld, MissingMetaWorldError, task_name
from powerprop.tensorfiles import read_tensors, write_tensors
from powerprop.train import MetricsLog
from powerprop.train.distributed import local_device

ENVIRONMENT, ON_THE_WAY, TABLE, CLIP = range(100, 104)
"""Purposes of random numbers, beside those of the agent itself."""
PROBES, PROBED = "probes.safetensors", 256
"""Observations of every task, so many, and what its policy did there when the task had ended."""


def jobs(config: Config, results: Results) -> list[Job]:
    """Every row with every seed."""
    return [arm.job(seed) for seed in range(config.seeds) for arm in arms(config)]


def prepare(config: Config) -> None:
    """Meta-World must be installed and know the tasks."""
    try:
        for name in config.tasks:
            task_name(name)
    except MissingMetaWorldError as error:
        raise RunError(str(error)) from None


def run_job(config: Config, job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
    """Learn all tasks, from the last checkpoint on, and measure."""
    seed = job.settings["seed"]
    agent = make_agent(config, Arm(job.settings["method"], job.settings["alpha"]), seed, local_device())
    with MetricsLog(folder / "metrics.jsonl") as log:
        run = Run(config, agent, seed, folder, log, progress)
        while agent.actor.current < len(config.tasks):
            run.learn_task()
        final = run.successes(TABLE, config.final_episodes)
        clips, note = run.clips() if seed < config.clips else ([], "")
    used = agent.actor.used() if isinstance(agent.actor, Packing) else 1.0
    return {
        **{name: run.records[name] for name in ("curve", "trained", "packed")}, "final": final, "moved": run.moved(),
        "used": used, "seconds": time.perf_counter() - run.started, "clips": clips, "note": note,
    }  # fmt: skip


class Run:
    """One agent on its way from task to task, with everything that is measured and saved."""

    def __init__(
        self, config: Config, agent: SAC, seed: int, folder: Path, log: MetricsLog, progress: Progress
    ) -> None:
        self.config, self.agent, self.seed, self.folder = config, agent, seed, folder
        self.log, self.progress, self.started = log, progress, time.perf_counter()
        self.environments = [MetaWorld(name, config.reward, config.observation) for name in config.tasks]
        self.records = load_boundary(folder, agent) or {"curve": [], "trained": [], "packed": [], "log": [0, 0]}
        log.rewind(*self.records["log"])

    def learn_task(self) -> None:
        """One task: from its beginning, or from the checkpoint inside of it."""
        config, agent, task = self.config, self.agent, self.agent.actor.current
        agent.begin(config.steps)
        done = 0
        if (found := load_inside(self.folder, agent)) is not None:
            done, self.records = found
            self.log.rewind(*self.records["log"])
        seed = derived_seed(self.seed, task, ENVIRONMENT, done)
        own = MetaWorld(config.tasks[task], config.reward, config.observation)
        interact(agent, own, config.steps, seed, done=done, heard=self._heard)
        self.records["trained"].append(self._success(task, TABLE, config.final_episodes))
        agent.end()
        self.records["packed"].append(self._success(task, TABLE, config.final_episodes))
        self._keep_probe(task)
        self._note_log()
        save_boundary(self.folder, agent, self.records)

    def _heard(self, step: int) -> None:
        """After every step of the environment: evaluate and save now and then."""
        config, task = self.config, self.agent.actor.current
        total = task * config.steps + step
        if step % config.evaluate_every == 0:
            found = self.successes(ON_THE_WAY, config.episodes)
            self.records["curve"].append({"step": total, "success": found})
            values = {f"success {config.tasks[t]}": value for t, value in enumerate(found)}
            self.log.write(total, **values)
            self.progress(total / (len(config.tasks) * config.steps), {"success": found[-1]})
        if step % config.checkpoint_every == 0 and step < config.steps:
            self._note_log()
            save_inside(self.folder, self.agent, step, self.records)

    def successes(self, purpose: int, episodes: int) -> list[float]:
        """Success on every task so far, the one in hand included."""
        tasks = min(self.agent.actor.current + (self.agent.actor.now is not None), len(self.config.tasks))
        return [self._success(task, purpose, episodes) for task in range(tasks)]

    def _success(self, task: int, purpose: int, episodes: int) -> float:
        """The same episodes every time, for every method too, so that differences are the policy's."""
        seed = derived_seed(self.seed, task, purpose)
        return success_rate(self.agent, self.environments[task], task, episodes, seed)

    def _note_log(self) -> None:
        self.records["log"] = [self.log.position(), self.log.checksum()]

    # --- did the policy move? -----------------------------------------------------------------------------------

    def _keep_probe(self, task: int) -> None:
        rows = self.agent.replay.sample(PROBED, torch.Generator().manual_seed(task)).observation
        known = self._probes() if task else {}
        known = {name: each for name, each in known.items() if int(name.rpartition("-")[2]) < task}
        write_tensors(
            self.folder / PROBES, "powerprop-probes-1",
            known | {f"observation-{task}": rows, f"action-{task}": self._actions(rows, task)},
        )  # fmt: skip

    def _probes(self) -> dict[str, Tensor]:
        return read_tensors(self.folder / PROBES, "powerprop-probes-1")[0]

    def _actions(self, observation: Tensor, task: int) -> Tensor:
        found: Tensor = self.agent.actor.predict(observation, task)
        return found.cpu()

    def moved(self) -> list[float]:
        """The largest change of an action of each task since it ended; exactly 0 if the policy is bit-identical."""
        probes = self._probes()
        pairs = [(probes[f"observation-{t}"], probes[f"action-{t}"]) for t in range(len(self.config.tasks))]
        return [float((self._actions(x, t) - before).abs().max()) for t, (x, before) in enumerate(pairs)]

    # --- clips --------------------------------------------------------------------------------------------------

    def clips(self) -> tuple[list[str], str]:
        """A clip of every task by the agent as it is now: file names, or why there are none."""
        names = []
        try:
            for task, environment in enumerate(self.environments):
                names.append(f"clip-{task}-{environment.name}.gif")
                frames = clip(self.agent, environment, task, derived_seed(self.seed, task, CLIP))
                write_gif(frames, self.folder / names[-1])
        except RenderingError as error:
            return [], f"There are no clips: {error}."
        return names, ""


def report(config: Config, results: Results, out: Path) -> Findings:
    """Success and forgetting of every row."""
    return findings(config, read_runs(config, results), out)


EXPERIMENT = Experiment(
    name="continual-world",
    title="robot tasks one after another, by soft actor-critic",
    paper="table 4",
    presets=PRESETS, prepare=prepare, jobs=jobs, run_job=run_job, report=report,
)  # fmt: skip
