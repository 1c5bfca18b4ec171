"""The command line: what it prints, what it writes, and how it answers bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import standin
from powerprop import cli, data
from powerprop.cli import main
from powerprop.commands import run as run_command
from powerprop.data import DataNotFound
from powerprop.experiments import EXPERIMENTS

KNOWN, COMMANDS = ", ".join(EXPERIMENTS), ", ".join(cli.COMMANDS)
SEE = "; see powerprop run mnist-oneshot --help"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two jobs."""
    out = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load", standin.load)
        arguments = ["--preset", "smoke", "--alphas", "1", "2", "--seeds", "1", "--workers", "1", "--out", str(out)]
        assert main(["run", "mnist-optimisers", *arguments]) == 0
    return out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], f"expected a command: {COMMANDS}; see powerprop --help"),
        (["lst"], f"unknown command 'lst' (did you mean list?); known are {COMMANDS}"),
        (["--versio"], "powerprop has no option --versio (did you mean --version?); see powerprop --help"),
        (["run"], f"run needs the name of an experiment first, got ''; known are {KNOWN}"),
        (["run", "--seeds", "1"], f"run needs the name of an experiment first, got '--seeds'; known are {KNOWN}"),
        (
            ["run", "mnist-onshot"],
            f"unknown experiment 'mnist-onshot' (did you mean mnist-oneshot or cifar-oneshot?); known are {KNOWN}",
        ),
        (["results", "tea"], f"unknown experiment 'tea'; known are {KNOWN}"),
        (
            ["run", "mnist-oneshot", "--preset", "cpuu"],
            "mnist-oneshot has no preset 'cpuu' (did you mean cpu?); it has smoke, demo, cpu, paper",
        ),
        (
            ["run", "mnist-oneshot", "--alpha", "2"],
            f"mnist-oneshot has no option --alpha (did you mean --alphas?){SEE}",
        ),
        (["run", "mnist-oneshot", "--stepz=2"], f"mnist-oneshot has no option --stepz (did you mean --steps?){SEE}"),
        (["run", "mnist-oneshot", "--only", "rigl*"], f"mnist-oneshot has no option --only{SEE}"),
        (["run", "mnist-oneshot", "stray"], "Unrecognized options: stray"),
        (["run", "mnist-oneshot", "--steps", "many"], "expected --steps INT, got 'many'"),
        (["run", "mnist-oneshot", "--alphas", "1", "x"], "expected --alphas [FLOAT [FLOAT ...]], got '1 x'"),
        (["run", "mnist-oneshot", "--steps"], "Missing value for argument '--steps'. Expected 1 values."),
        (["run", "mnist-oneshot", "--alphas", "0.5"], "alpha must be at least 1, got 0.5"),
        (["run", "mnist-oneshot", "--alphas", "2", "2"], "alphas must be some, each once, got (2.0, 2.0)"),
        (["run", "mnist-oneshot", "--lrs", "nan"], "lrs must be finite, got nan"),
        (["run", "mnist-oneshot", "--seeds", "0"], "seeds must be at least 1, got 0"),
        (["run", "mnist-oneshot", "--seeds", "99999999999"], "seeds must be at most 10000, got 99999999999"),
        (["run", "mnist-oneshot", "--workers", "0"], "workers must be at least 1, got 0"),
        (["report"], "report needs the folder of at least one run, got none"),
        (
            ["report", "--combine", "x"],
            "report has no option --combine (did you mean --combined?); see powerprop --help",
        ),
        (["report", "/nowhere"], "/nowhere is not the folder of a run: it has no config.json"),
        (["compare", "/nowhere", "/nowhere"], "/nowhere is not the folder of a run: it has no config.json"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not list(tmp_path.iterdir())


def test_a_run_leaves_everything_in_its_folder(finished: Path) -> None:
    config = json.loads((finished / "config.json").read_text())
    assert config["experiment"] == "mnist-optimisers"
    assert config["config"]["alphas"] == [1.0, 2.0]
    assert {"python", "torch", "numpy", "powerprop", "commit", "platform", "cpu"} <= json.loads(
        (finished / "versions.json").read_text()
    ).keys()
    assert (finished / "report.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in (finished / "jobs").iterdir()) == [
        "alpha1-lr0.001-seed0",
        "alpha2-lr0.001-seed0",
        "direct-alpha2-lr0.001-seed0",
    ]
    assert "<svg" in (finished / "figures" / "accuracy.svg").read_text()


def test_another_configuration_shows_the_difference(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "mnist-optimisers", "--preset", "smoke", "--seeds", "3", "--out", str(finished)]) == 2
    error = capsys.readouterr().err
    assert (
        error
        == f"error: {finished} holds another run: seeds is 1 there and 3 here; choose another --out or delete it\n"
    )


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["run", "mnist-oneshot", "--out", str(tmp_path)]) == 2
    assert f"{tmp_path} is not empty and not a run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_reports_are_drawn_anew(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (finished / "report.html").unlink()
    assert main(["report", str(finished), "--combined", str(tmp_path / "all.html")]) == 0
    assert (finished / "report.html").exists()
    assert "Powerpropagation with Adam on MNIST" in (tmp_path / "all.html").read_text()
    assert f"All together: {tmp_path / 'all.html'}" in capsys.readouterr().out


