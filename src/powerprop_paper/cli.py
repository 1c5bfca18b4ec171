"""The commands of the paper's package: run, list, results, compare, show.

tyro reads them: the fields of a dataclass are the options, its docstrings their help. `run` has those of `Options` and
the settings of the experiment, which start from a preset.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_type_hints

import tyro
from rich.console import Console

from powerprop.cli import did_you_mean, ended, fail
from powerprop_paper.data import DataCorrupt, DataNotFound
from powerprop_paper.display import accept_every_character, print_table, say
from powerprop_paper.pages import write
from powerprop_paper.report.style import MissingMatplotlibError, matplotlib
from powerprop_paper.report.table import Table
from powerprop_paper.run import Experiment, JobsFailedError, Run, RunError
from powerprop_paper.settings import expected
from powerprop_paper.train.distributed import leave, process_group, under_torchrun
from powerprop_paper.train.log import TENSORBOARD, tensorboard_wanted

T = TypeVar("T")
INPUT_ERRORS = (RunError, DataNotFound, DataCorrupt, MissingMatplotlibError)
"""What the user can put right: shown as one line."""
EXPERIMENTS = {
    "oneshot": "mnist-oneshot mnist-optimisers cifar-oneshot",
    "generative": "generative generative-notmnist",
    "sparse": "sparse-training sparse-training-cifar",
    "language.oneshot": "gpt-oneshot",
    "language.sparse": "gpt-sparse",
    "language.texts": "gpt-texts",
    "imagenet": "imagenet",
    "split": "split-mnist permuted-mnist rotated-mnist split-cifar100 long-permuted-mnist long-permuted-mnist-300 "
    "endless-permuted-mnist",
    "baselines.strategies": "split-mnist-strategies permuted-mnist-strategies split-cifar100-strategies powerprop-ewc",
    "rates": "learning-rates",
    "stability": "rate-stability",
    "choosing": "choosing-alpha",
    "by_hand": "rate",
    "wide": "wide-sparse wide-sparse-cifar",
    "boundaries": "unknown-boundaries",
    "inference": "task-inference",
    "world": "continual-world",
}
"""The names of experiments by the module of their family; only the one that is asked for is imported."""
FAMILIES = {name: family for family, names in EXPERIMENTS.items() for name in names.split()}
PRESET = "cpu"
"""The preset unless another is asked for."""


@dataclass(frozen=True)
class Options:
    """What every run can be told."""

    preset: str = PRESET
    """where all settings start from"""
    out: Path | None = None
    """folder of the run; by default runs/NAME-PRESET"""
    workers: int | None = None
    """processes side by side, one thread each; by default all cores"""
    fresh: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """remove what an earlier run left in the folder, and start anew"""
    tensorboard: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """write the metrics of every training for TensorBoard too"""


def find(name: str) -> Experiment:
    """The experiment of this name; an unknown one is an error that lists the known."""
    if name not in FAMILIES:
        hint, known = did_you_mean(name, FAMILIES), ", ".join(FAMILIES)
        raise RunError(f"unknown experiment {name!r}{hint}; known are {known}")
    found: Experiment = import_module(f"powerprop_paper.experiments.{FAMILIES[name]}").EXPERIMENTS[name]
    return found


def main(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code."""
    return _ended(partial(_call, list(arguments)))


def script(experiment: Experiment) -> NoReturn:
    """What a script of one's own ends with, below `if __name__ == "__main__":`. It takes the options of `run NAME`."""
    sys.exit(_ended(lambda: run_experiment(experiment, *parse(experiment, sys.argv[1:]))))


def _ended(command: Callable[[], object]) -> int:
    accept_every_character()
    code = exit_code(command)
    if under_torchrun():
        leave(code)
    return code


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


def _call(arguments: list[str]) -> None:
    """The command that is asked for."""
    from powerprop_paper.commands import COMMANDS

    command, *rest = arguments
    if command != "run":
        read(COMMANDS[command], rest, f"powerprop {command}")()
    elif rest and not rest[0].startswith("-"):
        experiment = find(rest[0])
        run_experiment(experiment, *parse(experiment, rest[1:]))
    elif rest in (["-h"], ["--help"]):
        print("usage: powerprop run NAME [--preset PRESET] [options]; powerprop run NAME --help shows them")
        COMMANDS["list"]()()
    else:
        got = rest[0] if rest else ""
        raise RunError(f"run needs the name of an experiment first, got {got!r}; known are {', '.join(FAMILIES)}")


