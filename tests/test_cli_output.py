"""What is printed is whole: on narrow terminals, through pipes, in any encoding, on a full disk."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import toys
from powerprop.cli import main
from powerprop_paper.cli import FAMILIES
from powerprop_paper.display import fits, print_table
from powerprop_paper.report import Column, Table

WIDE = Table(
    "Accuracy of every method", ["", *(Column(f"uniform-{n}", digits=2) for n in range(12))],
    [["Powerprop + Top-KAST", *(90 + n / 8 for n in range(12))], ["Static", None, *(80 + n / 8 for n in range(11))]],
    "In percent.",
)  # fmt: skip


def printed(table: Table, width: int, terminal: bool) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    print_table(console, table.to_rich())
    return console.file.getvalue()  # type: ignore[attr-defined]


def words(table: Table) -> set[str]:
    return set(re.findall(r"\S+", table.to_markdown().replace("|", " ").replace("*", "").replace("\\", "")))


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("terminal", [True, False])
def test_no_width_cuts_a_table(width: int, terminal: bool) -> None:
    shown = printed(WIDE, width, terminal)
    assert "…" not in shown
    assert words(WIDE) - {"---", "---:"} <= set(re.findall(r"[^\s:]+", shown)) | {"---"}


def test_a_narrow_terminal_stacks_the_columns() -> None:
    shown = printed(WIDE, 80, terminal=True)
    assert "Powerprop + Top-KAST\n  uniform-0: 90.00\n  uniform-1: 90.12\n" in shown
    assert "Static\n  uniform-1: 80.00\n" in shown, "values that are not there have no line"
    assert not fits(WIDE.to_rich(), 80)
    assert fits(WIDE.to_rich(), 200)


def test_a_pipe_has_one_line_per_row() -> None:
    lines = printed(WIDE, 80, terminal=False).splitlines()
    assert sum("Top-KAST" in line and "91.38" in line for line in lines) == 1


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_list_shows_full_names(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^{name} ", shown, flags=re.MULTILINE) for name in FAMILIES)
    assert "…" not in shown
    assert all(len(line) <= max(61, int(columns)) for line in shown.splitlines())


# --- in a process of its own ------------------------------------------------------------------------------------------


def toy(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The toy as a script."""
    command = [sys.executable, toys.__file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def test_an_ascii_locale_shows_everything(tmp_path: Path) -> None:
    arguments = ["--preset", "smoke", "--workers", "1", "--out", str(tmp_path / "run")]
    done = toy(*arguments, LC_ALL="C", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "alpha = 1" in done.stdout
    assert "40.50 +- 0.71" in done.stdout
    assert "?" not in done.stdout


@pytest.mark.parametrize("arguments", [["list"], ["run", "mnist-oneshot", "--help"]])
def test_an_ascii_stream_spells_out_what_it_lacks(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(arguments) == 0
    shown = stream.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "figure 2 a-d" in shown


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("why", ["No space left on device", "its reader has gone"])
def test_help_that_cannot_be_written_is_one_line(why: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "powerprop", "run", "mnist-oneshot", "--help"]
        out = full if why.startswith("No space") else writing
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.stderr == f"error: standard output: {why}; the same command goes on from here\n"
    assert done.returncode == 1


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_goes_on(number: signal.Signals, tmp_path: Path) -> None:
    arguments = ["--preset", "smoke", "--workers", "2", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [sys.executable, toys.__file__, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TOY_SECONDS": "0.5"}, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "toy: 4 jobs\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert (process.returncode, errors) == (130, "interrupted; the same command goes on from here\n")
    else:
        assert process.returncode == -number
    assert toy(*arguments).returncode == 0


def test_small_commands_need_no_matplotlib() -> None:
    code = (
        "import sys\nfrom powerprop.cli import main\n"
        "for each in (['--version'], ['list'], ['run', 'imagenet', '--help'], ['show']):\n"
        "    assert main(each) in (0, 2)\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("powerprop 0.")
