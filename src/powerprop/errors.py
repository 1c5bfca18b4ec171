"""How a command ends that cannot go on: in plain lines, one for each thing that is wrong, and an exit code."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from rich.console import Console

from powerprop import commands
from powerprop.data import DataCorrupt, DataNotFound
from powerprop.experiments.harness.experiment import RunError
from powerprop.experiments.harness.runner import JobsFailedError
from powerprop.files import FileError, cause
from powerprop.report import MissingMatplotlibError

INPUT_ERRORS = (RunError, FileError, DataNotFound, DataCorrupt, MissingMatplotlibError, *commands.ERRORS)
"""What the user can put right: shown as one line."""
OUTPUT = "standard output"
GOES_ON = "the same command goes on from here"


def end_with(error: BaseException) -> int:
    """Say on stderr why the command ends, and return its exit code; an error of the program itself is raised.

    2 for bad input, 1 if jobs failed or the machine did (a full disk, an output that nobody reads), 130 if interrupted.
    """
    if isinstance(error, INPUT_ERRORS):
        return _say(2, f"error: {error}")
    if isinstance(error, JobsFailedError):
        return _say(1, *failed_lines(error))
    # rich ends the program when the reader of the output has gone
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        return _say(1, f"error: {OUTPUT}: its reader has gone; {GOES_ON}")
    if isinstance(error, OSError):
        return _say(1, f"error: {cause(error, OUTPUT)}; {GOES_ON}")
    if isinstance(error, KeyboardInterrupt):
        return _say(130, f"interrupted; {GOES_ON}")
    raise error


def failed_lines(error: JobsFailedError) -> list[str]:
    """A traceback for each job that the program failed, a line for each that a file or the machine failed, the sum."""
    failures = error.failures
    lines = [f"--- {key}\n{failure.traceback}" for key, failure in failures.items() if failure.traceback]
    lines += [f"error: {key}: {failure.line}" for key, failure in failures.items() if not failure.traceback]
    if len(failures) > 1 or lines[0].startswith("---"):
        return [*lines, f"error: {error}"]
    return [f"{lines[0]}; {GOES_ON}"]


def _say(code: int, *lines: str) -> int:
    console = Console(stderr=True)
    with suppress(OSError):
        for line in lines:
            style = "red" if line.startswith("error: ") else None
            console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # the interpreter would try again when it ends, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
