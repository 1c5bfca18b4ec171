"""The command line: one table of commands, and what becomes of its errors."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from functools import partial, wraps
from inspect import signature
from itertools import dropwhile, takewhile
from typing import Any

import tyro
from rich.console import Console

import powerprop
from powerprop.commands.compare import compare
from powerprop.commands.listing import list_experiments
from powerprop.commands.names import did_you_mean
from powerprop.commands.options import all_options, asked_preset, check_run
from powerprop.commands.output import accept_every_character, say
from powerprop.commands.report import report
from powerprop.commands.run import results, run
from powerprop.data import DataCorrupt, DataNotFound
from powerprop.experiments.harness.experiment import RunError
from powerprop.experiments.harness.runner import JobsFailedError
from powerprop.files import FileError
from powerprop.report import MissingMatplotlibError

COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_experiments,
    "run": run,
    "report": report,
    "results": results,
    "compare": compare,
}

INPUT_ERRORS = (RunError, FileError, DataNotFound, DataCorrupt, MissingMatplotlibError)
"""What the user can put right: shown as one line."""


def main(args: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 if jobs failed, 2 for bad input, 130 if interrupted."""
    accept_every_character()
    try:
        call(list(sys.argv[1:] if args is None else args))
        sys.stdout.flush()
    except JobsFailedError as error:
        for key, traceback in error.tracebacks.items():
            say(Console(stderr=True), f"--- {key}\n{traceback.strip()}")
        return _failed(str(error), 1)
    except INPUT_ERRORS as error:
        return _failed(str(error))
    except BrokenPipeError:
        _write_no_more()  # whoever read what we print has seen enough
        return 0
    except OSError as error:
        _write_no_more()
        return _failed(": ".join(str(part) for part in (error.filename, error.strerror or error) if part))
    except KeyboardInterrupt:
        say(Console(stderr=True), "interrupted; the same command goes on from here")
        return 130
    return 0


def call(arguments: list[str]) -> None:
    """Find out what is not known, then let tyro read the rest and call the command."""
    if arguments == ["--version"]:
        print(f"powerprop {powerprop.__version__}")
        return
    check_command(arguments)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            chosen = parse(arguments)
    except SystemExit as end:
        if end.code in (0, None):
            return
        raise RunError(in_one_line(said.getvalue(), arguments)) from None
    chosen()


def check_command(arguments: list[str]) -> None:
    """Refuse a command that is not known, and of `run` all names that are not."""
    if not arguments:
        raise RunError(f"expected a command: {', '.join(COMMANDS)}; see powerprop --help")
    name = arguments[0]
    if not name.startswith("-") and name not in COMMANDS:
        raise RunError(f"unknown command {name!r}{did_you_mean(name, COMMANDS)}; known are {', '.join(COMMANDS)}")
    if name == "run":
        check_run(arguments[1:])


def parse(arguments: list[str]) -> Callable[[], None]:
    """The command that is asked for, with its arguments, to be called."""
    commands = {name: _later(function) for name, function in COMMANDS.items()}

    def run_later(options: Any) -> Callable[[], None]:
        return partial(run, options)

    run_later.__doc__ = run.__doc__
    run_later.__annotations__ = {"options": all_options(asked_preset(arguments))}
    commands["run"] = run_later
    chosen: Callable[[], None] = tyro.extras.subcommand_cli_from_dict(commands, prog="powerprop", args=arguments)
    return chosen


def _later(function: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """The function with the same arguments that calls it when its result is called: errors of tyro end before."""

    @wraps(function)
    def given(*args: Any, **kwargs: Any) -> Callable[[], None]:
        return partial(function, *args, **kwargs)

    return given


def in_one_line(text: str, arguments: list[str]) -> str:
    """What tyro's box of an error says, without its frame and its help, and what was probably meant."""
    lines = [line.strip("│ ") for line in text.splitlines()[1:] if line.strip("│ ")]  # the first one is its title
    body = takewhile(_says_something, dropwhile(lambda line: not _says_something(line), lines))
    message = " ".join(body)
    if bad := re.match(r"Error parsing (--[\w-]+)", message):
        option = bad[1]
        values = takewhile(lambda each: not each.startswith("--"), arguments[_index(option, arguments) + 1 :])
        expected = next((line for line in lines if line.startswith(f"{option} ")), option)
        return f"expected {expected}, got {' '.join(values)!r}"
    if unknown := re.match(r"Unrecognized options: (--[\w-]+)", message):
        function = COMMANDS.get(arguments[0])
        names = ("help", *signature(function).parameters) if function else ("help", "version")
        hint = did_you_mean(unknown[1], [f"--{name}".replace("_", "-") for name in names])
        return f"{arguments[0] if function else 'powerprop'} has no option {unknown[1]}{hint}; see powerprop --help"
    return message or text.strip()


def _says_something(line: str) -> bool:
    return bool(line.strip("─-╭╮╰╯ "))


def _index(option: str, arguments: list[str]) -> int:
    return next((i for i, each in enumerate(arguments) if each.replace("_", "-").startswith(option)), len(arguments))


def _failed(message: str, code: int = 2) -> int:
    Console(stderr=True).print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    return code


def _write_no_more() -> None:
    """Nothing can be written to the standard output: let the interpreter not try again when it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
