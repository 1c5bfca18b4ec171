"""`run.map`: rows, what is done once, what fails alone, and the folder that keeps it."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import toys
from powerprop.files import FileError
from powerprop_paper import run as harness
from powerprop_paper.folder import (
    LAYOUT,
    changes,
    folder_name,
    locked,
    merged,
    read_sealed_json,
    remove_run,
    write_sealed_json,
)
from powerprop_paper.report import Mean
from powerprop_paper.run import JobsFailedError, Row, Rows, RunError
from powerprop_paper.train.distributed import Ranks
from toys import BREAK, Config, files, ran, rows_of, run_of

JOB = "jobs/train/alpha=1,seed=0"


# --- rows ---------------------------------------------------------------------------------------------------------


def test_a_row_is_settings_and_results(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    assert [(row["alpha"], row["seed"], row["accuracy"]) for row in rows] == [
        (1.0, 0, 0.2), (1.0, 1, 0.21), (2.0, 0, 0.4), (2.0, 1, 0.41),
    ]  # fmt: skip
    assert rows.where(alpha=2.0, seed=1).values("accuracy") == [0.41]
    assert rows.where(alpha=3.0) == []
    assert list(rows.by("alpha")) == [1.0, 2.0]
    assert rows.by("alpha", "seed")[1.0, 1] == rows[1:2]
    assert rows.by("curve")[0.1, 0.2] == rows[:1]
    assert rows.mean("accuracy") == Mean.of([0.2, 0.21, 0.4, 0.41])
    assert rows.where(alpha=1.0).mean(lambda row: row["curve"][0]) == Mean.of([0.1, 0.11])
    assert rows.where(alpha=3.0).mean("accuracy") is None
    assert rows[0].folder == tmp_path / JOB


def test_rows_that_were_lost_are_left_out_and_counted() -> None:
    rows = Rows(Row(values, Path()) for values in ({"x": 1.0}, {"diverged": "nan"}, {"failed": "KeyError"}, {"x": 2.0}))
    assert (rows.lost, len(rows.finished)) == (2, 2)
    assert rows.mean("x") == Mean.of([1.0, 2.0])
    assert rows.values("x") == [1.0, 2.0]
    assert Rows(rows[1:2]).mean("x") is None


def test_each_job_is_done_once(tmp_path: Path) -> None:
    first = rows_of(tmp_path)
    assert len(ran) == 4
    before = files(tmp_path)
    assert rows_of(tmp_path) == first
    assert ran == []
    assert files(tmp_path) == before
    (tmp_path / "jobs/train/alpha=2,seed=0/row.json").unlink()
    assert rows_of(tmp_path) == first
    assert ran == [("train", (2.0, 0))]
    assert files(tmp_path) == before


def test_a_finished_run_costs_one_read_of_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of(tmp_path)
    read: list[Path] = []
    real = harness.read_row
    monkeypatch.setattr(harness, "read_row", lambda folder, settings: read.append(folder) or real(folder, settings))
    with run_of(tmp_path) as run:
        for _ in range(3):
            run.map(toys.train, toys.jobs(Config()))
    assert len(read) == len(set(read)) == 4


def test_rows_of_a_first_map_serve_again(tmp_path: Path) -> None:
    ran.clear()
    with run_of(tmp_path) as run:
        tuning = run.map(toys.train, [{"alpha": alpha, "seed": 0} for alpha in (1.0, 2.0)])
        best = max(tuning, key=lambda row: row["accuracy"])["alpha"]
        final = run.map(toys.train, [{"alpha": best, "seed": seed} for seed in (0, 1, 0)])
        other = run.map(toys.count, [{"words": "a b"}])
    assert [work for _, work in ran] == [(1.0, 0), (2.0, 0), (2.0, 1), "a b"]
    assert [row["seed"] for row in final] == [0, 1], "the same twice is one job"
    assert final[0] is tuning[1]
    assert (other[0].folder, other[0]["letters"]) == (tmp_path / "jobs" / "count" / "words=a_b", 3)


def test_names_of_folders() -> None:
    assert folder_name({"alpha": 2.0, "lr": 0.1, "tasks": ("a", 3), "none": None}) == "alpha=2,lr=0.1,tasks=a+3"
    assert folder_name({}) == "all"
    odd, long = folder_name({"file": "../x y"}), folder_name({"words": "w" * 300})
    assert odd.startswith("file=.._x_y-")
    assert len(long) < 170
    assert folder_name({"words": "w" * 301}) != long
    assert folder_name({"lr": 0.1 + 0.2}) != folder_name({"lr": 0.3})


def test_settings_that_would_share_a_folder_are_refused(tmp_path: Path) -> None:
    with run_of(tmp_path) as run, pytest.raises(RunError, match="would both be in"):
        run.map(toys.train, [{"seed": 1}, {"seed": "1"}])
    assert not tmp_path.exists() or not list(tmp_path.iterdir())


def test_more_jobs_than_anybody_can_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "MOST_JOBS", 3)
    with run_of(tmp_path) as run, pytest.raises(RunError, match="a run has at most 3 jobs, these settings give more"):
        run.map(toys.train, toys.jobs(Config()))
    assert not list(tmp_path.iterdir())


# --- what fails, fails alone ----------------------------------------------------------------------------------------


def test_a_job_that_crashes_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BREAK, "crash=1")
    with run_of(tmp_path) as run:
        rows = run.map(toys.train, toys.jobs(Config()))
        assert [row.get("failed") for row in rows] == [None, "KeyError: 'by hand'", None, "KeyError: 'by hand'"]
        assert rows.lost == 2
        assert 'KeyError("by hand")' in run.failures["train/alpha=1,seed=1"].traceback
        assert run.map(toys.train, toys.jobs(Config())) == rows
        with pytest.raises(JobsFailedError, match="2 jobs failed: train/alpha=1,seed=1, train/alpha=2,seed=1"):
            run.map(toys.count, [{"words": "never begun"}])
    monkeypatch.delenv(BREAK)
    assert rows_of(tmp_path).lost == 0
    assert [work for _, work in ran] == [(1.0, 1), (2.0, 1)]


def test_a_worker_that_is_killed_fails_its_job_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BREAK, "kill=1")
    rows = rows_of(tmp_path, workers=2)
    died = "its process died with exit code -9 (out of memory?)"
    assert [row.get("failed") for row in rows] == [None, died, None, died]
    monkeypatch.delenv(BREAK)
    again = rows_of(tmp_path, workers=2)
    assert files(tmp_path).keys() == {
        "config.json",
        *(f"jobs/train/{row.folder.name}/{name}" for row in again for name in ("row.json", "metrics.jsonl")),
    }
    whole = tmp_path.parent / "whole"
    rows_of(whole)
    assert files(whole) == files(tmp_path)


def test_divergence_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BREAK, "nan=0")
    rows = rows_of(tmp_path)
    assert rows.where(seed=0).lost == 2
    assert rows[0]["diverged"] == "the loss is nan at step 2"
    assert rows.where(alpha=1.0).mean("accuracy") == Mean.of([0.21])
    assert rows_of(tmp_path) == rows
    assert ran == [], "it would diverge again"


def taken(cfg: Config, folder: Path, progress: Any, seed: int) -> dict[str, int]:
    return {"seed": 7}


def test_a_result_must_not_hide_a_setting(tmp_path: Path) -> None:
    with run_of(tmp_path) as run:
        (row,) = run.map(taken, [{"seed": 1}])
    assert row["failed"] == "ValueError: seed of the result is a setting of the job too"


# --- the folder -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["{}", "null", "[]", '"done"', "{", "", '{"settings": {"alpha": 1.0, "seed": 0}}'])
def test_a_row_that_was_edited(content: str, tmp_path: Path) -> None:
    rows_of(tmp_path)
    before = files(tmp_path)
    row = tmp_path / JOB / "row.json"
    row.write_text(content)
    for _ in range(2):
        with pytest.raises(FileError) as error:
            rows_of(tmp_path)
        assert str(error.value).startswith(f"{row} ")
        assert str(error.value).endswith(f"delete {row.parent} and the same command does this job again")
        assert "\n" not in str(error.value)
    for path in row.parent.iterdir():
        path.unlink()
    row.parent.rmdir()
    rows_of(tmp_path)
    assert files(tmp_path) == before


def test_one_digit_is_enough(tmp_path: Path) -> None:
    (row, *_) = rows_of(tmp_path)
    path = row.folder / "metrics.jsonl"
    assert row.file("metrics.jsonl") == path
    path.write_text(path.read_text().replace("1", "7"))
    with pytest.raises(FileError, match=r"metrics.jsonl is damaged or edited: it is not what the job wrote; delete"):
        row.file("metrics.jsonl")
    path.unlink()
    with pytest.raises(FileError, match="is missing; delete"):
        row.file("metrics.jsonl")
    sealed = row.folder / "row.json"
    sealed.write_text(sealed.read_text().replace("0.2", "0.3"))
    with pytest.raises(FileError, match=r"row.json is damaged or edited: it does not have its checksum; delete"):
        rows_of(tmp_path)


def test_the_row_of_another_job_is_refused(tmp_path: Path) -> None:
    rows_of(tmp_path)
    path = tmp_path / JOB / "row.json"
    path.write_bytes((tmp_path / "jobs/train/alpha=1,seed=1/row.json").read_bytes())
    with pytest.raises(FileError, match=r"is of \{'alpha': 1.0, 'seed': 1\}, expected \{'alpha': 1.0, 'seed': 0\}"):
        rows_of(tmp_path)


def test_a_damaged_note_of_a_job_that_was_begun(tmp_path: Path) -> None:
    begun = tmp_path / JOB / "begun.json"
    begun.parent.mkdir(parents=True)
    begun.write_text("{")
    write_sealed_json(tmp_path / "config.json", run_of(tmp_path / "other").description)
    (row, *_) = rows_of(tmp_path)
    assert row["failed"] == f"{begun} is not a JSON file: " + row["failed"].partition("file: ")[2]
    assert row["failed"].endswith(f"delete {begun.parent} and the same command does this job again")


def test_a_kill_right_after_a_row_leaves_no_note(tmp_path: Path) -> None:
    rows_of(tmp_path)
    before = files(tmp_path)
    write_sealed_json(tmp_path / JOB / "begun.json", {"versions": []})
    rows_of(tmp_path)
    assert files(tmp_path) == before


@pytest.mark.parametrize("content", ["{", "null", "[]", "{}", '{"experiment": "toy", "preset": "smoke", "config": {}}'])
def test_a_configuration_that_was_edited(content: str, tmp_path: Path) -> None:
    rows_of(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(FileError, match=r"config.json .*; undo what was edited, or choose another --out"):
        rows_of(tmp_path)


def test_another_configuration_is_refused_with_the_difference(tmp_path: Path) -> None:
    rows_of(tmp_path)
    before = files(tmp_path)
    expected = r"holds another run: seeds is 2 there and 3 here, steps is 3 there and 9 here; choose another --out"
    with pytest.raises(RunError, match=expected):
        rows_of(tmp_path, Config(seeds=3, steps=9))
    with pytest.raises(RunError, match="holds another run: preset is 'smoke' there and 'cpu' here"):
        rows_of(tmp_path, preset="cpu")
    assert (ran, files(tmp_path)) == ([], before)


def test_a_run_of_an_older_layout_is_refused(tmp_path: Path) -> None:
    rows_of(tmp_path)
    saved = read_sealed_json(tmp_path / "config.json")
    write_sealed_json(tmp_path / "config.json", {**saved, "layout": LAYOUT - 1})
    with pytest.raises(RunError, match="holds a run of an older powerprop, which cannot go on; choose another --out"):
        rows_of(tmp_path)


def test_folders_that_are_no_place_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(RunError, match="is not empty and not a run"):
        rows_of(tmp_path)
    with pytest.raises(RunError, match="is a file; a run needs a folder"):
        rows_of(tmp_path / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_folder_is_used_by_one_process_at_a_time(tmp_path: Path) -> None:
    rows_of(tmp_path)
    with locked(tmp_path), pytest.raises(RunError, match="in use by another process"):
        rows_of(tmp_path)
    with run_of(tmp_path) as run:
        run.map(toys.train, toys.jobs(Config()))
        with pytest.raises(RunError, match="in use by another process"):
            rows_of(tmp_path)


def test_leftovers_are_swept_and_a_kill_at_the_very_start_is_no_harm(tmp_path: Path) -> None:
    rows_of(tmp_path)
    before = files(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / ".config.json.4711.tmp")  # killed before it had its name
    for path in (tmp_path / "jobs").rglob("*.json*"):
        path.unlink()
    for path in sorted((tmp_path / "jobs").rglob("*"), reverse=True):
        path.rmdir()
    (tmp_path / "jobs").rmdir()
    (tmp_path / "times.jsonl").unlink()
    rows_of(tmp_path)
    (tmp_path / JOB / ".checkpoint.pt.4711.tmp").touch()
    rows_of(tmp_path)
    assert files(tmp_path) == before


def test_beginning_anew_removes_the_run_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "run"
    rows_of(out, fresh=True)
    (out / "notes.txt").touch()
    with pytest.raises(RunError, match=r"notes.txt is not of the run in .*; nothing was removed"):
        rows_of(out, Config(seeds=1), fresh=True)
    (out / "notes.txt").unlink()
    with locked(out), pytest.raises(RunError, match="in use by another process"):
        remove_run(out)
    assert len(list(out.glob("jobs/train/*/row.json"))) == 4
    assert len(rows_of(out, Config(seeds=1), fresh=True)) == 2
    assert len(list(out.glob("jobs/train/*/row.json"))) == 2
    for content in (None, "{}", "[]"):
        other = tmp_path / f"other-{content}"
        (other / "jobs").mkdir(parents=True)
        if content is not None:
            (other / "config.json").write_text(content)
        with pytest.raises(RunError, match=r"is not the folder of a run: .*; nothing was removed"):
            rows_of(other, fresh=True)
        assert (other / "jobs").is_dir()


@pytest.mark.parametrize("fresh", [False, True])
def test_settings_that_the_data_refuse_leave_everything_as_it_was(fresh: bool, tmp_path: Path) -> None:
    def refuse() -> None:
        raise ValueError("seeds must be another")

    for _ in range(2):
        before = files(tmp_path)
        with run_of(tmp_path, fresh=fresh) as run, pytest.raises(RunError, match="seeds must be another"):
            run.prepare(refuse)
        assert files(tmp_path) == before
        rows_of(tmp_path)


# --- versions, times, what is said ----------------------------------------------------------------------------------


def said(out: Path, config: Config | None = None, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    rows_of(out, config, console=console, **options)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_other_versions_are_said_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = harness.versions()
    monkeypatch.setattr(harness, "versions", lambda: {**now, "torch": "2.6.0"})
    assert "warning" not in said(tmp_path)
    monkeypatch.setattr(harness, "versions", lambda: now)
    assert "warning" not in said(tmp_path)  # there is nothing left to do
    (tmp_path / "jobs/train/alpha=2,seed=1/row.json").unlink()
    shown = said(tmp_path)
    assert shown.count("warning") == 1
    assert f"were done with other versions: torch 2.6.0 is now {now['torch']};" in shown
    assert shown.startswith("toy: 3 of 4 jobs are done\n")
    made = [row.versions for row in rows_of(tmp_path)]
    assert [each["torch"] for (each,) in made] == ["2.6.0"] * 3 + [now["torch"]]


def test_a_job_that_was_taken_up_under_other_versions_has_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = harness.versions()
    monkeypatch.setenv(BREAK, "crash=0")
    monkeypatch.setattr(harness, "versions", lambda: {**now, "torch": "2.6.0"})
    rows_of(tmp_path)
    monkeypatch.delenv(BREAK)
    monkeypatch.setattr(harness, "versions", lambda: now)
    (row, *_) = rows_of(tmp_path)
    assert [each["torch"] for each in row.versions] == ["2.6.0", now["torch"]]
    assert not (row.folder / "begun.json").exists()


def test_versions_side_by_side() -> None:
    old, new = {"torch": "2.6", "cpu": "a", "commit": ""}, {"torch": "2.7", "cpu": "b", "commit": "abc"}
    assert changes(old, old) == ""
    assert changes(old, new) == "commit unknown is now abc, torch 2.6 is now 2.7"
    assert merged([old, old, new]) == {
        "torch": "2.6 (2 jobs), 2.7 (1 jobs)", "cpu": "a (2 jobs), b (1 jobs)",
        "commit": "unknown (2 jobs), abc (1 jobs)",
    }  # fmt: skip
    assert merged([old, old]) == old


def test_seconds_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    before, path = rows_of(tmp_path), tmp_path / "times.jsonl"
    times = {line["job"]: line["seconds"] for line in map(json.loads, path.read_text().splitlines())}
    assert times.keys() == {f"train/alpha={alpha},seed={seed}" for alpha in (1, 2) for seed in (0, 1)}
    path.write_text("whatever")
    assert rows_of(tmp_path) == before, "nothing depends on them"


# --- one job at a time, and several ranks ---------------------------------------------------------------------------


def test_a_job_that_fills_the_machine_has_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setenv(BREAK, "crash=1")
    with run_of(tmp_path, workers=2) as run:
        rows = run.map(toys.train, toys.jobs(Config()), distributed=True)
    assert set(asked) == {3}
    assert rows.lost == 2, "one crash fails one job here too"


def test_ranks_that_nobody_can_use_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "current_ranks", lambda: Ranks(0, 2))
    with run_of(tmp_path) as run, pytest.raises(RunError, match="toy trains on one process per job, got 2 ranks"):
        run.map(toys.train, toys.jobs(Config()))
    assert not list(tmp_path.iterdir())


def torchrun(out: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The toy on two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", toys.__file__]
    command += ["--preset", "smoke", "--out", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def test_ranks_do_each_job_together_and_one_of_them_writes(tmp_path: Path) -> None:
    done = torchrun(tmp_path / "run", "--distributed")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Report:") == 1
    (table,) = json.loads((tmp_path / "run" / "summary.json").read_text())["sections"][0]["tables"]
    assert [row[2]["mean"] for row in table["rows"]] == [2, 2]
    again = torchrun(tmp_path / "run", "--distributed")
    assert again.returncode == 0, again.stderr
    assert "jobs\n" not in again.stdout


# --- errors of the machine ------------------------------------------------------------------------------------------


def toy(out: Path, *options: str, **pipes: Any) -> subprocess.CompletedProcess[str]:
    """The toy in a process of its own."""
    command = [sys.executable, toys.__file__, "--preset", "smoke", "--workers", "2", "--out", str(out), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes
    return subprocess.run(command, text=True, timeout=300, check=False, **pipes)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a few kilobytes."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a small disk is not allowed here")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_full_disk_loses_nothing(small_disk: Path) -> None:
    out = small_disk / "run"
    done = toy(out, "--steps", "300")
    assert done.returncode == 1
    errors = done.stderr.splitlines()
    assert len(errors) == 1, done.stderr
    assert "No space left on device; the same command goes on from here" in errors[0]
    assert str(out) in errors[0]
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    done = toy(out, "--steps", "300")
    assert done.returncode == 0, done.stderr
    assert not list(out.rglob("*.tmp"))


@pytest.mark.parametrize("out", ["{tmp}/file/run", "/proc/run", "{tmp}/" + 300 * "x"])
def test_folders_that_cannot_be_made_are_one_line(out: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as error:  # noqa: PT011 (which one depends on the system)
        rows_of(Path(out.format(tmp=tmp_path)))
    assert error.value.errno in (errno.ENOTDIR, errno.ENOENT, errno.EACCES, errno.ENAMETOOLONG)
    assert error.value.filename is not None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = toy(tmp_path / "run", stdout=full)
    assert done.returncode == 1
    assert done.stderr == "error: standard output: No space left on device; the same command goes on from here\n"
    reading, writing = os.pipe()
    os.close(reading)
    done = toy(tmp_path / "run", stdout=writing)
    os.close(writing)
    assert done.returncode == 1
    assert done.stderr == "error: standard output: its reader has gone; the same command goes on from here\n"
    assert toy(tmp_path / "run").returncode == 0


def test_a_page_that_lacks_the_rows_of_failed_jobs_is_not_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from powerprop_paper import cli

    def choking(cfg: Config, run: harness.Run) -> Any:
        run.map(toys.train, toys.jobs(cfg))
        raise IndexError("a row that is not there")

    monkeypatch.setenv(BREAK, "crash=0")
    experiment = replace(toys.EXPERIMENT, main=choking)
    with pytest.raises(JobsFailedError, match="2 jobs failed"):
        cli.run_experiment(experiment, cli.Options("smoke", tmp_path, workers=1), Config())
    monkeypatch.delenv(BREAK)
    with pytest.raises(IndexError, match="a row that is not there"):
        cli.run_experiment(experiment, cli.Options("smoke", tmp_path, workers=1), Config())
