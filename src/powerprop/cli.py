"""The command line: one table of commands, and what becomes of its errors."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial, wraps
from typing import Any

import tyro

import powerprop
from powerprop import commands
from powerprop.commands.compare import compare
from powerprop.commands.listing import list_experiments
from powerprop.commands.names import did_you_mean
from powerprop.commands.options import all_options, asked_preset, check_run, with_dataset, with_strategies
from powerprop.commands.output import accept_every_character
from powerprop.commands.report import report
from powerprop.commands.run import results, run
from powerprop.commands.usage import in_one_line
from powerprop.errors import end_with
from powerprop.experiments.harness.experiment import RunError

COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_experiments,
    "run": run,
    "report": report,
    "results": results,
    "compare": compare,
    **commands.COMMANDS,
}


def main(args: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, or what `end_with` makes of the error."""
    accept_every_character()
    try:
        call(list(sys.argv[1:] if args is None else args))
        sys.stdout.flush()
    except BaseException as error:
        return end_with(error)
    return 0


def call(arguments: list[str]) -> None:
    """Find out what is not known, then let tyro read the rest and call the command."""
    if arguments == ["--version"]:
        print(f"powerprop {powerprop.__version__}")
        return
    arguments = with_dataset(with_strategies(arguments))
    check_command(arguments)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            chosen = parse(arguments)
    except SystemExit as end:
        if end.code in (0, None):
            return
        raise RunError(in_one_line(said.getvalue(), arguments, COMMANDS.get(arguments[0]))) from None
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
