"""The command `powerprop`: what is in a file of weights, and what can be made of it.

    powerprop inspect net.safetensors
    powerprop prune net.safetensors small.safetensors --sparsity 0.95
    powerprop export small.safetensors --model my_package.nets:make --shape 3 32 32
    powerprop bench-model small.safetensors --model my_package.nets:make --shape 3 32 32
    powerprop advise my_model.py:make --goal "smaller file"

`run`, `list`, `results`, `compare` and `show` are of the paper's experiments, `powerprop_paper`.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import NoReturn

import powerprop
from powerprop.advise import GOALS
from powerprop.allocate import DISTRIBUTIONS
from powerprop.commands import COMMANDS, SUFFIXES, CommandError
from powerprop.export.programs import MissingOnnxError
from powerprop.files import FileError, cause

PAPER = {
    "run": "run an experiment of the paper, and write its page",
    "list": "the experiments, what they show, their presets",
    "results": "run experiments and put their pages into the documentation",
    "compare": "two runs of an experiment side by side",
    "show": "the tables of finished runs",
}


# The command line.


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if args is None else args)
    if arguments and arguments[0] in PAPER:
        return _paper(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a name of a tensor may have any character
    return ended(partial(_call, arguments), (CommandError, MissingOnnxError))


def _paper(arguments: list[str]) -> int:
    """A command of the paper's package, if what that needs is there."""
    try:
        paper = importlib.import_module("powerprop_paper.cli")
    except ModuleNotFoundError as error:
        what = f"powerprop {arguments[0]} is one of the paper's experiments"
        return fail(2, f"error: {what}, which need {error.name}: pip install powerprop[paper]")
    code: int = paper.main(arguments)
    return code


def ended(command: Callable[[], object], refused: tuple[type[Exception], ...]) -> int:
    """Run a command; 0, or the exit code for its error, which is one line on stderr.

    2 for input that is `refused`, 1 if the machine failed (a full disk, an output that nobody reads), 130 if
    interrupted. An error of the program itself is raised.
    """
    wrong: tuple[type[Exception], ...] = (FileError, *refused)
    try:
        command()
        sys.stdout.flush()
    except wrong as error:
        return fail(2, f"error: {error}")
    except OSError as error:
        gone = isinstance(error, BrokenPipeError) and error.filename is None
        why = "standard output: its reader has gone" if gone else cause(error, "standard output")
        return fail(1, f"error: {why}; the same command goes on from here")
    except KeyboardInterrupt:
        return fail(130, "interrupted; the same command goes on from here")
    return 0


def fail(code: int, *lines: str) -> int:
    """Say on stderr why a command ends, and return its exit code."""
    with suppress(OSError):
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # the interpreter would try again when it ends, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


class _Parser(argparse.ArgumentParser):
    """Whose errors are ours to show, in one line."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message}; see {self.prog} --help")


def _call(arguments: list[str]) -> None:
    known = [*COMMANDS, *PAPER]
    if not arguments:
        raise CommandError(f"expected a command: {', '.join(known)}; see powerprop --help")
    if not arguments[0].startswith("-") and arguments[0] not in known:
        hint = did_you_mean(arguments[0], known)
        raise CommandError(f"unknown command {arguments[0]!r}{hint}; known are {', '.join(known)}")
    try:
        options = vars(_parser().parse_args(arguments))
    except SystemExit:  # of --help and --version
        return
    options.pop("command")(**options)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean --steps or --tuning-seeds?)`, or nothing if no known name is like it."""
    plain = {each.lstrip("-"): each for each in known}
    word = name.lstrip("-")
    alike = get_close_matches(word, plain, n=2, cutoff=0.6)
    alike += [each for each in plain if word and word in each and each not in alike]
    return f" (did you mean {' or '.join(plain[each] for each in alike[:2])}?)" if alike else ""


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("powerprop", description="Networks that train sparse, stay accurate and never forget.")
    parser.add_argument("--version", action="version", version=f"powerprop {powerprop.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        text = (command.__doc__ or "").partition("\n")[0]
        each = commands.add_parser(name, help=text[0].lower() + text[1:-1], description=command.__doc__)
        each.set_defaults(command=command)
        if name != "advise":
            each.add_argument("file", type=Path, help="safetensors, or a torch checkpoint (.pt) of tensors alone")
        _add_options(each, name)
    for name, text in PAPER.items():
        commands.add_parser(name, help=text)
    return parser


def _add_options(parser: argparse.ArgumentParser, command: str) -> None:
    """The options of a command, named as the arguments of its function."""
    made_by, add = "package.module:function, or file.py:function, that makes the network", parser.add_argument
    if command == "prune":
        by_name = "by default tensors of two or more dimensions that are no embeddings by their name"
        add("out", type=Path, help="the file to write; `powerprop.load` reads it")
        add("--sparsity", type=float, default=0.9, help="fraction of the weights to remove (0.9)")
        add("--distribution", choices=sorted(DISTRIBUTIONS), default="uniform", help="over the layers (uniform)")
        add("--where", nargs="+", default=(), help=f"names of weights, * stands for anything; {by_name}")
        add("--model", help=f"{made_by}, to know its weights by its layers instead")
    elif command == "export":
        kinds = "sparse (weights with the measured plan, for powerprop.export.load), onnx, pt2 (torch.export) or dense"
        add("--format", choices=list(SUFFIXES), default="sparse", help=f"{kinds} (safetensors, needs no --model)")
        add("--model", help=made_by)
        add("--shape", type=int, nargs="+", default=(), help="of one input, without the batch: 784, or 3 32 32")
        add("--batch", type=int, default=1, help="inputs at a time, to be fast at (1)")
        add("--out", type=Path, help="the file to write; by default beside FILE, with another ending")
    elif command == "bench-model":
        add("--model", required=True, help=made_by)
        add("--shape", type=int, nargs="+", required=True, help="of one input, without the batch: 784, or 3 32 32")
        add("--batches", type=int, nargs="+", default=(1, 64), help="inputs at a time (1 64)")
    elif command == "advise":
        add("model", help=made_by)
        add("--goal", choices=list(GOALS), required=True, help="what matters most")
