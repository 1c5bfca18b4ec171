"""The folder of a run: damaged and edited files, other versions, leftovers, and beginning anew."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import standin
from powerprop import data
from powerprop.cli import main
from powerprop.experiments import EXPERIMENTS, Experiment
from powerprop.experiments.harness import folder as run_folder
from powerprop.experiments.harness import runner
from powerprop.experiments.harness.experiment import Findings, Job, RunError
from powerprop.experiments.harness.folder import known_jobs, locked, prepare
from powerprop.experiments.harness.resume import progress_of, remove_run
from powerprop.experiments.harness.runner import JobsFailedError, run, run_jobs
from powerprop.experiments.harness.versions import changes, merged
from powerprop.files import FileError, write_sealed_json
from powerprop.report import Page, Table
from powerprop.train import MetricsLog

STANDIN = Path(__file__).parent / "standin.py"


@dataclass(frozen=True)
class Settings:
    """Of the toy experiment."""

    seeds: int = 2
    speed: float = 1.0
    names: tuple[str, ...] = ("x",)


def toy_jobs(config: Settings, results: Any) -> list[Job]:
    return [Job(f"seed{seed}", {"seed": seed}) for seed in range(config.seeds)]


def toy_job(config: Settings, job: Job, folder: Path, progress: Any) -> dict[str, Any]:
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.rewind(0)
        log.write(1, loss=0.5)
    return {"y": 10 * job.settings["seed"]}


def toy_report(config: Settings, results: Any, out: Path) -> Findings:
    return Findings(Page("toy", "", []), Table("t", [""], []), {"y": [found["y"] for found in results.values()]})


def toy(run_job: Callable[..., dict[str, Any]] = toy_job) -> Experiment:
    presets = {"smoke": Settings()}
    return Experiment("toy", "", "", presets, lambda config: None, toy_jobs, run_job, toy_report)


def go(out: Path, config: Settings = Settings(), run_job: Callable[..., dict[str, Any]] = toy_job) -> str:
    """Run the toy experiment; what it printed."""
    text = io.StringIO()
    run(toy(run_job), "smoke", config, out, 1, Console(file=text, width=200))
    return text.getvalue()


# --- damaged and edited files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["{}", "null", "[]", '"done"', "3", "{", "", '{"seed": 0, "y": 11}'])
@pytest.mark.parametrize("file", ["result.json", "job.json"])
def test_files_of_a_job_that_were_edited(file: str, content: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    go(out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    job = out / "jobs" / "seed0"
    (job / file).write_text(content)
    for _ in range(2):
        with pytest.raises(FileError) as error:
            go(out)
        assert str(error.value).startswith(f"{job / file} ")
        assert str(error.value).endswith(f"delete {job} and the same command does this job again")
        assert "\n" not in str(error.value)
    for path in job.iterdir():
        path.unlink()
    job.rmdir()
    go(out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("file", ["metrics.jsonl", "result.json"])
def test_one_digit_is_enough(file: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    go(out)
    path = out / "jobs" / "seed1" / file
    path.write_text(path.read_text().replace("1", "7"))
    with pytest.raises(FileError, match=f"{file} is damaged or edited: it is not what the job wrote; delete"):
        go(out)
    path.unlink()
    if file == "metrics.jsonl":
        with pytest.raises(FileError, match="is missing; delete"):
            go(out)


def test_a_result_without_its_record_is_an_error(tmp_path: Path) -> None:
    out = tmp_path / "run"
    go(out)
    record = out / "jobs" / "seed0" / "job.json"
    content = record.read_bytes()
    record.unlink()
    with pytest.raises(
        FileError, match=r"job\.json is missing; delete .*seed0 and the same command does this job again"
    ):
        go(out)
    write_sealed_json(record, {"versions": json.loads(content)["versions"]})
    with pytest.raises(FileError, match=r"job\.json has no checksum of result\.json; delete .*seed0 and"):
        go(out)
    record.write_bytes(content)
    go(out)


@pytest.mark.parametrize(
    "content",
    ["{", "null", "[1]", '"x"', '{"torch": 2}', '{"torch": NaN, "checksum": "x"}', '{"torch": "\\ud800"}', "{}"],
)
def test_versions_that_were_edited(content: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    go(out)
    (out / "versions.json").write_text(content)
    with pytest.raises(
        FileError, match=r"versions\.json .*delete .*versions\.json and the same command writes it anew"
    ):
        go(out)
    (out / "versions.json").unlink()
    go(out)
    assert json.loads((out / "versions.json").read_text())["torch"]


@pytest.mark.parametrize("name", ["config.json", "versions.json"])
def test_a_file_without_a_checksum_is_an_error(name: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    go(out)
    kept = json.loads((out / name).read_text())
    del kept["checksum"]
    (out / name).write_text(json.dumps(kept))
    with pytest.raises(FileError, match=rf"{name} is damaged or edited: it does not have its checksum; "):
        go(out)


@pytest.mark.parametrize(
    "content",
    [
        "{", "null", "[]", '"x"', "{}", '{"experiment": ["toy"]}', '{"experiment": "toy"}',
        '{"experiment": "toy", "preset": "smoke", "config": null}',
        '{"experiment": "toy", "preset": "smoke", "config": {"seeds": "2"}}',
        '{"experiment": "toy", "preset": "smoke", "config": {"seeds": 1.5}}',
        '{"experiment": "toy", "preset": "smoke", "config": {"speed": [1]}}',
        '{"experiment": "toy", "preset": "smoke", "config": {"names": "x"}}',
        '{"experiment": "toy", "preset": "smoke", "config": {"names": [1]}}',
        '{"experiment": "toy", "preset": "smoke", "config": {"speeds": 1}}',
        '{"experiment": "toy", "preset": "smoke", "config": {"seeds": 3}}',
        '{"experiment": "toy", "preset": 3, "config": {}}',
    ],
)  # fmt: skip
def test_a_configuration_that_was_edited(content: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    go(out)
    (out / "config.json").write_text(content)
    with pytest.raises((RunError, FileError), match=str(out)) as error:
        go(out)
    assert "\n" not in str(error.value)


def test_one_letter_of_the_configuration_makes_no_other_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    go(out)
    path = out / "config.json"
    content = path.read_text()
    path.write_text(content.replace('"x"', '"y"'))
    with pytest.raises(
        FileError, match=r"config\.json is damaged or edited: .*; undo what was edited, or choose another"
    ):
        go(out)
    path.write_text(content)
    go(out)


def test_a_damaged_checkpoint_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "load", standin.load)
    command = ["run", "mnist-oneshot", "--preset", "smoke", "--seeds", "1", "--workers", "1", "--out", str(tmp_path)]
    assert main(command) == 0
    summary = (tmp_path / "summary.json").read_bytes()
    job = tmp_path / "jobs" / "alpha1-lr0.2-seed0"
    (job / "result.json").unlink()
    content = bytearray((job / "checkpoint.pt").read_bytes())
    content[100_000:104_096] = bytes(range(256)) * 16
    (job / "checkpoint.pt").write_bytes(content)
    capsys.readouterr()
    assert main(command) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    path = job / "checkpoint.pt"
    assert error.startswith(f"error: alpha1-lr0.2-seed0: {path} is damaged or not a checkpoint (the content of ")
    assert f"; delete {path} to start this training from its beginning" in error
    path.unlink()
    assert main(command) == 0
    assert (tmp_path / "summary.json").read_bytes() == summary


# --- versions -----------------------------------------------------------------------------------------------------


def test_other_versions_are_said_once_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    now = runner.versions()
    monkeypatch.setattr(runner, "versions", lambda: {**now, "torch": "2.6.0"})
    monkeypatch.setattr(run_folder, "versions", lambda: {**now, "torch": "2.6.0"})
    assert "warning" not in go(out)
    page = (out / "report.html").read_text()
    assert "2.6.0" in page
    assert "jobs)" not in page

    monkeypatch.setattr(runner, "versions", lambda: now)
    assert "warning" not in go(out)  # there is nothing left to do
    (out / "jobs" / "seed1" / "result.json").unlink()
    shown = go(out)
    assert shown.count("warning") == 1
    assert f"was begun with other versions: torch 2.6.0 is now {now['torch']};" in shown
    made = json.loads((out / "jobs" / "seed1" / "job.json").read_text())["versions"]
    assert [each["torch"] for each in made] == ["2.6.0", now["torch"]]
    assert f"2.6.0 (2 jobs), {now['torch']} (1 jobs)" in (out / "report.html").read_text()


def test_versions_side_by_side() -> None:
    old, new = {"torch": "2.6", "cpu": "a", "commit": ""}, {"torch": "2.7", "cpu": "b", "commit": "abc"}
    assert changes(old, old) == ""
    assert changes(old, new) == "commit unknown is now abc, torch 2.6 is now 2.7"
    assert merged([old, old, new]) == {
        "torch": "2.6 (2 jobs), 2.7 (1 jobs)",
        "cpu": "a (2 jobs), b (1 jobs)",
        "commit": "unknown (2 jobs), abc (1 jobs)",
    }
    assert merged([old, old]) == old


# --- counting, bounds, beginning anew -----------------------------------------------------------------------------


def test_what_is_already_done(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert progress_of(out, toy(), Settings()) == (0, 2)
    go(out)
    assert progress_of(out, toy(), Settings()) == (2, 2)
    (out / "jobs" / "seed1" / "result.json").unlink()
    assert progress_of(out, toy(), Settings()) == (1, 2)


def test_more_jobs_than_anybody_can_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["run", "mnist-oneshot", "--seeds", "99999999999", "--out", str(out)]) == 2
    assert capsys.readouterr().err == "error: seeds must be at most 10000, got 99999999999\n"
    assert not out.exists()
    for experiment in EXPERIMENTS.values():
        with pytest.raises(ValueError, match="seeds must be at most 10000"):
            replace(experiment.presets["smoke"], seeds=10**12)
    many = replace(toy(), jobs=lambda config, results: [Job("x", {})] * 100_001)
    with pytest.raises(RunError, match="a run has at most 100000 jobs, these settings give 100001"):
        known_jobs(many, Settings(), {})


def test_a_run_is_removed_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "run"
    remove_run(out)
    go(out)
    (out / "jobs" / "seed0" / ".result.json.99999.tmp").touch()
    (out / "notes.txt").touch()
    with pytest.raises(RunError, match=r"notes\.txt is not of the run in .*; nothing was removed"):
        remove_run(out)
    assert progress_of(out, toy(), Settings()) == (2, 2)
    (out / "notes.txt").unlink()
    with locked(out), pytest.raises(RunError, match="in use by another process"):
        remove_run(out)
    remove_run(out)
    assert [path.name for path in out.iterdir()] == [".lock"]
    with pytest.raises(RunError, match="is not the folder of a run"):
        remove_run(out)
    go(out)


@pytest.mark.parametrize("fresh", [False, True])
def test_settings_that_are_refused_leave_everything_as_it_was(fresh: bool, tmp_path: Path) -> None:
    def refuse(config: Settings) -> None:
        raise ValueError(f"speed must be another, got {config.speed}")

    out, other = tmp_path / "run", replace(toy(), prepare=refuse)
    with pytest.raises(RunError, match=r"speed must be another, got 1\.0"):
        run(other, "smoke", Settings(), out, 1, Console(quiet=True), fresh)
    assert not out.exists()
    go(out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="speed must be another"):
        run(other, "smoke", Settings(), out, 1, Console(quiet=True), fresh)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("mnist-oneshot --validation 3000000", "n_last must be in 0.."),
        ("mnist-oneshot --data nothing", "data set must be one of"),
        ("mnist-oneshot --data cifar10", "model lenet-300-100 is for images (1, 28, 28) of 10 classes, got cifar10"),
        ("mnist-oneshot --init zeros", "init must be one of glorot_normal, "),
        ("sparse-training --validation 3000000", "n_last must be in 0.."),
        ("sparse-training --lrs 0.1 0.1", "lrs must be different, got (0.1, 0.1)"),
        ("task-inference --images 400", "validation must be below the 400 images, got 500"),
        ("imagenet --crop 33", "crop must be at most 32, the resize, got 33"),
        ("imagenet --momentum 0", "momentum must be above 0, got 0.0"),
        ("continual-world --ewc -1", "ewc must be at least 0, got -1.0"),
        ("continual-world --memory 0", "memory must be at least 1, got 0"),
        ("continual-world --clip -1", "clip must be at least 0, got -1.0"),
    ],
)
def test_settings_that_jobs_would_choke_on(
    command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "load", standin.load)
    assert main(["run", *command.split(), "--preset", "smoke", "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_leftovers_are_swept_and_a_kill_at_the_very_start_is_no_harm(tmp_path: Path) -> None:
    prepare(tmp_path, toy(), "smoke", Settings())
    (tmp_path / "config.json").rename(tmp_path / ".config.json.4711.tmp")  # killed before it had its name
    go(tmp_path)
    (tmp_path / "jobs" / "seed0" / ".checkpoint.pt.4711.tmp").touch()
    go(tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))


# --- errors of the machine ----------------------------------------------------------------------------------------


def full_at(kind: str) -> Callable[..., dict[str, Any]]:
    """A job whose disk is full when it writes this kind of file."""

    def run_job(config: Settings, job: Job, folder: Path, progress: Any) -> dict[str, Any]:
        if job.key == "seed0":
            raise OSError(errno.ENOSPC, "No space left on device", str(folder / kind))
        return toy_job(config, job, folder, progress)

    return run_job


def test_a_full_disk_ends_the_run_in_one_line(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(JobsFailedError) as error:
        run_jobs(toy(full_at("checkpoint.pt")), Settings(), out, 1, Console(file=io.StringIO()))
    assert error.value.failures.keys() == {"seed0"}  # the others would have met it too
    failure = error.value.failures["seed0"]
    assert failure.line == f"{out / 'jobs' / 'seed0' / 'checkpoint.pt'}: No space left on device"
    assert failure.traceback == ""


def command(out: str) -> list[str]:
    return [sys.executable, str(STANDIN), "run", "mnist-oneshot", "--preset", "smoke", "--workers", "2", "--out", out]


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("{tmp}/file", "{tmp}/file is a file; a run needs a folder: choose another --out"),
        ("{tmp}/file/run", "{tmp}/file/run: Not a directory"),
        ("/proc/run", "/proc/run: No such file or directory"),
        ("{tmp}/" + 300 * "x", "File name too long"),
    ],
)
def test_folders_that_cannot_be(
    out: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "load", standin.load)
    (tmp_path / "file").touch()
    assert main(["run", "mnist-oneshot", "--preset", "smoke", "--out", out.format(tmp=tmp_path)]) in (1, 2)
    errors = lines(capsys.readouterr().err)
    assert len(errors) == 1
    assert message.format(tmp=tmp_path) in errors[0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of two megabytes."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a small disk is not allowed here")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_full_disk_loses_nothing(small_disk: Path) -> None:
    out = small_disk / "run"
    done = subprocess.run(command(str(out)), capture_output=True, text=True)
    assert done.returncode == 1
    assert len(lines(done.stderr)) == 1, done.stderr
    assert "No space left on device; the same command goes on from here" in done.stderr
    assert str(out) in done.stderr
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    done = subprocess.run(command(str(out)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(out.rglob("*.tmp"))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["list"], ["run", "mnist-oneshot", "--preset", "smoke", "--workers", "1"]])
def test_output_that_cannot_be_written(arguments: list[str], tmp_path: Path) -> None:
    program = [sys.executable, str(STANDIN), *arguments, *(["--out", str(tmp_path / "run")] * (len(arguments) > 1))]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert lines(done.stderr) == ["error: standard output: No space left on device; the same command goes on from here"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(program, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode == 1
    assert lines(done.stderr) == ["error: standard output: its reader has gone; the same command goes on from here"]


def test_tensorboard_that_is_not_installed_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POWERPROP_TENSORBOARD", "1")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RunError, match=r"TensorBoard is not installed: pip install 'powerprop\[tensorboard\]'"):
        go(tmp_path / "run")
    assert not (tmp_path / "run").exists()
