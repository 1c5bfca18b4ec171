"""An agent in an environment: learning a task, and seeing how often it succeeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from powerprop_paper.rl.sac import SAC

__all__ = ["Environment", "Paused", "interact", "success_rate"]

Observation = NDArray[np.float32]


class Environment(Protocol):
    """What an agent acts in: Gymnasium's interface, with actions in [-1, 1]; `info["success"]` tells of success."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]: ...

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]: ...


class Paused(NamedTuple):
    """Where an agent stopped: after so many steps, with this before its eyes."""

    step: int
    observation: Observation


def interact(
    agent: SAC, environment: Environment, steps: int, seed: int, *, paused: Paused | None = None,
    on_step: Callable[[Paused], None] = lambda here: None,
) -> None:  # fmt: skip
    """Act and learn for some steps of the task that the agent has begun.

    One environment in the same process: a step of a simulated robot takes a hundredth of the time of an update, so that
    further processes would wait for the updates.

    seed: of the environment.
    paused: go on from here; agent and environment are as they were.
    on_step: called after every step.
    """
    settings = agent.settings
    done, observation = paused or Paused(0, _numbers(environment.reset(seed=seed)[0]))
    for step in range(done + 1, steps + 1):
        action = agent.explore(observation, step)
        following, reward, ended, cut, _ = environment.step(action)
        following = _numbers(following)
        agent.replay.add(observation, action, float(reward), following, ended)
        observation = _numbers(environment.reset()[0]) if ended or cut else following
        if step >= settings.start and step % settings.train_every == 0:
            for _ in range(settings.updates):
                agent.update()
        on_step(Paused(step, observation))


def success_rate(agent: SAC, environment: Environment, task: int, episodes: int, seed: int) -> float:
    """The fraction of episodes in which the policy of a task succeeds at any step.

    Actions are drawn from the policy, as in training. Starts and noise depend on the seed alone, so that the same
    policy has the same episodes again.
    """
    generator = torch.Generator().manual_seed(seed)
    wins = 0
    for episode in range(episodes):
        observation, over = _numbers(environment.reset(seed=seed if episode == 0 else None)[0]), False
        while not over:
            found, _, ended, cut, info = environment.step(agent.act(observation, task, generator))
            observation, won = _numbers(found), bool(info.get("success", False))
            wins, over = wins + won, ended or cut or won
    return wins / episodes


def _numbers(observation: Any) -> Observation:
    return np.asarray(observation, dtype=np.float32)
