"""The settings of an experiment are its options: their help, and their defaults in each preset."""

from __future__ import annotations

import ast
import inspect
import shlex
import sys
from dataclasses import asdict, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from powerprop.cli import did_you_mean, main
from powerprop_paper.cli import FAMILIES, Options, find, parse
from powerprop_paper.pages import command
from powerprop_paper.run import Run


def settings(name: str, *arguments: str) -> dict[str, Any]:
    """The settings of a command line."""
    return asdict(parse(find(name), arguments)[1])


def docstrings(kind: type) -> dict[str, str]:
    """The text below each field of a dataclass, and of those it is derived from."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if "__dataclass_fields__" not in vars(each):
            continue
        (body,) = (n.body for n in ast.walk(ast.parse(inspect.getsource(each))) if isinstance(n, ast.ClassDef))
        for one, two in pairwise(body):
            if isinstance(one, ast.AnnAssign) and isinstance(two, ast.Expr) and isinstance(two.value, ast.Constant):
                found[one.target.id] = two.value.value  # type: ignore[union-attr, assignment]
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_every_setting_is_explained_and_shows_its_default(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    config = find(name).presets["smoke"]
    texts = docstrings(type(config))
    assert main(["run", name, "--preset", "smoke", "--help"]) == 0
    shown = "".join(capsys.readouterr().out.replace("│", "").split())
    for each in fields(config):
        assert f"--{each.name.replace('_', '-')}" in shown
        assert "".join(texts[each.name].split()) in shown, each.name
        value = getattr(config, each.name)
        if value not in ((), None) and not isinstance(value, bool):
            values = value if isinstance(value, tuple) else (value,)
            assert f"(default:{shlex.join(map(str, values)).replace(' ', '')})" in shown, each.name
    assert not {each.name for each in fields(config)} & {each.name for each in fields(Options)}


def test_help_has_the_defaults_of_the_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "mnist-oneshot", "--preset=paper", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "training steps (default: 50000)" in shown


@pytest.mark.parametrize("name", FAMILIES)
def test_the_command_on_a_page_makes_the_same_run(name: str, tmp_path: Path) -> None:
    for preset, config in find(name).presets.items():
        assert parse(find(name), ["--preset", preset]) == (Options(preset), config)
        changed = replace(config, seeds=7, **({"lr": 0.0625} if hasattr(config, "lr") else {}))
        words = shlex.split(command(Run(find(name), preset, changed, tmp_path, console=Console(quiet=True))))
        assert words[:3] == ["powerprop", "run", name]
        assert settings(name, *words[3:]) == asdict(changed)


def test_any_setting_can_be_set() -> None:
    start = asdict(find("permuted-mnist").presets["smoke"])
    words = "--preset=smoke --steps 100 --alphas 1 2 --no-matrix --infer_at --search binary --gamma 1e-1"
    found = settings("permuted-mnist", *words.split())
    changed = {"steps": 100, "alphas": (1.0, 2.0), "matrix": False, "search": "binary", "gamma": 0.1, "infer_at": ()}
    assert found == start | changed


def test_options_of_every_run(tmp_path: Path) -> None:
    words = ["--preset", "smoke", "--out", str(tmp_path), "--workers=2", "--fresh", "--tensorboard"]
    assert parse(find("mnist-oneshot"), words)[0] == Options("smoke", tmp_path, 2, True, True)


def test_what_was_probably_meant() -> None:
    assert did_you_mean("--step", ["--steps", "--seeds"]) == " (did you mean --steps?)"
    known = ["split-mnist", "mnist-oneshot", "imagenet"]
    assert did_you_mean("mnist", known) == " (did you mean split-mnist or mnist-oneshot?)"
    assert did_you_mean("tea", ["steps"]) == ""


def test_one_experiment_imports_its_family_alone() -> None:
    before = {name: module for name, module in sys.modules.items() if name.startswith("powerprop_paper.experiments.")}
    for name in before:
        del sys.modules[name]
    try:
        find("mnist-oneshot")
        loaded = {name.split(".")[2] for name in sys.modules if name.startswith("powerprop_paper.experiments.")}
        assert loaded == {"oneshot"}
    finally:
        sys.modules.update(before)
