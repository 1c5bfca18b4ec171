"""What tyro says of a command line that it cannot read, in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import signature
from itertools import dropwhile, takewhile

from powerprop.commands.names import did_you_mean


def in_one_line(text: str, arguments: list[str], function: Callable[..., None] | None) -> str:
    """What tyro's box of an error says, without its frame and its help, and what was probably meant.

    function: the command that was asked for, None if none was.
    """
    lines = [line.strip("│ ") for line in text.splitlines()[1:] if line.strip("│ ")]  # the first one is its title
    body = takewhile(_says_something, dropwhile(lambda line: not _says_something(line), lines))
    message = " ".join(body)
    if bad := re.match(r"Error parsing (--[\w-]+)", message):
        option = bad[1]
        values = takewhile(lambda each: not each.startswith("--"), arguments[_index(option, arguments) + 1 :])
        expected = next((line for line in lines if line.startswith(f"{option} ")), option)
        return f"expected {expected}, got {' '.join(values)!r}"
    if unknown := re.match(r"Unrecognized options: (--[\w-]+)", message):
        names = ("help", *signature(function).parameters) if function else ("help", "version")
        hint = did_you_mean(unknown[1], [f"--{name}".replace("_", "-") for name in names])
        return f"{arguments[0] if function else 'powerprop'} has no option {unknown[1]}{hint}; see powerprop --help"
    return message or text.strip()


def _says_something(line: str) -> bool:
    return bool(line.strip("─-╭╮╰╯ "))


def _index(option: str, arguments: list[str]) -> int:
    return next((i for i, each in enumerate(arguments) if each.replace("_", "-").startswith(option)), len(arguments))
