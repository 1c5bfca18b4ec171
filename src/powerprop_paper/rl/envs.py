"""Tasks of Meta-World by name: a simulated robot arm, episodes of 200 steps, success at any of them; clips of it."""

from __future__ import annotations

import difflib
import importlib
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from powerprop.files import write_atomically
from powerprop_paper.rl.sac import SAC

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

PICTURE = {"render_mode": "rgb_array", "camera_name": "corner3", "width": 160, "height": 120}
ASSETS = ("bvh_", "hfield_", "mesh_", "skin_", "tex_")
"""The large arrays of MuJoCo's model, which no task changes."""


EVERY = 4
"""Steps between two frames of a clip."""
DURATION = 80
"""Milliseconds that a frame is shown: 80 steps are a second of the simulated arm."""
AFTERWARDS = 40
"""Steps that are shown after success: half a second."""
COLOURS = 48

Frame = NDArray[np.uint8]


class MissingMetaWorldError(ImportError):
    """Meta-World is not installed."""


class RenderingError(RuntimeError):
    """Frames cannot be drawn on this machine; the message says what is missing."""


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
        self.name = task_name(name)
        self._columns = OBSERVATIONS[observation]
        kinds = _environments()
        from gymnasium.wrappers import OrderEnforcing, TimeLimit

        self.simulation = kinds[f"{self.name}-v3"](reward_function_version=reward, **PICTURE)
        _with_goals_of_its_own(self.simulation)
        _drawn_fast(self.simulation.model)
        self.env = TimeLimit(OrderEnforcing(self.simulation, disable_render_order_enforcing=True), HORIZON)
        self._built = {name: array.copy() for name, array in _arrays(self.simulation.model).items()}

    @property
    def observations(self) -> int:
        """How many numbers an observation has."""
        return len(self._columns)

    def reset(self, *, seed: int | None = None) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """A new episode; from a seed on, all that follow are determined."""
        if seed is not None:
            self.simulation.seed(seed % 2**32)
        observation, info = self.env.reset()
        return self._seen(observation), info

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Move the arm; `info["success"]` is 1 where the task is done at this moment."""
        observation, reward, ended, cut, info = self.env.step(np.asarray(action, dtype=np.float32))
        return self._seen(observation), float(reward), ended, cut, info

    def _seen(self, observation: NDArray[np.float64]) -> NDArray[np.float32]:
        return observation[self._columns].astype(np.float32)

    # --- the state, to go on from to the bit ----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that the next steps and episodes depend on, as tensors and plain values.

        MuJoCo's state (positions, speeds, the solver's warm start, …), what the task changed in MuJoCo's model, its own
        fields and generator, and the steps of the episode.
        """
        mujoco: Any = importlib.import_module("mujoco")
        model, kind = self.simulation.model, mujoco.mjtState.mjSTATE_INTEGRATION
        physics = np.empty(mujoco.mj_stateSize(model, kind))
        mujoco.mj_getState(model, self.simulation.data, physics, kind)
        moved = {n: array.copy() for n, array in _arrays(model).items() if not np.array_equal(array, self._built[n])}
        return {
            "name": self.name,
            "physics": torch.from_numpy(physics),
            "model": _plain(moved),
            "fields": _plain(vars(self.simulation)),
            "limit": _plain(vars(self.env)),
            "generator": self.simulation.np_random.bit_generator.state,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        mujoco: Any = importlib.import_module("mujoco")
        if state["name"] != self.name:
            raise ValueError(f"the saved environment is of {state['name']!r}, expected {self.name!r}")
        self.reset()  # fields that look into MuJoCo's own memory are made
        for name, array in _arrays(self.simulation.model).items():
            array[...] = state["model"][name].numpy() if name in state["model"] else self._built[name]
        vars(self.simulation).update(_as_numpy(state["fields"]))
        vars(self.env).update(_as_numpy(state["limit"]))
        self.simulation.np_random.bit_generator.state = state["generator"]
        model, data, physics = self.simulation.model, self.simulation.data, state["physics"].numpy()
        mujoco.mj_setState(model, data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        mujoco.mj_forward(model, data)  # what follows from the state, but for the warm start, which this moves on
        mujoco.mj_setState(model, data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)

    # --- pictures -------------------------------------------------------------------------------------------------

    def frame(self) -> NDArray[np.uint8]:
        """A picture (height, width, 3), drawn without a screen through EGL, or what MUJOCO_GL names (osmesa, glfw)."""
        with _backend() as name:
            try:
                importlib.import_module(f"mujoco.{name}")
                drawn: Any = self.env.render()
            except Exception as error:  # missing libraries make PyOpenGL raise anything
                text = f"no frames can be drawn through {name} ({type(error).__name__}: {error})"
                hint = "install its library (Debian: libegl1, or libosmesa6 with MUJOCO_GL=osmesa)"
                raise RenderingError(f"{text}; {hint}") from None
        return np.asarray(drawn)

    def close(self) -> None:
        """Give back what drawing took."""
        self.env.close()


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


def _drawn_fast(model: Any) -> None:
    """Without smooth edges, shadows and mirrors, which make pictures ten times slower on a machine without a GPU."""
    model.vis.quality.offsamples = model.vis.quality.shadowsize = 0
    model.mat_reflectance[:] = 0


@contextmanager
def _backend() -> Iterator[str]:
    """Gymnasium would try the screen first."""
    before = os.environ.get("MUJOCO_GL")
    os.environ["MUJOCO_GL"] = before or "egl"
    try:
        yield os.environ["MUJOCO_GL"]
    finally:
        if before is None:
            del os.environ["MUJOCO_GL"]


def _arrays(model: Any) -> dict[str, NDArray[Any]]:
    """The numbers of MuJoCo's model that a task may change: where bodies and goals are, and whatever else."""
    names = [name for name in dir(model) if not name.startswith(("_", *ASSETS))]
    return {name: found for name in names if isinstance(found := getattr(model, name), np.ndarray)}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """What can be saved: numbers, text and arrays, but for those that look into MuJoCo's own memory."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray | np.generic) and _owned(np.asarray(value)):
            found[name] = torch.from_numpy(np.array(value))
        elif value is None or isinstance(value, bool | int | float | str):
            found[name] = value
    return found


def _as_numpy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.numpy().copy()[()] if isinstance(value, Tensor) else value for name, value in values.items()}


def _owned(array: NDArray[Any]) -> bool:
    """True if the memory is numpy's."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.base is None


def clip(agent: SAC, environment: MetaWorld, task: int, seed: int) -> list[Frame]:
    """The frames of one episode of the policy of a task, its most likely actions, up to a moment after success."""
    observation, _ = environment.reset(seed=seed)
    frames: list[Frame] = []
    step, after, cut = 0, 0, False
    with closing(environment):
        while not cut and after <= AFTERWARDS:
            if step % EVERY == 0:
                frames.append(environment.frame())
            observation, _, _, cut, info = environment.step(agent.act(observation, task))
            step, after = step + 1, after + bool(after or info["success"])
        return [*frames, environment.frame()]


def write_gif(frames: list[Frame], path: Path) -> None:
    """An animation that goes on for ever, written whole or not at all."""
    from PIL import Image

    pictures = [Image.fromarray(np.ascontiguousarray(frame)).quantize(COLOURS) for frame in frames]
    content = io.BytesIO()
    pictures[0].save(content, "GIF", save_all=True, append_images=pictures[1:], duration=DURATION, loop=0)
    write_atomically(path, content.getvalue())
