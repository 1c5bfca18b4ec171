"""An agent on the disk: exactly at the boundary of two tasks, nearly so inside of one.

At a boundary nothing but the learners and what was measured is left: replay, temperature, target networks, optimisers
and environment are new with every task. A run that goes on from there is the same to the bit. Inside of a task all of
these are saved too but the environment: the episode at hand begins anew, from another seed, so that the run is another
one that is as good.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powerprop.continual import Strategy
from powerprop.rl import SAC
from powerprop.train.checkpoint import CheckpointError, load_checkpoint, save_checkpoint

LEARNER, INSIDE = "learner.safetensors", "checkpoint.pt"


def critic_file(folder: Path, tasks: int) -> Path:
    """The critics after so many tasks."""
    return folder / f"critic-{tasks}.safetensors"


def save_boundary(folder: Path, agent: SAC, records: dict[str, Any]) -> None:
    """After a task; the file of the actor comes last and says which one of the critics belongs to it."""
    tasks = agent.actor.current
    agent.critic.save(critic_file(folder, tasks))
    temperatures = [value.item() for value in agent.log_temperatures]
    agent.actor.records = {**records, "log_temperatures": temperatures}
    agent.actor.save(folder / LEARNER)
    for path in folder.glob("critic-*.safetensors"):
        if path != critic_file(folder, tasks):
            path.unlink()
    (folder / INSIDE).unlink(missing_ok=True)


def load_boundary(folder: Path, agent: SAC) -> dict[str, Any]:
    """Become the agent that was saved last, if there is one, and return the records."""
    if not (folder / LEARNER).exists():
        return {}
    agent.actor.load(folder / LEARNER)
    agent.critic.load(critic_file(folder, agent.actor.current))
    records = dict(agent.actor.records)
    agent.log_temperatures = [torch.tensor(value) for value in records.pop("log_temperatures")]
    return records


def save_inside(folder: Path, agent: SAC, step: int, records: dict[str, Any]) -> None:
    """Inside of a task, after a step of the environment."""
    state = {
        "task": agent.actor.current, "step": step, "records": records, "replay": agent.replay.state(),
        "temperature": agent.log_temperatures[-1].detach(), "temperature_adam": agent.temperature_adam.state_dict(),
        "target": agent.target.state_dict(), "generators": _states(agent.generators),
        "actor": _learner_state(agent.actor), "critic": _learner_state(agent.critic),
    }  # fmt: skip
    save_checkpoint(folder / INSIDE, state)


def load_inside(folder: Path, agent: SAC) -> tuple[int, dict[str, Any]] | None:
    """Take up a task that the agent has begun, and return the step and the records; None if nothing was saved of it."""
    path = folder / INSIDE
    if not path.exists():
        return None
    try:
        state = load_checkpoint(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; delete {path} to begin this task anew") from None
    if state["task"] != agent.actor.current:
        return None
    for name, learner in (("actor", agent.actor), ("critic", agent.critic)):
        _load_learner(learner, state[name])
    agent.replay.load_state(state["replay"])
    agent.log_temperatures[-1].data.copy_(state["temperature"])
    agent.temperature_adam.load_state_dict(state["temperature_adam"])
    agent.target.load_state_dict(state["target"])
    for purpose, generator in state["generators"].items():
        agent.generator(purpose).set_state(generator)
    return state["step"], state["records"]


def _learner_state(learner: Strategy) -> dict[str, Any]:
    assert learner.now is not None
    parameters = [p.detach() for group in learner.optimizer.param_groups for p in group["params"]]
    generators = _states(learner.now.generators)
    return {
        "parameters": parameters, "optimizer": learner.optimizer.state_dict(), "step": learner.now.step,
        "generators": generators,
    }  # fmt: skip


@torch.no_grad()
def _load_learner(learner: Strategy, state: dict[str, Any]) -> None:
    """Weights first: those that masks have set to zero come back with the optimiser's own."""
    assert learner.now is not None
    parameters = [p for group in learner.optimizer.param_groups for p in group["params"]]
    for parameter, saved in zip(parameters, state["parameters"], strict=True):
        parameter.copy_(saved)
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.now.step = state["step"]
    for purpose, generator in state["generators"].items():
        learner.generator(purpose).set_state(generator)


def _states(generators: dict[str, torch.Generator]) -> dict[str, Tensor]:
    return {purpose: generator.get_state() for purpose, generator in generators.items()}
