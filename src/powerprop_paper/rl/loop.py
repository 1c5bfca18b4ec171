"""An agent in an environment: what happened, learning from it, seeing how often it succeeds, and saving all of it.

Between two tasks the learners and the temperatures are all there is: replay, target networks, optimisers and random
numbers are new with every task. Inside of a task these come on top, so that an agent goes on to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from powerprop.continual import Strategy, saving
from powerprop_paper.rl.sac import SAC

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


def agent_state(agent: SAC) -> dict[str, Any]:
    """Everything; a copy, which stays what it is. An error of numbers is not saved."""
    state: dict[str, Any] = {"log_temperatures": [value.item() for value in agent.log_temperatures], "inside": None}
    for name, learner in _learners(agent).items():
        if learner.now is not None:
            learner.tally.mean(learner.now.step)
        tensors, data = saving.state_of(learner)
        state[name] = {"tensors": {n: t.detach().clone() for n, t in tensors.items()}, "data": json.dumps(data)}
    if agent.actor.now is not None:
        state["inside"] = {
            "replay": agent.replay.state(), "target": agent.target.state_dict(),
            "temperature_adam": agent.temperature_adam.state_dict(),
            "generators": {purpose: generator.get_state() for purpose, generator in agent.generators.items()},
        }  # fmt: skip
    return state


def load_agent(agent: SAC, state: Mapping[str, Any]) -> None:
    """Become the agent that was saved; this one is new, or between two tasks."""
    if agent.actor.now is not None:
        raise ValueError(f"the agent is learning task {agent.actor.current}: load into one that is not")
    for name, learner in _learners(agent).items():
        saving.take_up(learner, state[name]["tensors"], json.loads(state[name]["data"]), given={})
    agent.log_temperatures = [torch.tensor(value) for value in state["log_temperatures"]]
    if (inside := state["inside"]) is None:
        return
    agent.log_temperatures[-1].requires_grad_()
    agent.open_task()
    agent.replay.load_state(inside["replay"])
    agent.temperature_adam.load_state_dict(inside["temperature_adam"])
    agent.target.load_state_dict(inside["target"])
    for purpose, generator in inside["generators"].items():
        agent.generator(purpose).set_state(generator)


def _learners(agent: SAC) -> dict[str, Strategy]:
    return {"actor": agent.actor, "critic": agent.critic}
