"""How a command of the paper's package ends: as those of the library, and with what became of its jobs."""

from __future__ import annotations

from collections.abc import Callable

from powerprop.cli import ended, fail
from powerprop_paper.data import DataCorrupt, DataNotFound
from powerprop_paper.folder import RunError
from powerprop_paper.report import MissingMatplotlibError
from powerprop_paper.run import JobsFailedError

INPUT_ERRORS = (RunError, DataNotFound, DataCorrupt, MissingMatplotlibError)
"""What the user can put right: shown as one line."""


def exit_code(command: Callable[[], object]) -> int:
    """Run a command; 0, or the exit code for its error: 1 if jobs failed, else as `powerprop.cli.ended` has it."""
    try:
        return ended(command, INPUT_ERRORS)
    except JobsFailedError as error:
        return fail(1, *failed_lines(error))
    except SystemExit as error:
        if not error.code:  # tyro has shown its help, of which some may not be written yet
            return ended(lambda: None, INPUT_ERRORS)
        if not isinstance(error.__context__, BrokenPipeError):  # by which rich ends a program that nobody reads
            raise
        return fail(1, "error: standard output: its reader has gone; the same command goes on from here")


def failed_lines(error: JobsFailedError) -> list[str]:
    """A traceback for each job that the program failed, a line for each that a file or the machine failed, the sum."""
    failures = error.failures
    lines = [f"--- {key}\n{failure.traceback}" for key, failure in failures.items() if failure.traceback]
    lines += [f"error: {key}: {failure.line}" for key, failure in failures.items() if not failure.traceback]
    if len(failures) > 1 or lines[0].startswith("---"):
        return [*lines, f"error: {error}"]
    return [f"{lines[0]}; the same command goes on from here"]
