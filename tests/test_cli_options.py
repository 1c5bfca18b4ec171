"""The settings of an experiment are its options: their help, their defaults in each preset, their completion."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import asdict, fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from powerprop.cli import main, parse
from powerprop.commands.names import did_you_mean
from powerprop.commands.options import OF_EVERY_RUN, default_hint, setting_helps
from powerprop.commands.run import configured
from powerprop.experiments import EXPERIMENTS
from powerprop.experiments.harness.pages import command


def settings(*arguments: str) -> dict[str, Any]:
    """The settings of a command line."""
    options = parse(list(arguments)).args[0]  # type: ignore[attr-defined]
    return asdict(configured(options.experiment, asdict(options.settings)))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_setting_is_explained_and_shows_its_default_in_each_preset(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    experiment = EXPERIMENTS[name]
    helps = setting_helps(experiment.config)
    assert main(["run", name, "--help"]) == 0
    shown = capsys.readouterr().out
    for each in fields(experiment.config):
        assert f"--{each.name.replace('_', '-')}" in shown
        assert helps[each.name].split()[0] in shown
        assert default_hint(experiment.presets, each.name) in " ".join(shown.split())
        assert each.name not in (*OF_EVERY_RUN, "preset", "tensorboard"), "a setting must not hide an option"


def test_defaults_differ_by_preset() -> None:
    presets = EXPERIMENTS["mnist-oneshot"].presets
    assert default_hint(presets, "steps") == "(smoke: 40; demo: 8000; cpu: 20000; paper: 50000)"
    assert default_hint(presets, "batch") == "(default: 60)"
    assert default_hint(presets, "alphas") == "(smoke: 1 2; demo: 1 2 3; cpu: 1 2 3 4 5; paper: 1 2 3 4 5)"
    long = default_hint(EXPERIMENTS["long-permuted-mnist"].presets, "grid")
    assert long.startswith("(smoke: 0.95 0.9025 … 0.00592 (100 values); ")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_without_options_a_preset_is_as_it_is(name: str) -> None:
    for preset, config in EXPERIMENTS[name].presets.items():
        assert settings("run", name, "--preset", preset) == asdict(config)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_command_on_a_page_makes_the_same_run(name: str) -> None:
    presets = EXPERIMENTS[name].presets
    for preset, config in presets.items():
        changed = replace(config, seeds=7, **({"lr": 0.0625} if "lr" in asdict(config) else {}))
        words = shlex.split(command(name, preset, changed))
        assert words[0] == "powerprop"
        assert settings(*words[1:]) == asdict(changed)


def test_any_setting_can_be_set() -> None:
    start = asdict(EXPERIMENTS["permuted-mnist"].presets["smoke"])
    words = (
        "--preset=smoke --steps 100 --alphas 1 2 --no-scale-lr --infer_at --search binary --gamma 1e-1 --decay training"
    )
    found = settings("run", "permuted-mnist", *words.split())
    changed = {"steps": 100, "alphas": (1.0, 2.0), "scale_lr": False, "search": "binary", "gamma": 0.1}
    assert found == start | changed | {"decay": ("training",), "infer_at": ()}


def test_an_undocumented_setting_is_an_error_of_ours() -> None:
    described = "Settings.\n\n    Args:\n        steps: of it."
    config = make_dataclass("Config", [("steps", int), ("rate", float)], namespace={"__doc__": described})
    with pytest.raises(TypeError, match="does not say what rate is"):
        setting_helps(config)


def test_what_was_probably_meant() -> None:
    assert did_you_mean("--step", ["--steps", "--seeds"]) == " (did you mean --steps?)"
    assert did_you_mean("mnist", ["split-mnist", "mnist-oneshot", "imagenet"]) == (
        " (did you mean split-mnist or mnist-oneshot?)"
    )
    assert did_you_mean("tea", ["steps"]) == ""


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_the_experiments(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tyro-print-completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in EXPERIMENTS)
    assert "--retrain-steps" in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_experiments_and_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tyro-print-completion", "bash"])
    (tmp_path / "completion").write_text(capsys.readouterr().out)

    def completed(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in words)
        script = f"source {tmp_path}/completion; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
        script += "_tyro_powerprop; echo ${COMPREPLY[@]}"
        return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()

    split = sorted(name for name in EXPERIMENTS if name.startswith("split-"))
    assert sorted(completed("powerprop", "run", "split-")) == split
    assert completed("powerprop", "run", "split-mnist", "--retr") == ["--retrain-steps"]
