"""Metrics as JSON lines, and to TensorBoard when asked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

TENSORBOARD = "POWERPROP_TENSORBOARD"


class MetricsLog:
    """One line of JSON per call of `write`; `position` and `rewind` make it part of a checkpoint.

    Lines hold the step and the values only, no clock, so that a resumed run writes the same bytes.

    Args:
        path: the file; TensorBoard events go to the folder beside it.
        tensorboard: also write TensorBoard scalars (needs the extra `tensorboard`); by default if the environment
            variable POWERPROP_TENSORBOARD is 1, which reaches the worker processes of a run too.
    """

    def __init__(self, path: str | Path, tensorboard: bool | None = None) -> None:
        if tensorboard is None:
            tensorboard = os.environ.get(TENSORBOARD) == "1"
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")  # noqa: SIM115 - stays open until close()
        self._board: Any = _summary_writer(self.path.parent / "tensorboard") if tensorboard else None

    def write(self, step: int, **values: float) -> None:
        """Add one line; it is handed to the operating system at once."""
        self._file.write(json.dumps({"step": step, **values}).encode() + b"\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def position(self) -> int:
        """Bytes written so far, all of them on the disk."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def rewind(self, position: int) -> None:
        """Drop everything after `position`: lines of steps that are about to be done again."""
        size = self.path.stat().st_size
        if size < position:
            raise ValueError(
                f"{self.path} has {size} bytes, but its checkpoint was made at {position}: it was cut short"
            )
        self._file.truncate(position)
        self._file.seek(position)

    def close(self) -> None:
        """Close the file and flush TensorBoard."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The lines of a metrics file as dictionaries."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError("TensorBoard is not installed: pip install 'powerprop[tensorboard]'") from None
    return SummaryWriter(str(folder))
