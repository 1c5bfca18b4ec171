"""Kills, full disks, damaged files and rivals: does the same command always end in the same bytes?

`make chaos` runs all of it. A run of each family of experiments at its smallest is left alone once. Then it is struck,
the same command is given again, and everything in its folder is compared with the run that was left alone, but for the
times that jobs took.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import families
import torch
from faults import DISK_STAGES, STAGES, Faults, StepOrFraction

from powerprop.cli import main
from powerprop_paper.folder import FOR_RESUMING, LOCK, ROW, TIMES
from powerprop_paper.report.style import matplotlib
from powerprop_paper.train import load_checkpoint

LONGEST = 240.0
"""Seconds after which a run counts as hanging."""
PROGRAM = Path(__file__).parent / "families.py"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
CLOCK = (LOCK, TIMES)
"""Files that tell nothing, or what the clock said."""
Damage = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    code: int
    errors: str = ""

    @property
    def clean(self) -> bool:
        """Done, or an end in a few lines of plain words."""
        return self.code == 0 or (0 < len(self.errors.splitlines()) <= 4 and "Traceback" not in self.errors)

    def stopped_by(self, number: signal.Signals) -> bool:
        """Done, or ended as this signal ends a command: Ctrl-C in one line, the others without a word."""
        if self.code == 0:
            return True
        if number == signal.SIGINT:
            return (self.code, self.errors) == (130, "interrupted; the same command goes on from here\n")
        return (self.code, self.errors) == (-number, "")


@dataclass
class Tally:
    """What came of the tries, by family and kind of trouble."""

    tried: Counter[tuple[str, str]] = field(default_factory=Counter)
    identical: Counter[tuple[str, str]] = field(default_factory=Counter)
    leftovers: Counter[tuple[str, str]] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)

    def add(self, family: str, kind: str, complaint: str, left: list[str]) -> None:
        self.tried[family, kind] += 1
        self.identical[family, kind] += not complaint
        self.leftovers[family, kind] += len(left)
        if complaint or left:
            self.complaints.append(f"{family}, {kind}: {complaint} {left or ''}")
            print(f"! {self.complaints[-1]}", flush=True)

    def table(self) -> str:
        """Markdown: one row for each kind of trouble, all families together, then one for each family."""
        lines = ["| | tried | identical | lost | leftovers |", "|---|---|---|---|---|"]
        kinds = list(dict.fromkeys(kind for _, kind in self.tried))
        names = list(dict.fromkeys(family for family, _ in self.tried))
        for title in (*kinds, *names):
            chosen = [key for key in self.tried if title in key]
            lines.append(self._row(title, chosen))
        return "\n".join([*lines, self._row("**all**", list(self.tried))])

    def _row(self, title: str, keys: list[tuple[str, str]]) -> str:
        tried, same, left = (sum(c[key] for key in keys) for c in (self.tried, self.identical, self.leftovers))
        return f"| {title} | {tried} | {same} | {tried - same} | {left} |"


class Chaos:
    """All tries on one family."""

    def __init__(self, family: str, place: Path, tally: Tally, chance: random.Random, until: float) -> None:
        self.family, self.place, self.tally, self.chance, self.until = family, place, tally, chance, until
        self.whole = place / f"{family}-whole"
        self.count = 0
        with redirect_stdout(io.StringIO()):  # once in this process: what is imported late, forks need not import again
            assert main(families.command(family, place / f"{family}-warm")) == 0
        began = time.monotonic()
        ended = self.run(self.whole, Faults(None, record=place / "moments.json"))
        self.seconds = time.monotonic() - began
        assert ended.code == 0, ended.errors
        self.reference = snapshot(self.whole)
        moments = json.loads((place / "moments.json").read_text())
        self.moments = {(stage, kind): count for stage, kind, count in moments}

    # --- running ----------------------------------------------------------------------------------------------------

    def run(
        self, out: Path, faults: Faults | None = None, after: float = LONGEST, number: signal.Signals = signal.SIGKILL
    ) -> Ended:
        """The command in a fork of this process, which has imported everything; it gets a signal after some seconds."""
        errors = self.place / "errors.txt"
        pid = os.fork()
        if pid == 0:
            self._in_fork(out, errors, faults)
        deadline = time.monotonic() + after
        while (done := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() >= deadline:
                os.kill(pid, number)
                done = os.waitpid(pid, 0)
                break
            time.sleep(0.002)
        return Ended(os.waitstatus_to_exitcode(done[1]), errors.read_text() if errors.exists() else "")

    def _in_fork(self, out: Path, errors: Path, faults: Faults | None) -> None:
        code = 0  # a signal before the command begins is none
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with open(errors, "wb") as file, open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), 1)
                os.dup2(file.fileno(), 2)
                if faults is not None:
                    faults.install()
                code = 70
                code = main(families.command(self.family, out))
                if faults is not None:
                    faults.finish()
        finally:
            os._exit(code)

    def start(self, out: Path, workers: int) -> subprocess.Popen[str]:
        """The command as a process of its own, with worker processes."""
        data = os.environ["POWERPROP_DATA"]
        program = [sys.executable, str(PROGRAM), data, *families.command(self.family, out, workers)]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        return subprocess.Popen(program, **pipes, text=True, preexec_fn=heed_interrupts)  # type: ignore[call-overload]

    def fresh(self) -> Path:
        """A folder that is not there yet."""
        self.count += 1
        return self.place / f"{self.family}-{self.count}"

    def settle(self, kind: str, out: Path, complaint: str = "", spared: str = "") -> None:
        """Give the same command again, compare with the run that was left alone, and clear away."""
        ended = self.run(out)
        if ended.code:
            complaint = complaint or f"the same command ended with {ended.code}: {ended.errors.strip()[-300:]}"
        else:
            complaint = complaint or difference(self.reference, snapshot(out), spared)
        left = sorted(str(path.relative_to(out)) for path in out.rglob("*.tmp"))
        self.tally.add(self.family, kind, complaint, left)
        shutil.rmtree(out)

    @property
    def time_left(self) -> bool:
        return time.monotonic() < self.until

    # --- troubles ---------------------------------------------------------------------------------------------------

    def random_kills(self, count: int) -> None:
        """Interrupted, terminated and killed, once to three times at random moments."""
        for turn in range(count):
            if not self.time_left:
                return
            out, number, complaint = self.fresh(), SIGNALS[turn % 3], ""
            for _ in range(self.chance.choice((1, 1, 2, 3))):
                ended = self.run(out, after=self.chance.uniform(0, self.seconds), number=number)
                complaint = complaint or ("" if ended.stopped_by(number) else f"after {number.name}: {ended}")
            self.settle(f"{number.name} at random moments", out, complaint)

    def kills_in_writes(self, most: int) -> None:
        """Killed in every stage of writing every kind of file."""
        for moment in self.some_moments(STAGES, most):
            out = self.fresh()
            ended = self.run(out, Faults(moment))
            self.settle("killed inside a write", out, "" if ended.code == -9 else f"{moment} was not reached")

    def full_writes(self, most: int) -> None:
        """The disk is full at some write: one line that names the file, and nothing is lost."""
        for moment in self.some_moments(DISK_STAGES, most):
            out = self.fresh()
            ended = self.run(out, Faults(moment, "full"))
            named = moment.kind.lstrip("*") in ended.errors and "No space left" in ended.errors
            fine = ended.code == 1 and len(ended.errors.splitlines()) == 1 and named
            self.settle("disk full at a write", out, "" if fine else f"{moment}: {ended}")

    def some_moments(self, stages: tuple[str, ...], most: int) -> Iterator[StepOrFraction]:
        """Each stage of each kind of file at one of the times that it is reached, in random order."""
        pairs = [pair for pair in self.moments if pair[0] in stages]
        self.chance.shuffle(pairs)
        for stage, kind in pairs[:most]:
            if self.time_left:
                yield StepOrFraction(stage, kind, self.chance.randint(1, self.moments[stage, kind]))

    def small_disk(self, count: int) -> None:
        """A disk that is really full, at several sizes; then it has room."""
        size = sum(path.stat().st_size for path in self.whole.rglob("*") if path.is_file())
        for number in range(count):
            if not self.time_left:
                return
            share = (number + 0.1) / count
            disk = self.fresh()
            disk.mkdir()
            kilobytes = max(24, int(size * share / 1024))
            mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(disk)]
            if subprocess.run(mount, capture_output=True, check=False).returncode:
                print("mounting a small disk is not allowed here: that part is left out", flush=True)
                disk.rmdir()
                return
            try:
                ended = self.run(disk / "run")
                fine = ended.code == 1 and len(ended.errors.splitlines()) == 1 and "No space left" in ended.errors
                room = ["mount", "-o", f"remount,size={size // 512 + 4096}k", str(disk)]
                subprocess.run(room, check=True)
                self.settle("disk full for real", disk / "run", "" if fine else f"{kilobytes} KB: {ended}")
            finally:
                subprocess.run(["umount", "-l", str(disk)], check=True)
                disk.rmdir()

    def damaged_files(self, most: int) -> None:
        """Files of a finished and of a half-done run are damaged in every way."""
        half = self.half_done()
        cases = [
            (base, path.relative_to(base), name)
            for base in (self.whole, half)
            for path in sorted(base.rglob("*"))
            for name in DAMAGES
            if path.is_file() and path.name != LOCK
        ]
        self.chance.shuffle(cases)
        for base, path, name in cases[:most]:
            if self.time_left:
                self.damaged(base, path, name)
        shutil.rmtree(half)

    def half_done(self) -> Path:
        """A run that was killed when it had put a file to resume from in its place for the second time."""
        kind = next((k for k in sorted(FOR_RESUMING) if ("replaced", k) in self.moments), ROW)
        out = self.place / f"{self.family}-half"
        self.run(out, Faults(StepOrFraction("replaced", kind, min(2, self.moments["replaced", kind]))))
        return out

    def damaged(self, base: Path, path: Path, damage: str) -> None:
        """Damage one file; the run finds it out or ends in the same bytes, and its advice helps."""
        out = self.fresh()
        shutil.copytree(base, out)
        content = (out / path).read_bytes()
        (out / path).write_bytes(DAMAGES[damage](content, self.chance))
        what, complaint = f"{damage} {path}", ""
        for _ in range(3):
            ended = self.run(out)
            if ended.code == 0:
                break
            if not ended.clean or str(out / path) not in ended.errors:
                complaint = complaint or f"{what}: {ended}"
            follow_advice(ended.errors, out, out / path, content)
        # Of a finished job its row is read, and what the page shows; the rest is left as it is.
        finished = path.name != ROW and (base / path).with_name(ROW).exists()
        spared = str(path) if finished else ""
        self.settle("damaged files", out, complaint, spared)

    def processes(self, count: int) -> None:
        """Real processes with workers: the parent is stopped, a worker is killed, two work on one folder."""
        for turn in range(count):
            if not self.time_left:
                return
            (partial(self.parent_stopped, SIGNALS[turn // 3 % 3]), self.worker_killed, self.rivals)[turn % 3]()

    def parent_stopped(self, number: signal.Signals) -> None:
        out = self.fresh()
        process = self.start(out, workers=self.chance.choice((2, 3)))
        workers = wait_for_workers(process, out)
        time.sleep(self.chance.uniform(0, self.seconds))
        process.send_signal(number)
        _, errors = process.communicate()
        orphans = [pid for pid in workers if lives(pid, seconds=20)]
        fine = not orphans and Ended(process.returncode, errors).stopped_by(number)
        complaint = f"{number.name}: {process.returncode} {errors.strip()[-300:]}, workers that live on: {orphans}"
        self.settle("parent of workers stopped", out, "" if fine else complaint)

    def worker_killed(self) -> None:
        out = self.fresh()
        process = self.start(out, workers=2)
        workers = wait_for_workers(process, out)
        if workers:
            os.kill(self.chance.choice(workers), signal.SIGKILL)
        ended = Ended(process.wait(LONGEST), process.communicate()[1])
        self.settle("worker killed", out, "" if ended.clean else str(ended))

    def rivals(self) -> None:
        out = self.fresh()
        pair = [self.start(out, workers=1) for _ in range(2)]
        ends = [Ended(process.wait(LONGEST), process.communicate()[1]) for process in pair]
        refused = [end for end in ends if "is in use by another process" in end.errors and end.code == 2]
        fine = len(refused) == 1 and sum(end.code == 0 for end in ends) == 1
        self.settle("two processes on one folder", out, "" if fine else str(ends))


def overwritten(content: bytes, chance: random.Random) -> bytes:
    """Up to 4 KB in the middle are random."""
    size = min(4096, max(1, len(content) // 4))
    start = chance.randrange(max(1, len(content) - size))
    return content[:start] + chance.randbytes(size) + content[start + size :]


def bit_flipped(content: bytes, chance: random.Random) -> bytes:
    """One bit is the other one."""
    place = chance.randrange(max(1, len(content)))
    return content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]


DAMAGES: dict[str, Damage] = {
    "overwritten": overwritten,
    "flipped": bit_flipped,
    "cut": lambda content, chance: content[: chance.randrange(max(1, len(content)))],
    "emptied": lambda content, chance: b"",
    "edited to {}": lambda content, chance: b"{}",
    "edited to null": lambda content, chance: b"null",
    "edited to []": lambda content, chance: b"[]",
}


def follow_advice(errors: str, out: Path, damaged: Path, content: bytes) -> None:
    """Delete what the message says; where it says to undo an edit, do that."""
    for found in re.findall(r"delete (\S+)", errors):
        path = Path(found.rstrip(";,"))
        if path.is_relative_to(out) and path != out:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            return
    damaged.parent.mkdir(parents=True, exist_ok=True)
    damaged.write_bytes(content)


def snapshot(out: Path) -> dict[str, Any]:
    """The content of every file of a run; of a checkpoint all but the state of the process's random numbers."""
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        if path.is_file() and path.name not in CLOCK:
            found[str(path.relative_to(out))] = path.read_bytes()
    for name in found:
        if name.endswith("checkpoint.pt"):
            with suppress(ValueError):  # left damaged beside a finished job
                found[name] = {k: v for k, v in load_checkpoint(out / name).items() if k != "random"}
    return found


