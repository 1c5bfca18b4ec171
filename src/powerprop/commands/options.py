"""The options of `powerprop run NAME`: those of every run, and every setting of the experiment's `Config`."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, make_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_type_hints

import tyro

from powerprop.commands.names import did_you_mean
from powerprop.experiments import EXPERIMENTS, Experiment
from powerprop.experiments.harness.experiment import RunError

PRESET = "cpu"
"""The preset unless another is asked for."""
LONG = 6
"""Lists of more values than this are shortened in the help."""
OF_STRATEGIES = "-strategies"
"""The end of the name of an experiment that compares methods on the benchmark of another."""

OF_EVERY_RUN: dict[str, Any] = {
    "workers": Annotated[
        int | None,
        tyro.conf.arg(
            help="processes side by side, one thread each.", metavar="INT", help_behavior_hint="(default: all cores)"
        ),
    ],
    "out": Annotated[
        Path | None,
        tyro.conf.arg(help="folder of the run.", metavar="PATH", help_behavior_hint="(default: runs/NAME-PRESET)"),
    ],
    "fresh": Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.arg(help="remove what an earlier run left in the folder, and start anew.", help_behavior_hint=""),
    ],
    "tensorboard": Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.arg(help="write the metrics of every training for TensorBoard too.", help_behavior_hint=""),
    ],
}
"""The options that are no settings."""


def options_class(experiment: Experiment, preset: str) -> type:
    """The options as a dataclass for tyro, the settings with the values of the preset as defaults."""
    presets = Literal[tuple(experiment.presets)]  # type: ignore[valid-type]
    options = {"preset": Annotated[presets, tyro.conf.arg(help="where all settings start from.")], **OF_EVERY_RUN}
    defaults = {"preset": preset, "workers": None, "out": None, "fresh": False, "tensorboard": False}
    parts: list[Any] = [(name, kind, field(default=defaults[name])) for name, kind in options.items()]
    settings = settings_class(experiment, preset)
    parts.append(("settings", Annotated[settings, tyro.conf.OmitArgPrefixes], field(default_factory=settings)))
    return make_dataclass("Options", parts, namespace={"experiment": experiment, "__doc__": experiment.title})


def settings_class(experiment: Experiment, preset: str) -> type:
    """The fields of `Config` alone: without its checks, whose errors are ours to show."""
    kinds, helps = get_type_hints(experiment.config), setting_helps(experiment.config)
    parts = [
        (
            each.name,
            Annotated[
                kinds[each.name],
                tyro.conf.arg(help=helps[each.name], help_behavior_hint=default_hint(experiment.presets, each.name)),
            ],
            field(default=getattr(experiment.presets[preset], each.name)),
        )
        for each in fields(experiment.config)
    ]
    return make_dataclass("Settings", parts, namespace={"__doc__": "Settings of the experiment, and their values."})


def setting_helps(config: type) -> dict[str, str]:
    """What the `Args:` of the docstring say of each setting; one that is not there is an error of ours."""
    described = inspect.getdoc(config) or ""
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", described.partition("Args:\n")[2], flags=re.MULTILINE)
    helps = {name: " ".join(text.split()).replace("`", "") for name, text in entries}
    if missing := [each.name for each in fields(config) if each.name not in helps]:
        raise TypeError(f"{config.__module__}.Config does not say what {', '.join(missing)} is")
    return helps


def default_hint(presets: Mapping[str, Any], name: str) -> str:
    """`(default: 60)`, or `(smoke: 40; cpu: 20000; paper: 50000)` where presets differ."""
    values = {preset: _as_typed(getattr(config, name)) for preset, config in presets.items()}
    if len(set(values.values())) == 1:
        return f"(default: {values.popitem()[1]})"
    return f"({'; '.join(f'{preset}: {value}' for preset, value in values.items())})"


def _as_typed(value: Any) -> str:
    if not isinstance(value, tuple):
        return f"{value:g}" if isinstance(value, float) else shlex.quote(str(value))
    if len(value) > LONG:
        return f"{_as_typed(value[:2])} … {_as_typed(value[-1])} ({len(value)} values)"
    return " ".join(_as_typed(each) for each in value) or "none"


def all_options(preset: str) -> Any:
    """The options of every experiment as one type, a sub-command each."""
    kinds = []
    for name, each in EXPERIMENTS.items():
        start = preset if preset in each.presets else next(iter(each.presets))
        kind = options_class(each, start)
        description = f"{each.title} ({each.paper})"
        if f"{name}{OF_STRATEGIES}" in EXPERIMENTS:
            description += f". With --strategy NAME ... or all: see {name}{OF_STRATEGIES}"
        kinds.append(Annotated[kind, tyro.conf.subcommand(name, description=description)])
    return Annotated[Union[tuple(kinds)], tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes]  # noqa: UP007


def find(name: str) -> Experiment:
    """The experiment of this name; an unknown one is an error that lists the known."""
    if name not in EXPERIMENTS:
        raise RunError(
            f"unknown experiment {name!r}{did_you_mean(name, EXPERIMENTS)}; known are {', '.join(EXPERIMENTS)}"
        )
    return EXPERIMENTS[name]


def find_preset(experiment: Experiment, preset: str) -> Any:
    """The configuration of this preset; an unknown one is an error that lists the known."""
    if preset not in experiment.presets:
        known = ", ".join(experiment.presets)
        raise RunError(
            f"{experiment.name} has no preset {preset!r}{did_you_mean(preset, experiment.presets)}; it has {known}"
        )
    return experiment.presets[preset]


def asked_preset(arguments: Sequence[str]) -> str:
    """The preset that a command line asks for; the settings start from its values."""
    for number, each in enumerate(arguments):
        if each == "--preset" and number + 1 < len(arguments):
            return arguments[number + 1]
        if each.startswith("--preset="):
            return each.partition("=")[2]
    return PRESET


def with_strategies(arguments: Sequence[str]) -> list[str]:
    """`run split-mnist --strategy EWC` is `run split-mnist-strategies --strategy EWC`, its table of methods."""
    command, name = [*arguments, "", ""][:2]
    table = f"{name}{OF_STRATEGIES}"
    asked = any(each.partition("=")[0] == "--strategy" for each in arguments)
    return [command, table, *arguments[2:]] if command == "run" and asked and table in EXPERIMENTS else list(arguments)


def with_dataset(arguments: Sequence[str]) -> list[str]:
    """`run generative --dataset notmnist` is `run generative-notmnist --dataset notmnist`, with its own presets."""
    command, name = [*arguments, "", ""][:2]
    typed = " ".join(arguments[2:]).replace("=", " ").split()
    asked = next((value for option, value in pairwise(typed) if option == "--dataset"), "")
    own = f"{name}-{asked}"
    return [command, own, *arguments[2:]] if command == "run" and own in EXPERIMENTS else list(arguments)


def check_run(arguments: Sequence[str]) -> None:
    """Find out experiments, presets and options that are not known; `arguments` follow `run`."""
    name = next(iter(arguments), "")
    if name in ("-h", "--help"):
        return
    if not name or name.startswith("-"):
        raise RunError(f"run needs the name of an experiment first, got {name!r}; known are {', '.join(EXPERIMENTS)}")
    experiment = find(name)
    known = option_names(experiment)
    for each in arguments[1:]:
        option = each.partition("=")[0].replace("_", "-")
        if each.startswith("--") and option not in known and not option.startswith("--tyro-"):
            raise RunError(
                f"{name} has no option {each.partition('=')[0]}{did_you_mean(option, known)}"
                f"; see powerprop run {name} --help"
            )
    find_preset(experiment, asked_preset(arguments))


def option_names(experiment: Experiment) -> list[str]:
    """Every option of an experiment as it is typed."""
    kinds = get_type_hints(experiment.config)
    names = ["help", "preset", *OF_EVERY_RUN, *kinds]
    names += [f"no-{name}" for name, kind in kinds.items() if kind is bool]
    return [f"--{name}".replace("_", "-") for name in names]
