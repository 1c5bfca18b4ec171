"""Metrics as JSON lines, in step with what is saved of a training or a learner, and to TensorBoard when asked."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from powerprop.continual import Strategy
from powerprop.files import FileError, naming

TENSORBOARD = "POWERPROP_TENSORBOARD"
RECORD = "metrics"
"""Where a learner keeps how much of the log belongs to the tasks that it knows."""


class MetricsLog:
    """One line of JSON per call of `write`; `position`, `checksum` and `rewind` make it part of a checkpoint.

    Lines hold the step and the values only, no clock, so that a resumed run writes the same bytes.

    path: the file; TensorBoard events go to the folder beside it.
    tensorboard: also write TensorBoard scalars (needs the extra `tensorboard`); by default if the environment
        variable POWERPROP_TENSORBOARD is 1, which reaches the worker processes of a run too.
    """

    def __init__(self, path: str | Path, tensorboard: bool | None = None) -> None:
        if tensorboard is None:
            tensorboard = tensorboard_wanted()
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")  # noqa: SIM115 - stays open until close()
        self._board: Any = _summary_writer_class()(str(self.path.parent / "tensorboard")) if tensorboard else None

    def write(self, step: int, **values: float) -> None:
        """Add one line; it is handed to the operating system at once."""
        with naming(self.path):
            self._file.write(json.dumps({"step": step, **values}).encode() + b"\n")
            self._file.flush()
            if self._board is not None:
                for name, value in values.items():
                    self._board.add_scalar(name, value, step)

    def position(self) -> int:
        """Bytes written so far, all of them on the disk."""
        with naming(self.path):
            os.fsync(self._file.fileno())
        return self._file.tell()

    def checksum(self) -> int:
        """The CRC-32 of all that was written so far."""
        return zlib.crc32(self.path.read_bytes()[: self._file.tell()])

    def rewind(self, position: int, checksum: int | None = None) -> None:
        """Drop everything after `position`: lines of steps that are about to be done again.

        What comes before must have the checksum, if one is given; otherwise nothing is changed.
        """
        content = self.path.read_bytes()
        if len(content) < position:
            raise FileError(
                f"{self.path} has {len(content)} bytes, but its checkpoint was made at {position}: it was cut short"
            )
        if checksum is not None and zlib.crc32(content[:position]) != checksum:
            raise FileError(f"{self.path} is damaged or edited: its first {position} bytes are not those it had")
        self._file.truncate(position)
        self._file.seek(position)

    def close(self) -> None:
        """Close the file and flush TensorBoard."""
        with naming(self.path):
            self._file.close()
            if self._board is not None:
                self._board.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The lines of a metrics file as dictionaries; a line that is none is an error that names it."""
    lines = Path(path).read_bytes().splitlines()
    return [_parsed(path, number, line) for number, line in enumerate(lines, 1)]


def _parsed(path: str | Path, number: int, line: bytes) -> dict[str, float]:
    try:
        values: dict[str, float] = json.loads(line)
        numbers = [value for value in values.values() if isinstance(value, int | float)]
        if "step" in values and len(numbers) == len(values):
            return values
    except (ValueError, AttributeError, RecursionError):
        pass
    raise FileError(f"{path}, line {number}: expected a step and values as JSON, got {line[:40]!r}")


def tensorboard_wanted() -> bool:
    """Whether the environment asks for TensorBoard; an error if it does and TensorBoard is not installed."""
    if os.environ.get(TENSORBOARD) != "1":
        return False
    _summary_writer_class()
    return True


def _summary_writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError("TensorBoard is not installed: pip install 'powerprop[tensorboard]'") from None
    return SummaryWriter


class TaskLog:
    """Lines of a learner that goes from task to task; one that was saved and goes on has the lines up to there.

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
