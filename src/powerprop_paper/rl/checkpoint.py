"""The state of an agent as tensors and plain values: between two tasks, or inside of one.

Between two tasks the learners and the temperatures are all there is: replay, target networks, optimisers and random
numbers are new with every task. Inside of a task these come on top, so that an agent goes on to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from powerprop.continual import Strategy, saving
from powerprop_paper.rl.sac import SAC

__all__ = ["agent_state", "load_agent"]


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
        saving.take_up(learner, state[name]["tensors"], json.loads(state[name]["data"]))
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
