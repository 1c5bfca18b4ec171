"""An agent in an environment: learning a task, and seeing how often it succeeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from powerprop.rl.sac import SAC

__all__ = ["Environment", "interact", "success_rate"]


class Environment(Protocol):
    """What an agent acts in: Gymnasium's interface, with actions in [-1, 1]; `info["success"]` tells of success."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]: ...

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]: ...


def interact(
    agent: SAC, environment: Environment, steps: int, seed: int, *, done: int = 0,
    heard: Callable[[int], None] = lambda step: None,
) -> None:  # fmt: skip
    """Act and learn for some steps of the task that the agent has begun.

    One environment in the same process: a step of a simulated robot takes a hundredth of the time of an update, so that
    further processes would wait for the updates.

    seed: of the environment.
    done: so many of the steps were done before; the episode at hand begins anew.
    heard: called after every step with its number.
    """
    settings = agent.settings
    observation = _numbers(environment.reset(seed=seed)[0])
    for step in range(done + 1, steps + 1):
        action = agent.explore(observation, step)
        following, reward, ended, cut, _ = environment.step(action)
        following = _numbers(following)
        agent.replay.add(observation, action, float(reward), following, ended)
        observation = _numbers(environment.reset()[0]) if ended or cut else following
        if step >= settings.start and step % settings.train_every == 0:
            for _ in range(settings.updates):
                agent.update()
        heard(step)


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


def _numbers(observation: Any) -> NDArray[np.float32]:
    return np.asarray(observation, dtype=np.float32)
