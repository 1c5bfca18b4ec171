"""`make chaos` and `make fuzz` in their short form, and TensorBoard in every family of experiments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RELIABILITY = Path(__file__).parents[1] / "benchmarks" / "reliability"
sys.path.insert(0, str(RELIABILITY))

import families  # noqa: E402

from powerprop.cli import main  # noqa: E402
from powerprop_paper.folder import ROW  # noqa: E402
from powerprop_paper.train import read_metrics  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")


def rows(text: str) -> dict[str, list[int]]:
    """The table of a tool: numbers by the first column."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines]
    return {cell[0]: [int(number) for number in cell[1:]] for cell in cells[2:]}


def jobs_of(run: Path) -> list[Path]:
    """The folders of jobs that are done."""
    return sorted(path.parent for path in (run / "jobs").rglob(ROW))


def tool(name: str, *options: str) -> str:
    program = [sys.executable, str(RELIABILITY / name), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_chaos() -> None:
    small = {"kills": 1, "writes": 2, "damaged": 3, "processes": 0, "disks": 1}
    options = [word for name, number in small.items() for word in (f"--{name}", str(number))]
    tried, identical, lost, left = rows(tool("chaos.py", "--families", "sparse", *options))["**all**"]
    assert tried >= 1 + 2 + 2 + 3
    assert (identical, lost, left) == (tried, 0, 0)


def test_fuzz() -> None:
    cases, *_, wrong, tracebacks, hangs = rows(tool("fuzz.py", "--cases", "240"))["**all**"]
    assert (cases, wrong, tracebacks, hangs) == (240, 0, 0, 0)


def test_metrics_that_were_cut_after_the_last_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    families.stand_in(monkeypatch.setattr)
    families.add_presets(monkeypatch.setitem)
    assert main(families.command("continual", tmp_path / "run")) == 0
    job = jobs_of(tmp_path / "run")[0]
    (job / ROW).unlink()
    assert main(families.command("continual", tmp_path / "run")) == 0
    (job / ROW).unlink()
    content = (job / "metrics.jsonl").read_bytes()
    for damaged, reason in ((content[:-5], "it was cut short"), (content.replace(b"1", b"7"), "is damaged or edited")):
        (job / "metrics.jsonl").write_bytes(damaged)
        assert main(families.command("continual", tmp_path / "run")) == 1
        error = capsys.readouterr().err
        assert f"{job / 'metrics.jsonl'} " in error
        assert reason in error
        assert f"delete {job} and the same command does this job again" in error


LOGGED = {"world": "success left"}
"""What a family logs in place of its loss."""


@pytest.mark.parametrize("family", [each for each in families.FAMILIES if each != "inference"])  # which logs nothing
def test_tensorboard_hears_of_every_job(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    families.write_pictures(tmp_path / "data")
    families.stand_in(monkeypatch.setattr)
    monkeypatch.setenv("POWERPROP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("POWERPROP_TENSORBOARD", "1")
    families.add_presets(monkeypatch.setitem)
    assert main(families.command(family, tmp_path / "run")) == 0
    jobs = jobs_of(tmp_path / "run")
    assert jobs
    for job in jobs:
        assert any(LOGGED.get(family, "loss") in row for row in read_metrics(job / "metrics.jsonl"))
        assert [path.stat().st_size > 100 for path in job.glob("tensorboard/events.*")] == [True]
