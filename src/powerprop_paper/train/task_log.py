"""The metrics of a learner as it goes from task to task, in step with the file that the learner is saved to."""

from __future__ import annotations

from typing import Any

from powerprop.continual import Strategy
from powerprop_paper.train.log import MetricsLog

RECORD = "metrics"
"""Where the learner keeps how much of the log belongs to the tasks that it knows."""


class TaskLog:
    """Writes lines of a learner's training; a learner that was saved and goes on has the lines up to there.

    steps: of one task, all its phases together.
    """

    def __init__(self, log: MetricsLog, learner: Strategy, steps: int) -> None:
        self.log, self.learner, self.steps = log, learner, steps
        self.resumed = False

    def write(self, step: int, **values: float) -> None:
        """One line about a step of the current task."""
        self._resume()
        self.log.write(self.learner.current * self.steps + step, **values)

    def end_task(self, **values: float) -> None:
        """What was measured after a task, which is the learner's last one now; before the learner is saved."""
        self.write(0, **values)
        self.learner.records[RECORD] = [self.log.position(), self.log.checksum()]

    def other_records(self) -> dict[str, Any]:
        """The learner's records without that of the log, once all is learned and the log is as the learner knows it."""
        self._resume()  # a learner that was saved after its last task has not written anything
        return {name: value for name, value in self.learner.records.items() if name != RECORD}

    def _resume(self) -> None:
        """Take up the log where the learner was saved: when it is first needed, since the learner is loaded by then."""
        if not self.resumed:
            self.log.rewind(*self.learner.records.get(RECORD, (0, 0)))
            self.resumed = True


class StepCount:
    """Steps of a task from its first on, over all phases: training, each pruning on the way, retraining."""

    def __init__(self) -> None:
        self.phase, self.step, self.before = "", 0, 0

    def after(self, phase: str, step: int) -> int:
        """How many steps of the task are done when so many of a phase are."""
        if phase != self.phase or step <= self.step:
            self.before = 0 if phase == "training" else self.before + self.step
        self.phase, self.step = phase, step
        return self.before + step
