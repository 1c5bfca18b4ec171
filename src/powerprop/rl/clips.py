"""Short clips of the arm: frames drawn without a screen, as a GIF."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerprop.files import write_atomically
from powerprop.rl.envs import MetaWorld
from powerprop.rl.sac import SAC

__all__ = ["RenderingError", "clip", "drawing", "write_gif"]

WIDTH, HEIGHT = 160, 120
CAMERA = "corner3"
EVERY = 4
"""Steps between two frames."""
DURATION = 80
"""Milliseconds that a frame is shown: 80 steps are a second of the simulated arm."""
COLOURS = 48

Frame = NDArray[np.uint8]


class RenderingError(RuntimeError):
    """Frames cannot be drawn on this machine; the message says what is missing."""


def clip(agent: SAC, environment: MetaWorld, task: int, seed: int) -> list[Frame]:
    """The frames of one episode of the policy of a task, its most likely actions, up to half a second after success."""
    observation, _ = environment.reset(seed=seed)
    frames: list[Frame] = []
    after, cut = 0, False
    with drawing(environment) as draw:
        while not cut and after <= 40:
            if len(frames) * EVERY <= environment.steps:
                frames.append(draw())
            observation, _, _, cut, info = environment.step(agent.act(observation, task))
            after += bool(after or info["success"])
        return [*frames, draw()]


@contextmanager
def drawing(environment: MetaWorld) -> Iterator[Any]:
    """A function that draws the environment as it is now, for as long as the block lasts.

    OpenGL through EGL, which needs no screen, or what MUJOCO_GL names (egl, osmesa, glfw).
    """
    backend = os.environ.get("MUJOCO_GL") or "egl"
    try:
        mujoco: Any = importlib.import_module("mujoco")
        gl = importlib.import_module(f"mujoco.{backend}").GLContext(WIDTH, HEIGHT)
        gl.make_current()
    except Exception as error:  # missing libraries make PyOpenGL raise anything
        text = f"no frames can be drawn through {backend} ({type(error).__name__}: {error})"
        hint = "install its library (Debian: libegl1, or libosmesa6 with MUJOCO_GL=osmesa)"
        raise RenderingError(f"{text}; {hint}") from None
    try:
        yield _Camera(mujoco, environment.simulation).draw
    finally:
        gl.free()


class _Camera:
    """MuJoCo's own drawing, from one of the model's cameras."""

    def __init__(self, mujoco: Any, simulation: Any) -> None:
        self.mujoco, self.model, self.data = mujoco, simulation.model, simulation.data
        self.model.vis.global_.offwidth, self.model.vis.global_.offheight = WIDTH, HEIGHT
        self.model.vis.quality.offsamples = self.model.vis.quality.shadowsize = 0  # ten times faster without a GPU
        self.scene = mujoco.MjvScene(self.model, maxgeom=1000)
        self.options, self.camera = mujoco.MjvOption(), mujoco.MjvCamera()
        self.camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self.camera.fixedcamid = mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_CAMERA, CAMERA)
        for each in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self.scene.flags[each] = 0
        self.context = mujoco.MjrContext(self.model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self.context)
        self.area = mujoco.MjrRect(0, 0, WIDTH, HEIGHT)

    def draw(self) -> Frame:
        """One frame, the right way up."""
        mujoco, pixels = self.mujoco, np.empty((HEIGHT, WIDTH, 3), np.uint8)
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self.model, self.data, self.options, None, self.camera, everything, self.scene)
        mujoco.mjr_render(self.area, self.scene, self.context)
        mujoco.mjr_readPixels(pixels, None, self.area, self.context)
        return pixels[::-1]


def write_gif(frames: list[Frame], path: Path) -> None:
    """An animation that goes on for ever, written whole or not at all."""
    from PIL import Image

    pictures = [Image.fromarray(np.ascontiguousarray(frame)).quantize(COLOURS) for frame in frames]
    content = io.BytesIO()
    pictures[0].save(content, "GIF", save_all=True, append_images=pictures[1:], duration=DURATION, loop=0)
    write_atomically(path, content.getvalue())
