"""The commands of the paper's package: what they print and write, and how they answer bad input."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import toys
from powerprop.cli import main
from powerprop_paper import data
from powerprop_paper.cli import FAMILIES
from powerprop_paper.data import DataNotFound
from powerprop_paper.experiments.oneshot import EXPERIMENTS
from toys import BREAK, files

KNOWN = ", ".join(FAMILIES)
RUN = "powerprop run mnist-oneshot"
SEE = f"; see {RUN} --help"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line knows the toy."""
    monkeypatch.setitem(FAMILIES, "toy", "toy")
    module = SimpleNamespace(EXPERIMENTS={"toy": toys.EXPERIMENT})
    monkeypatch.setitem(sys.modules, "powerprop_paper.experiments.toy", module)


def run(out: Path, *options: str) -> int:
    """Run the toy."""
    return main(["run", "toy", "--preset", "smoke", "--workers", "1", "--out", str(out), *options])


@pytest.fixture
def finished(toy: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A finished run of four jobs."""
    assert run(tmp_path / "run") == 0
    capsys.readouterr()
    return tmp_path / "run"


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], f"run needs the name of an experiment first, got ''; known are {KNOWN}"),
        (["run", "--seeds", "1"], f"run needs the name of an experiment first, got '--seeds'; known are {KNOWN}"),
        (
            ["run", "mnist-onshot"],
            f"unknown experiment 'mnist-onshot' (did you mean mnist-oneshot or gpt-oneshot?); known are {KNOWN}",
        ),
        (["results", "tea"], f"unknown experiment 'tea'; known are {KNOWN}"),
        (["results", "--preset", "tea"], "mnist-oneshot has no preset 'tea'; it has smoke, demo, cpu, paper"),
        (
            ["run", "mnist-oneshot", "--preset", "cpuu"],
            "mnist-oneshot has no preset 'cpuu' (did you mean cpu?); it has smoke, demo, cpu, paper",
        ),
        (["run", "mnist-oneshot", "--preset"], "mnist-oneshot has no preset ''; it has smoke, demo, cpu, paper"),
        (["run", "mnist-oneshot", "--alpha", "2"], f"{RUN} has no option --alpha (did you mean --alphas?){SEE}"),
        (["run", "mnist-oneshot", "--stepz=2"], f"{RUN} has no option --stepz=2 (did you mean --steps?){SEE}"),
        (["run", "mnist-oneshot", "--no-fresh"], f"{RUN} has no option --no-fresh (did you mean --fresh?){SEE}"),
        (["run", "mnist-oneshot", "--only", "rigl*"], f"{RUN} has no option --only{SEE}"),
        (["run", "mnist-oneshot", "stray"], f"{RUN} has no place for 'stray'{SEE}"),
        (["run", "mnist-oneshot", "--steps", "many"], f"--steps must be a whole number, got 'many'{SEE}"),
        (["run", "mnist-oneshot", "--steps", "1.5"], f"--steps must be a whole number, got '1.5'{SEE}"),
        (["run", "mnist-oneshot", "--steps"], f"--steps must be a whole number, got ''{SEE}"),
        (["run", "mnist-oneshot", "--alphas", "1", "x"], f"--alphas must be a list, each a number, got '1 x'{SEE}"),
        (["run", "mnist-oneshot", "--alphas", "0.5"], f"alphas must be at least 1, got 0.5{SEE}"),
        (["run", "mnist-oneshot", "--alphas", "2", "2"], f"alphas must be some, each once, got (2.0, 2.0){SEE}"),
        (["run", "mnist-oneshot", "--lrs", "nan"], f"lrs must be finite, got nan{SEE}"),
        (["run", "mnist-oneshot", "--seeds", "0"], f"seeds must be at least 1, got 0{SEE}"),
        (["run", "mnist-oneshot", "--seeds", "99999999999"], f"seeds must be at most 10000, got 99999999999{SEE}"),
        (["run", "mnist-oneshot", "--workers", "x"], f"--workers must be a whole number, got 'x'{SEE}"),
        (["run", "mnist-oneshot", "--workers", "0"], "workers must be at least 1, got 0"),
        (["list", "x"], "powerprop list has no place for 'x'; see powerprop list --help"),
        (["show"], "show needs the folder of at least one run, got none"),
        (["show", "--all"], "powerprop show has no option --all; see powerprop show --help"),
        (["show", "/nowhere"], "/nowhere is not the folder of a run; it has no summary.json"),
        (["compare"], "expected first and second, got ''; see powerprop compare --help"),
        (["compare", "/nowhere", "/nowhere"], "/nowhere is not the folder of a run; it has no summary.json"),
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


def test_missing_data_is_said_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(name: str) -> None:
        raise DataNotFound(f"data set {name!r} was not found")

    monkeypatch.setattr(data, "load", nothing)
    assert main(["run", "cifar-oneshot", "--preset", "smoke", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == "error: data set 'cifar10' was not found\n"
    assert not (tmp_path / "run").exists()


# --- run ------------------------------------------------------------------------------------------------------------


def test_a_run_leaves_everything_in_its_folder(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} == {
        ".lock", "config.json", "jobs", "times.jsonl", "figures", "summary.json", "report.html",
    }  # fmt: skip
    rows = [json.loads(path.read_text()) for path in sorted(finished.glob("jobs/*/*/row.json"))]
    assert [row["settings"] for row in rows] == [{"alpha": a, "seed": s} for a in (1.0, 2.0) for s in (0, 1)]
    assert {"python", "torch", "numpy", "powerprop", "platform", "cpu"} <= rows[0]["versions"][0].keys()
    summary = json.loads((finished / "summary.json").read_text())
    assert (summary["experiment"], summary["jobs"]["done"]) == ("toy", 4)
    assert summary["versions"]["torch"]
    assert (finished / "report.html").read_text().startswith("<!doctype html>")
    assert "<svg" in (finished / "figures" / "accuracy.svg").read_text()


def test_the_folder_is_named_after_experiment_and_preset(
    toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "toy", "--workers", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Report: runs/toy-cpu/report.html"
    assert json.loads(Path("runs/toy-cpu/config.json").read_text())["preset"] == "cpu"


def test_the_same_again_trains_nothing_and_draws_the_page(finished: Path) -> None:
    before = files(finished)
    (finished / "report.html").unlink()
    (finished / "summary.json").unlink()
    toys.ran.clear()
    assert run(finished) == 0
    assert toys.ran == []
    assert files(finished) == before
    assert run(finished, "--fresh", "--steps", "2") == 0
    assert json.loads((finished / "config.json").read_text())["config"]["steps"] == 2


def test_jobs_that_fail_are_told_and_tried_again(
    toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(BREAK, "crash=0")
    assert run(tmp_path) == 1
    shown = capsys.readouterr()
    assert shown.err.count("Traceback") == 2
    assert shown.err.endswith("error: 2 jobs failed: train/alpha=1,seed=0, train/alpha=2,seed=0\n")
    assert f"Report: {tmp_path / 'report.html'}" in shown.out, "what is there is shown"
    failed = json.loads((tmp_path / "summary.json").read_text())["jobs"]["failed"]
    assert failed["train/alpha=1,seed=0"] == "KeyError: 'by hand'"
    monkeypatch.delenv(BREAK)
    assert run(tmp_path) == 0


def test_a_full_disk_is_one_line(
    toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(BREAK, "full=0")
    assert run(tmp_path) == 1
    path = tmp_path / "jobs/train/alpha=1,seed=0/checkpoint.pt"
    error = f"error: train/alpha=1,seed=0: {path}: No space left on device; the same command goes on from here\n"
    assert capsys.readouterr().err == error
    assert not (tmp_path / "report.html").exists()


def test_ctrl_c_is_one_line(
    toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(seed: int, folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(toys, "breaks", interrupt)
    assert run(tmp_path) == 130
    assert capsys.readouterr().err == "interrupted; the same command goes on from here\n"


# --- show and list --------------------------------------------------------------------------------------------------


def test_show_has_command_numbers_and_tables(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = finished.with_name("other")
    shutil.copytree(finished, other)
    assert main(["show", str(finished), str(other)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Toy\npowerprop run toy --preset smoke\n")
    assert "α = 2" in shown
    assert "40.50 ± 0.71" in shown
    assert [line for line in shown.splitlines() if line.startswith("Report: ")] == [
        f"Report: {folder / 'report.html'}" for folder in (finished, other)
    ]


def test_show_of_an_unfinished_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (finished / "summary.json").unlink()
    assert main(["show", str(finished)]) == 2
    why = "is not finished: the same command goes on; it has no summary.json"
    assert capsys.readouterr().err == f"error: {finished} {why}\n"


EDITS = ["{", "[]", '{"experiment": "toy"}', "null", {"stats": 7}, {"sections": [{"tables": [{"title": "x"}]}]}]


@pytest.mark.parametrize("edit", EDITS, ids=str)
@pytest.mark.parametrize("command", ["show", "compare"])
def test_an_edited_summary_is_one_line(
    command: str, edit: str | dict[str, Any], finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = finished / "summary.json"
    path.write_text(edit if isinstance(edit, str) else json.dumps({**json.loads(path.read_text()), **edit}))
    code = main([command, str(finished), *([str(finished)] if command == "compare" else [])])
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == ((0, 0) if command == "compare" and "stats" in edit else (2, 1))
    assert not error or str(finished) in error


def test_list_has_every_experiment_and_its_presets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if line and line.split(" ")[0] in FAMILIES] == list(FAMILIES)
    assert ", ".join(EXPERIMENTS["mnist-oneshot"].presets) in shown
    assert main(["run", "--help"]) == 0
    assert shown.strip() in capsys.readouterr().out


# --- results --------------------------------------------------------------------------------------------------------


def test_results_fill_the_documentation(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs = tmp_path / "docs" / "results"
    (docs / "toy").mkdir(parents=True)
    (docs / "toy" / "notes.md").touch()
    (docs.parent / "figures.md").touch()
    shutil.copytree(finished, tmp_path / "toy-smoke")
    toys.ran.clear()
    command = ["results", "toy", "--preset", "smoke", "--out", str(tmp_path), "--docs", str(docs), "--workers", "1"]
    assert main(command) == 0
    assert toys.ran == [], "what `run` did is not done again"
    assert capsys.readouterr().out.endswith(f"Results: {docs / 'README.md'}\n")
    assert "| [Toy](toy/README.md) | proves that it runs |  |  |\n" in (docs / "README.md").read_text()
    text = (docs / "toy" / "README.md").read_text()
    assert "](accuracy.svg)" in text
    assert "| α = 2 | 40.50 ± 0.71 |" in text
    assert "(notes.md)" in text
    assert {path.name for path in (docs / "toy").iterdir()} == {"README.md", "accuracy.svg", "summary.json", "notes.md"}
    for name, made in (("summary.json", "summary.json"), ("accuracy.svg", "figures/accuracy.svg")):
        assert (docs / "toy" / name).read_bytes() == (finished / made).read_bytes()
