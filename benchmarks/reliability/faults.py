"""Faults inside writes: this process kills itself, or its disk is full, at a chosen moment of a chosen write."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerprop import files
from powerprop.files import TEMPORARY
from powerprop_paper.train.log import MetricsLog

STAGES = ("half", "fsync", "replace", "replaced", "line")
"""Half of the bytes are written; all are, not yet on the disk; not yet in place; in place; half a line of metrics."""
DISK_STAGES = ("half", "fsync", "line")
"""Where a disk can be found full."""


@dataclass(frozen=True)
class StepOrFraction:
    """The `count`-th time that a stage is reached in writing a kind of file."""

    stage: str
    kind: str
    count: int = 1


def kind_of(path: str | Path) -> str:
    """`checkpoint.pt`, `*.png`, …: the name of a file, or of what a temporary file will be."""
    name = Path(path).name
    if TEMPORARY.fullmatch(name):
        name = name[1:].rpartition(".tmp")[0].rpartition(".")[0]
    return "*.png" if name.endswith(".png") else name


class Faults:
    """Watches the writes of this process.

    Args:
        at: the moment to strike at; None only counts.
        strike: "kill", or "full" for a full disk.
        record: file that gets all moments that were reached, when nothing strikes.
    """

    def __init__(self, at: StepOrFraction | None, strike: str = "kill", record: Path | None = None) -> None:
        self.at, self.how, self.record = at, strike, record
        self.reached: Counter[tuple[str, str]] = Counter()

    def here(self, stage: str, path: str | Path) -> bool:
        """Count; whether this is the moment."""
        kind = kind_of(path)
        self.reached[stage, kind] += 1
        return self.at == StepOrFraction(stage, kind, self.reached[stage, kind])

    def strike(self) -> None:
        if self.how == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """Put this watch around everything that writes the files of a run."""
        replace, fsync, write_line, faults = os.replace, os.fsync, MetricsLog.write, self

        class Watched(io.BufferedWriter):
            def write(self, content: Any) -> int:
                if faults.here("half", self.name):
                    super().write(bytes(content)[: len(content) // 2])
                    self.flush()
                    faults.strike()
                return super().write(content)

        def watched_open(path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            if mode == "wb":
                return Watched(io.FileIO(path, "wb"))
            return builtins.open(path, mode, *rest, **options)

        def watched_fsync(number: int) -> None:
            if faults.here("fsync", os.readlink(f"/proc/self/fd/{number}")):
                faults.strike()
            fsync(number)

        def watched_replace(source: Any, target: Any) -> None:
            if faults.here("replace", target):
                faults.strike()
            replace(source, target)
            if faults.here("replaced", target):
                faults.strike()

        def watched_line(log: MetricsLog, step: int, **values: float) -> None:
            if faults.here("line", log.path):
                log._file.write(json.dumps({"step": step, **values}).encode()[:9])
                log._file.flush()
                with files.naming(log.path):
                    faults.strike()
            write_line(log, step, **values)

        files.open = watched_open  # type: ignore[attr-defined]
        os.replace, os.fsync = watched_replace, watched_fsync  # type: ignore[assignment]
        MetricsLog.write = watched_line  # type: ignore[method-assign]

    def finish(self) -> None:
        """Write down what was reached."""
        if self.record is not None:
            counts = [[stage, kind, count] for (stage, kind), count in self.reached.items()]
            self.record.write_text(json.dumps(counts))
