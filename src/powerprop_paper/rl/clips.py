"""Short clips of the arm as a GIF."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from powerprop.files import write_atomically
from powerprop_paper.rl.envs import MetaWorld
from powerprop_paper.rl.sac import SAC

__all__ = ["clip", "write_gif"]

EVERY = 4
"""Steps between two frames."""
DURATION = 80
"""Milliseconds that a frame is shown: 80 steps are a second of the simulated arm."""
AFTERWARDS = 40
"""Steps that are shown after success: half a second."""
COLOURS = 48

Frame = NDArray[np.uint8]


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
