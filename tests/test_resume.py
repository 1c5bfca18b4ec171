"""A real run that is interrupted and killed ends, by the same command, in the same bits as one that was left alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import standin
from powerprop.cli import main
from powerprop_paper import data
from powerprop_paper.train import load_checkpoint
from toys import files

STANDIN = Path(__file__).parent / "standin.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")


def command(out: Path, workers: int) -> list[str]:
    return ["run", "mnist-oneshot", "--preset", "smoke", "--workers", str(workers), "--out", str(out)]


def half_done(out: Path) -> list[Path]:
    """Jobs that have a checkpoint and no row."""
    return [file for file in out.glob("jobs/*/*/checkpoint.pt") if not (file.parent / "row.json").exists()]


def heed_interrupts() -> None:
    """A shell that starts the tests in the background makes its children ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stop_in_the_middle(out: Path, number: signal.Signals, done: int) -> tuple[subprocess.Popen[str], list[int]]:
    """Start the run and signal it while a job is being trained and `done` others are finished; its worker processes."""
    program = [sys.executable, str(STANDIN), *command(out, workers=2)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(program, **pipes, text=True, preexec_fn=heed_interrupts)  # type: ignore[call-overload]
    deadline = time.monotonic() + 120
    while not (half_done(out) and len(list(out.glob("jobs/*/*/row.json"))) >= done):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    workers = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.send_signal(number)
    return process, workers


def kill_in_the_middle(out: Path) -> None:
    """Kill the run; again, if the job at hand was over before its worker noticed."""
    for done in (1, 2, 3):
        process, workers = stop_in_the_middle(out, signal.SIGKILL, done)
        process.communicate(timeout=30)
        assert process.returncode == -signal.SIGKILL
        assert len(workers) >= 2
        assert_gone(workers)
        if half_done(out):
            return


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if running(pid)]}"
        time.sleep(0.02)


def running(pid: int) -> bool:
    """Alive and not a zombie that waits to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_stopped_twice_and_resumed_is_bit_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    monkeypatch.setattr(data, "load", standin.load)
    assert main(command(whole, workers=1)) == 0

    process, workers = stop_in_the_middle(parts, signal.SIGINT, done=0)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "interrupted; the same command goes on from here\n"
    assert_gone(workers)

    kill_in_the_middle(parts)
    assert half_done(parts)

    assert main(command(parts, workers=1)) == 0
    assert f"Report: {parts / 'report.html'}" in capsys.readouterr().out
    one, two = files(whole), files(parts)
    assert one.keys() == two.keys()
    jobs = [name for name in one if name.endswith("/row.json")]
    assert len(jobs) == 5  # two learning rates for α = 1, the one chosen for α = 2, one more seed each
    assert [name for name in one if one[name] != two[name] and not name.endswith("checkpoint.pt")] == []
    for name in jobs:
        first, second = (load_checkpoint(out / name.replace("row.json", "checkpoint.pt")) for out in (whole, parts))
        assert first["step"] == second["step"] == 40
        assert all(torch.equal(first["model"][key], second["model"][key]) for key in first["model"])

    written = {path: path.stat().st_mtime_ns for path in parts.rglob("jobs/**/*")}
    assert main(command(parts, workers=1)) == 0
    assert {path: path.stat().st_mtime_ns for path in parts.rglob("jobs/**/*")} == written
    assert files(parts) == two


def test_a_damaged_checkpoint_is_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "load", standin.load)
    arguments = [*command(tmp_path, workers=1), "--seeds", "1", "--alphas", "1", "--lrs", "0.5"]
    assert main(arguments) == 0
    before = files(tmp_path)
    (job,) = tmp_path.glob("jobs/train/*")
    (job / "row.json").unlink()
    path = job / "checkpoint.pt"
    content = bytearray(path.read_bytes())
    content[100_000:104_096] = bytes(range(256)) * 16
    path.write_bytes(content)
    capsys.readouterr()
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(f"error: train/{job.name}: {path} is damaged or not a checkpoint (the content of ")
    assert f"; delete {path} to start this training from its beginning" in error
    path.unlink()
    assert main(arguments) == 0
    changed = {name for name, found in files(tmp_path).items() if found != before[name]}
    assert changed <= {f"jobs/train/{job.name}/{path.name}"}
