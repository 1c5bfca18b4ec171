"""Tasks of Meta-World by name: a simulated robot arm, episodes of 200 steps, success at any of them."""

from __future__ import annotations

import difflib
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ACTIONS", "CONTINUAL_WORLD", "OBSERVATIONS", "REWARDS", "MetaWorld", "MissingMetaWorldError", "task_name"]

CONTINUAL_WORLD = ("hammer", "push-wall", "faucet-close", "push-back", "stick-pull", "handle-press-side")
"""The paper's six tasks, in its order."""
ACTIONS = 4
"""Where the hand moves to (3) and how far the gripper closes."""
HORIZON = 200
REWARDS = ("v1", "v2")
"""Meta-World's first ones, unbounded and of different sizes, which the paper's tasks had; and today's, 0 to 10."""

HAND, OBJECT, OTHER, GOAL = slice(0, 3), slice(4, 7), slice(11, 14), slice(36, 39)
OBSERVATIONS: dict[str, NDArray[np.int64]] = {
    "full": np.arange(39),
    "short": np.r_[HAND, OBJECT, OTHER, GOAL].astype(np.int64),
}
"""full: hand, gripper, two objects with their rotations, all that one step before, and the goal: 39 numbers.

short: where hand, both objects and goal are: 12 numbers, as many and of the same meaning as the paper's version had."""


class MissingMetaWorldError(ImportError):
    """Meta-World is not installed."""


class MetaWorld:
    """One task of Meta-World, with Gymnasium's interface; goal and objects are drawn anew for every episode.

    The goal is part of the observation. Episodes end after 200 steps, never by themselves.

    name: as "faucet-close" or "faucet-close-v3".
    reward: one of `REWARDS`.
    observation: one of `OBSERVATIONS`.
    """

    def __init__(self, name: str, reward: str = "v2", observation: str = "full") -> None:
        if reward not in REWARDS:
            raise ValueError(f"reward must be one of {', '.join(REWARDS)}, got {reward!r}")
        if observation not in OBSERVATIONS:
            raise ValueError(f"observation must be one of {', '.join(OBSERVATIONS)}, got {observation!r}")
        kinds = _environments()
        self.name = task_name(name)
        self._columns = OBSERVATIONS[observation]
        self.simulation = kinds[f"{self.name}-v3"](reward_function_version=reward)
        _with_goals_of_its_own(self.simulation)
        self.steps = HORIZON
        """Of the episode that are done."""

    @property
    def observations(self) -> int:
        """How many numbers an observation has."""
        return len(self._columns)

    def reset(self, *, seed: int | None = None) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """A new episode; from a seed on, all that follow are determined."""
        if seed is not None:
            self.simulation.seed(seed % 2**32)
        self.steps = 0
        observation, info = self.simulation.reset()
        return self._seen(observation), info

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Move the arm; `info["success"]` is 1 where the task is done at this moment."""
        if self.steps >= HORIZON:
            raise RuntimeError(f"{self.name}: an episode has {HORIZON} steps; call reset() first")
        self.steps += 1
        observation, reward, _, _, info = self.simulation.step(np.asarray(action, dtype=np.float32))
        return self._seen(observation), float(reward), False, self.steps == HORIZON, info

    def _seen(self, observation: NDArray[np.float64]) -> NDArray[np.float32]:
        return observation[self._columns].astype(np.float32)


def task_name(name: str) -> str:
    """The name of a task without its version; an unknown one is an error that names the nearest."""
    known = sorted(each.removesuffix("-v3") for each in _environments())
    short = name.removesuffix("-v3")
    if short not in known:
        near = difflib.get_close_matches(short, known)
        text = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
        raise ValueError(f"Meta-World has no task {name!r}; {text}")
    return short


def _environments() -> dict[str, Any]:
    try:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    except ImportError as error:
        text = f"Meta-World is not installed ({error})"
        raise MissingMetaWorldError(f"{text}: pip install 'powerprop[rl]'") from None
    return dict(ALL_V3_ENVIRONMENTS)


def _with_goals_of_its_own(simulation: Any) -> None:
    """Objects and goals from the simulation's own generator, and the goal to be seen: what Meta-World's classes with
    observable goals do, which draw from numpy's global generator instead."""
    simulation._partially_observable = False
    simulation.__dict__.pop("sawyer_observation_space", None)  # was computed with the goal hidden
    simulation._freeze_rand_vec, simulation.seeded_rand_vec, simulation._set_task_called = False, True, True
