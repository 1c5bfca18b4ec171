"""Some steps with the batches of a source: what `learn` and methods that retrain ask a learner for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from powerprop.training import LossTally

if TYPE_CHECKING:
    from powerprop.continual.source import Source
    from powerprop.continual.strategy import Strategy

__all__ = ["Losses", "Progress", "set_rates", "train"]

Progress = Callable[[str, int, float], None]
"""Hears the phase of the work, its step and the mean loss since it last heard."""

HEARD_EVERY = 100


class Losses(LossTally):
    """The losses of the steps of a task, whose mean is heard every so often, also in a loop of one's own."""

    latest = float("nan")

    def after(self, step: int) -> None:
        """A step of a phase is done."""
        if step % HEARD_EVERY == 0:
            self.latest = self.take(step)

    def plain(self) -> list[float]:
        """The sum and the number of losses, and the latest mean."""
        return [float(self.total), self.count, -1.0 if math.isnan(self.latest) else self.latest]

    def put(self, values: Sequence[float]) -> None:
        """What `plain` gave."""
        self.total.fill_(values[0])
        self.count, self.latest = int(values[1]), math.nan if values[2] == -1.0 else values[2]

    def heard(self, step: int) -> float:
        """The mean since it was last heard; `after` has taken it where it was due."""
        return self.latest if step % HEARD_EVERY == 0 else self.take(step)


def train(learner: Strategy, losses: Losses, source: Source, steps: int, progress: Progress | None, phase: str) -> None:
    """The steps of a phase of the task in hand, at the rates of the learner's schedule."""
    learner.model.train()
    task = learner.current
    for step in range(1, steps + 1):
        set_rates(learner, phase, (step - 1) / steps)
        batch = next(source)
        with learner.viewing(task) as model:
            loss = learner.objective.loss(model, batch, task)
        learner.step(loss, batch)
        if step % HEARD_EVERY == 0 or step == steps:
            mean = losses.heard(step)
            if progress is not None:
                progress(phase, step, mean)
    set_rates(learner, "", 0.0)


def set_rates(learner: Strategy, phase: str, done: float) -> None:
    """The rates of the schedule; outside of a phase, those of the optimiser."""
    if learner.schedule is not None:
        learner.parameters.rates.scale(learner.schedule(phase, done) if phase else 1.0)