def run_experiment(experiment: Experiment, options: Options, config: Any) -> None:
    """Run an experiment, write its page, and show its first table."""
    if options.tensorboard:
        os.environ[TENSORBOARD] = "1"
    matplotlib()  # what is not installed is said before the work
    try:
        tensorboard_wanted()
    except ImportError as error:
        raise RunError(str(error)) from None
    out, console = options.out or own_folder(Path("runs"), experiment, options.preset), Console()
    run = Run(
        experiment, options.preset, config, out, workers=options.workers, console=console, fresh=options.fresh
    )  # fmt: skip
    with process_group() as ranks, run:
        try:
            page = experiment.main(config, run)
        except Exception as error:  # of a page that lacks the rows of jobs that failed: they are the cause
            raise (JobsFailedError(run.failures) if run.failures else error) from None
        if ranks.main:
            tables = [each for section in write(page, run)["sections"] for each in section["tables"]]
            if tables:
                print_table(console, Table.from_data(tables[0]).to_rich())
            say(console, f"Report: {out / 'report.html'}")
        if run.failures:
            raise JobsFailedError(run.failures)


def own_folder(out: Path, experiment: Experiment, preset: str) -> Path:
    """Where a run lives unless one says otherwise: `powerprop results` finds what `powerprop run` did."""
    return out / f"{experiment.name}-{preset}"


# Reading a command line.


def parse(experiment: Experiment, arguments: Sequence[str]) -> tuple[Options, Any]:
    """The options, and the settings of the preset with those that are given."""
    preset = next((" ".join(values) for option, values in _typed(arguments) if option == "--preset"), PRESET)
    start = preset_of(experiment, preset)
    parts: list[tuple[str, Any, Any]] = [
        ("run", Annotated[Options, tyro.conf.OmitArgPrefixes], field(default=Options(preset))),
        ("settings", Annotated[type(start), tyro.conf.OmitArgPrefixes], field(default=start)),
    ]
    both = make_dataclass("Both", parts, namespace={"__doc__": f"{experiment.title} ({experiment.paper})"})
    found: Any = read(both, arguments, f"powerprop run {experiment.name}", (Options(preset), start))
    return found.run, found.settings


def preset_of(experiment: Experiment, preset: str) -> Any:
    """The settings of this preset; an unknown one is an error that lists the known."""
    if preset not in experiment.presets:
        hint, known = did_you_mean(preset, experiment.presets), ", ".join(experiment.presets)
        raise RunError(f"{experiment.name} has no preset {preset!r}{hint}; it has {known}")
    return experiment.presets[preset]


def read(kind: type[T], arguments: Sequence[str], prog: str, starts: Sequence[Any] = ()) -> T:
    """What the arguments make of a dataclass; what tyro cannot read is an error of one line.

    starts: the parts of `kind` with the values that the options start from, if it has parts.
    """
    if {"-h", "--help"} & set(arguments):
        return tyro.cli(kind, args=arguments, prog=prog)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            found, unknown = tyro.cli(kind, args=arguments, prog=prog, return_unknown_args=True)
    except SystemExit:
        raise RunError(f"{_refusal(arguments, starts or (kind,))}; see {prog} --help") from None
    if unknown:
        known = [f"--{name.replace('_', '-')}" for part in starts or (kind,) for name in _kinds(part)]
        option = unknown[0].startswith("-")
        what = f"option {unknown[0]}{did_you_mean(unknown[0], known)}" if option else f"place for {unknown[0]!r}"
        raise RunError(f"{prog} has no {what}; see {prog} --help")
    return found


def _typed(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option as it was typed, with the values that follow it."""
    words = [word for each in arguments for word in (each.split("=", 1) if each.startswith("--") else [each])]
    starts = [number for number, word in enumerate(words) if word.startswith("--")]
    for start, end in pairwise([*starts, len(words)]):
        yield words[start], words[start + 1 : end]


def _refusal(arguments: Sequence[str], parts: Sequence[Any]) -> str:
    """What is wrong with a command line: each option is read alone, and the settings have the last word."""
    for part in parts:
        kinds, given = _kinds(part), {}
        for option, values in _typed(arguments):
            name = option.removeprefix("--").replace("-", "_")
            for known in {name, name.removeprefix("no_")} & kinds.keys():
                alone = make_dataclass("Alone", [(known, kinds[known], field(default=getattr(part, known, None)))])
                try:
                    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                        given[known] = getattr(tyro.cli(alone, args=[option, *values]), known)
                except SystemExit:
                    return f"{option} must be {expected(kinds[known])}, got {' '.join(values)!r}"
        try:
            replace(part, **given)
        except (ValueError, TypeError) as error:  # of a setting that cannot be; a class lacks its required arguments
            if not isinstance(part, type):
                return str(error)
            needed = [each.name for each in fields(part) if each.default is MISSING]
            return f"expected {' and '.join(needed) or 'nothing'}, got {' '.join(arguments)!r}"
    return f"cannot read {' '.join(arguments)!r}"


def _kinds(part: Any) -> dict[str, Any]:
    return get_type_hints(part if isinstance(part, type) else type(part), include_extras=True)