def test_a_report_of_an_unfinished_run(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_bytes((finished / "config.json").read_bytes())
    assert main(["report", str(tmp_path)]) == 2
    assert "is not finished: 0 of 3 jobs are done; run it again to go on" in capsys.readouterr().err


def test_a_damaged_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in ("{", "[]", '{"experiment": "tea"}', '{"experiment": "mnist-oneshot", "config": {"speed": 9}}'):
        (tmp_path / "config.json").write_text(content)
        assert main(["report", str(tmp_path)]) == 2
        assert str(tmp_path / "config.json") in capsys.readouterr().err


def test_missing_data_is_said_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(name: str) -> None:
        raise DataNotFound(f"data set {name!r} was not found")

    monkeypatch.setattr(data, "load", nothing)
    assert main(["run", "cifar-oneshot", "--preset", "smoke", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == "error: data set 'cifar10' was not found\n"


def test_results_fill_the_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "load", standin.load)
    monkeypatch.setattr(run_command, "EXPERIMENTS", {"mnist-optimisers": EXPERIMENTS["mnist-optimisers"]})
    arguments = ["--preset", "smoke", "--out", str(finished.parent), "--docs", str(tmp_path), "--workers", "1"]
    finished.rename(finished.parent / "mnist-optimisers-smoke")
    try:
        assert main(["results", *arguments]) == 0
    finally:
        (finished.parent / "mnist-optimisers-smoke").rename(finished)
    assert "(mnist-optimisers/README.md)" in (tmp_path / "README.md").read_text()
    text = (tmp_path / "mnist-optimisers" / "README.md").read_text()
    assert "![" in text
    assert "| Adam (α = 1) |" in text
    assert (tmp_path / "mnist-optimisers" / "accuracy.svg").exists()
    assert "gain" in json.loads((tmp_path / "mnist-optimisers" / "summary.json").read_text())


@pytest.mark.parametrize("content", [None, "{}", "[]"])
def test_starting_anew_leaves_other_folders_alone(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "jobs").write_text("years of work")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["run", "mnist-oneshot", "--fresh", "--out", str(tmp_path)]) == 2
    assert f"{tmp_path} is not the folder of a run" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_run_that_goes_on_says_how_far_it_is(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "load", standin.load)
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    (copy / "jobs" / "alpha2-lr0.001-seed0" / "result.json").unlink()
    arguments = ["--preset", "smoke", "--alphas", "1", "2", "--workers", "1", "--out", str(copy)]
    assert main(["run", "mnist-optimisers", *arguments]) == 0
    assert capsys.readouterr().out.startswith("mnist-optimisers: 2 of 3 jobs are done\n")
    assert main(["run", "mnist-optimisers", *arguments, "--fresh", "--steps", "2"]) == 0
    assert "jobs are done" not in capsys.readouterr().out
    assert json.loads((copy / "config.json").read_text())["config"]["steps"] == 2
