"""Command lines and files as nobody means them: plain errors only, no tracebacks, no hangs, little memory.

`make fuzz` runs 10,000 seeded cases. A case is a command line, or a file of one of the kinds that powerprop reads, cut,
flipped, overwritten or made of something else. It may be refused in plain words; a file that carries a checksum and is
accepted must give what was written.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import numpy as np
import torch
from chaos import same
from damage import crafted, damaged, edited, rezipped
from kinds import TARGETS

from powerprop.cli import main
from powerprop.files import FileError
from powerprop_paper.cli import FAMILIES
from powerprop_paper.data import DataCorrupt, DataNotFound
from powerprop_paper.run import Run, RunError

PLAIN = (FileError, RunError, DataCorrupt, DataNotFound)
"""Errors that say what is wrong with a file."""
HANDMADE = {"checkpoint": rezipped, **dict.fromkeys(("learner", "masks", "weights"), crafted)}
"""Damage with checksums that fit: what is accepted then is what somebody meant."""
LONGEST = 20
"""Seconds after which a case counts as hanging."""
MEMORY = 2**30
"""Bytes that the whole run may take."""


class Hang(BaseException):
    """A case that did not come to an end."""


class Fuzz:
    """Cases in a folder of their own, and what came of them."""

    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.seed = place, seed
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.bad: list[str] = []
        self.good: dict[str, tuple[bytes, Any]] = {}
        for name, target in TARGETS.items():
            path = self.path(name)
            path.parent.mkdir(parents=True)
            target.make(path)
            self.good[name] = (path.read_bytes(), target.read(path))
        self.run = place / "run"
        with quiet():
            assert main(families.command("oneshot", self.run)) == 0
        self.whole = {path: path.read_bytes() for path in self.run.rglob("*.json")}

    def path(self, name: str) -> Path:
        return self.place / name.replace(" ", "-").replace(",", "") / "file"

    def case(self, number: int) -> None:
        """One case, chosen by its number."""
        chance = random.Random(f"{self.seed} {number}")
        kinds = [*TARGETS, "run's JSON", "command line", "command line"]
        name = kinds[number % len(kinds)]
        try:
            with time_limit(LONGEST):
                outcome = self.outcome(name, chance)
        except Hang as error:
            outcome = "hang"
            self.complain(number, name, "".join(traceback.format_tb(error.__traceback__)[-12:]))
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            outcome = "traceback"
            self.complain(number, name, f"{type(error).__name__}: {error!s:.150} at {last.filename}:{last.lineno}")
        if outcome == "wrong":
            self.complain(number, name, outcome)
        self.outcomes[name, outcome] += 1

    def outcome(self, name: str, chance: random.Random) -> str:
        if name == "command line":
            return self.command_line(words(chance, self.run))
        if name == "run's JSON":
            return self.edited_run(chance)
        return self.file(name, chance)

    def complain(self, number: int, name: str, text: str) -> None:
        self.bad.append(f"case {number}, {name}: {text}")
        print(f"! {self.bad[-1]}", flush=True)

    def file(self, name: str, chance: random.Random) -> str:
        """Read a damaged file."""
        path, (content, whole) = self.path(name), self.good[name]
        way = HANDMADE.get(name, damaged) if chance.random() < 0.3 else damaged
        path.write_bytes(way(content, chance))
        try:
            found = TARGETS[name].read(path)
        except PLAIN as error:
            return "refused" if str(self.place) in str(error) else "wrong"
        return "read" if way is not damaged or not TARGETS[name].exact or same_values(whole, found) else "wrong"

    def edited_run(self, chance: random.Random) -> str:
        """Damage or edit a JSON file of a finished run, give its command again or look at it, and put it back."""
        path = chance.choice(sorted(self.whole))
        content = self.whole[path]
        path.write_bytes(edited(content, chance) if chance.random() < 0.6 else damaged(content, chance))
        again = chance.random() < 0.7
        try:
            outcome = self.command_line(families.command("oneshot", self.run) if again else ["show", str(self.run)])
            summary = self.run / "summary.json"
            return "wrong" if again and outcome == "done" and summary.read_bytes() != self.whole[summary] else outcome
        finally:
            for each, before in self.whole.items():
                each.write_bytes(before)

    def command_line(self, arguments: list[str]) -> str:
        """Give a command; it is done, or refused with plain words on stderr."""
        with quiet() as errors:
            try:
                code: Any = main(arguments)
            except SystemExit as error:
                code = error.code
        text = errors.getvalue()
        if "Traceback" in text or code not in (0, 1, 2):
            self.bad.append(f"{arguments}: {code} {text[-300:]}")
            return "wrong"
        return "done" if code == 0 else "refused"

    def table(self) -> str:
        """Markdown: what came of each kind of case."""
        columns = ("refused", "read", "done", "wrong", "traceback", "hang")
        lines = ["| | cases | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
        names = list(dict.fromkeys(name for name, _ in self.outcomes))
        for name in names:
            counts = [self.outcomes[name, column] for column in columns]
            lines.append(f"| {name} | {sum(counts)} | " + " | ".join(map(str, counts)) + " |")
        totals = [sum(self.outcomes[name, column] for name in names) for column in columns]
        return "\n".join([*lines, f"| **all** | {sum(totals)} | " + " | ".join(map(str, totals)) + " |"])


def same_values(one: Any, two: Any) -> bool:
    """Arrays count as tensors."""
    plain = lambda v: torch.from_numpy(v) if isinstance(v, np.ndarray) else v  # noqa: E731
    if isinstance(one, dict) and isinstance(two, dict):
        one, two = ({k: plain(v) for k, v in each.items()} for each in (one, two))
    return same(one, two)


VALUES = (
    "0", "1", "-1", "2", "0.5", "1e9", "nan", "inf", "99999999999", "1e400", "", " ", "α", "smoke", "tiny", "--", "-",
    "None", "True", "[]", "rigl * 0.9", "*", "[", "/dev/null", "/dev/null/x", "/proc/x", "x" * 300, "%s", "{}", "\\",
)  # fmt: skip
OPTIONS = (
    "--preset", "--alpha", "--alphas", "--seeds", "--only", "--workers", "--out", "--tensorboard", "--combined",
    "--docs", "--fresh", "--help", "--version", "--no-tensorboard", "--speed", "--lrs", "--steps", "-h", "--out=",
)  # fmt: skip


def words(chance: random.Random, run: Path) -> list[str]:
    """A command line of words that occur, in an order that may make no sense."""
    names = [*FAMILIES, "mnist", "MNIST-ONESHOT", "mnist_oneshot"]
    known: list[Callable[[], str]] = [
        lambda: chance.choice(("list", "run", "show", "results", "compare", "inspect", "prune", "export", "train")),
        lambda: chance.choice(names),
        lambda: chance.choice(OPTIONS),
        lambda: chance.choice(VALUES),
        lambda: chance.choice((str(run), str(run / "config.json"), str(run.parent / "weights" / "file"), ".")),
        lambda: chance.choice(names)[: chance.randrange(12)],
    ]
    first = [chance.choice(("list", "run", "show", "compare", "inspect", "prune"))] if chance.random() < 0.8 else []
    if first == ["run"] and chance.random() < 0.7:
        first.append(chance.choice(names))
    return first + [chance.choice(known)() for _ in range(chance.randrange(6))]


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `Hang` in the block when the time is over."""

    def stop(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Nothing is printed; what goes to stderr is kept."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        yield errors


def no_network(*_: object, **__: object) -> Any:
    raise urllib.error.URLError("there is no network")


def no_work(*_: object) -> Any:
    """Commands that are right after all stop here instead of training."""
    raise DataNotFound("there is nothing to train on")


def peak_memory() -> int:
    """The most bytes that this program held; what getrusage says begins at the size of the process that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_all() -> int:
    """All cases; 0 if every one was read or refused in plain words, in time and memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no case after this time")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    urllib.request.urlopen = no_network  # type: ignore[assignment]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="powerprop-fuzz-") as folder:
        place = Path(folder)
        os.environ["XDG_CACHE_HOME"] = str(place / "cache")
        families.install(place / "none")
        fuzz = Fuzz(place, asked.seed)
        Run._work = no_work  # type: ignore[method-assign]
        os.chdir(place)
        for number in range(asked.first, asked.first + asked.cases):
            if time.monotonic() - began > asked.seconds:
                break
            fuzz.case(number)
        os.chdir("/")
    peak = peak_memory()
    print(f"\n{fuzz.table()}\n\nseed {asked.seed}, {time.monotonic() - began:.0f} s, {peak / 1e6:.0f} MB at most")
    for text in fuzz.bad:
        print(text)
    return 1 if fuzz.bad or peak > MEMORY else 0


if __name__ == "__main__":
    sys.exit(run_all())