def difference(whole: dict[str, Any], found: dict[str, Any], spared: str) -> str:
    """The names of files that differ; empty if none does."""
    names = sorted(whole.keys() | found.keys())
    odd = [n for n in names if n != spared and not (n in whole and n in found and same(whole[n], found[n]))]
    return f"differs from the run that was left alone: {', '.join(odd)}" if odd else ""


def same(one: Any, two: Any) -> bool:
    """The same values, bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(same(v, two[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def heed_interrupts() -> None:
    """A shell that starts this in the background makes its children ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for_workers(process: subprocess.Popen[str], out: Path) -> list[int]:
    """The worker processes, once a job has begun."""
    deadline = time.monotonic() + LONGEST
    while process.poll() is None and time.monotonic() < deadline:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        pids = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        if pids and list(out.glob("jobs/*/*/*.json")):
            return [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        time.sleep(0.01)
    return []


def lives(pid: int, seconds: float) -> bool:
    """Whether a process is still there after some seconds, and not only waits to be collected."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except (FileNotFoundError, ProcessLookupError):
            return False
        time.sleep(0.02)
    return True


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", default=list(families.FAMILIES), choices=list(families.FAMILIES))
    parser.add_argument("--kills", type=int, default=15, help="at random moments, per family")
    parser.add_argument("--writes", type=int, default=1000, help="at most so many writes to strike at, per family")
    parser.add_argument("--damaged", type=int, default=60, help="files to damage, per family")
    parser.add_argument("--processes", type=int, default=6, help="runs with worker processes, per family")
    parser.add_argument("--disks", type=int, default=4, help="small disks to fill, per family")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing new after this time")
    memory = Path("/dev/shm")
    parser.add_argument("--place", type=Path, default=memory if memory.is_dir() else None, help="folder to work in")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def run_all() -> int:
    """Every trouble on every family; 0 if nothing was lost and nothing is left over."""
    asked, tally = arguments(), Tally()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that disks are unmounted and folders removed
    torch.set_num_threads(1)
    matplotlib()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="powerprop-chaos-", dir=asked.place) as folder:
        families.write_pictures(Path(folder) / "data")
        families.install(Path(folder) / "data")
        for number, family in enumerate(asked.families, 1):
            until = began + asked.seconds * number / len(asked.families)
            chaos = Chaos(family, Path(folder), tally, random.Random(f"{asked.seed} {family}"), until)
            chaos.random_kills(asked.kills)
            chaos.processes(asked.processes)
            chaos.small_disk(asked.disks)
            chaos.damaged_files(asked.damaged)
            chaos.kills_in_writes(asked.writes)
            chaos.full_writes(asked.writes)
            print(f"{family}: {time.monotonic() - began:.0f} s", flush=True)
    print(f"\n{tally.table()}\n\nseed {asked.seed}, {time.monotonic() - began:.0f} s")
    return 1 if tally.complaints else 0


if __name__ == "__main__":
    sys.exit(run_all())
