"""Command lines and files as nobody means them: plain errors only, no tracebacks, no hangs, little memory.

`make fuzz` runs 10,000 seeded cases. A case is a command line, or a file of one of the kinds that powerprop reads, cut,
flipped, overwritten or made of something else. It may be refused in plain words; a file that carries a checksum and is
accepted must give what was written.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import traceback
import urllib.error
import urllib.request
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families
import numpy as np
import torch
from chaos import same
from PIL import Image

from powerprop import data
from powerprop.cli import main
from powerprop.continual import EfficientPackNet
from powerprop.continual.saving import state_of
from powerprop.data import DataCorrupt, DataNotFound
from powerprop.data.cifar import read_batch
from powerprop.data.idx import load_idx
from powerprop.data.notmnist import idx_bytes, load_notmnist, read_archive
from powerprop.data.shards import Shards, write_shard
from powerprop.data.sources import MNIST, NOTMNIST, IdxFile
from powerprop.experiments import EXPERIMENTS
from powerprop.experiments.harness.experiment import RunError
from powerprop.files import FileError
from powerprop.masks import Masks
from powerprop.train import load_checkpoint, read_metrics, save_checkpoint

PLAIN = (FileError, RunError, DataCorrupt, DataNotFound)
"""Errors that say what is wrong with a file."""
LONGEST = 20
"""Seconds after which a case counts as hanging."""
MEMORY = 2**30
"""Bytes that the whole run may take."""


class Hang(BaseException):
    """A case that did not come to an end."""


@dataclass(frozen=True)
class Target:
    """A kind of file: `make` writes a good one and `read` reads it; `exact` if damage must never go unnoticed."""

    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    exact: bool = True


# --- the kinds of files -------------------------------------------------------------------------------------------


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def idx_contents() -> list[bytes]:
    numbers = np.random.default_rng(0)
    return [idx_bytes(numbers.integers(0, 10, s).astype(np.uint8)) for s in ((6, 28, 28), (6,), (4, 28, 28), (4,))]


IDX = MNIST._replace(
    files=tuple(
        IdxFile(file.name, md5(content), len(content), md5(packed := gzip.compress(content, mtime=0)), len(packed))
        for file, content in zip(MNIST.files, idx_contents(), strict=True)
    ),
    wheel="",
    mirrors=(),
)


def write_idx(path: Path, compress: bool) -> None:
    """The set around the file to be damaged: `path` is its first file."""
    for file, content in zip(IDX.files, idx_contents(), strict=True):
        name = file.name + ".gz" * compress
        place = path.parent / "set" / IDX.folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(gzip.compress(content, mtime=0) if compress else content)
    shutil.copyfile(path.parent / "set" / IDX.folder / (IDX.files[0].name + ".gz" * compress), path)


def read_idx_set(path: Path, compress: bool) -> Any:
    place = path.parent / "set" / IDX.folder / (IDX.files[0].name + ".gz" * compress)
    shutil.copyfile(path, place)
    images = load_idx(IDX, path.parent / "set", download=False)
    return images.train_x, images.train_y, images.test_x, images.test_y


def cifar_batch() -> bytes:
    """A batch as Python 2 and numpy 1 pickled it."""
    rows = np.random.default_rng(0).integers(0, 256, (4, 3072)).astype(np.uint8)
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNK\x00K\x00K\x00tb"
    head = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    raw = b"T" + rows.size.to_bytes(4, "little") + rows.tobytes()
    array = head + b"(K\x01(M\x04\x00M\x00\x0ct" + dtype + b"\x89" + raw + b"tb"
    return b"\x80\x02}(U\x06labels](K\x01K\x02K\x03K\x04eU\x04data" + array + b"u."


def picture(kind: str, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (8, 8)).save(file, kind)
    return file.getvalue()


def write_letters(path: Path) -> None:
    """An archive of letters as notMNIST's is."""
    with tarfile.open(path, "w:gz") as tar:
        for letter in "ABCDEFGHIJ":
            info = tarfile.TarInfo(f"notMNIST_small/{letter}/x.png")
            content = picture("PNG", "L")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def read_letters(path: Path) -> Any:
    """The set from its archive, of which the checksums are those of the good one."""
    root = path.parent / "set"
    shutil.rmtree(root, ignore_errors=True)
    (root / NOTMNIST.folder).mkdir(parents=True)
    shutil.copyfile(path, root / NOTMNIST.folder / "letters.tar.gz")
    good = path.with_name("good")
    if not good.exists():
        shutil.copyfile(path, good)
    arrays = read_archive(good, NOTMNIST.class_names)
    files = [f._replace(md5=md5(idx_bytes(a))) for f, a in zip(NOTMNIST.files, arrays, strict=True)]
    source = NOTMNIST._replace(
        files=tuple(files),
        mirrors=("http://nowhere/letters.tar.gz",),
        archive_sha256=hashlib.sha256(good.read_bytes()).hexdigest(),
    )
    images = load_notmnist(source, root)
    return images.train_x, images.train_y, images.test_x, images.test_y


def read_shard(path: Path) -> Any:
    shards = Shards([path])
    return shards.labels, [shards.read(row) for row in range(len(shards))]


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {"model": {"w": torch.rand(300, generator=generator)}, "step": 3, "name": "α", "list": [1.5, None]}


def learner() -> EfficientPackNet:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    return EfficientPackNet(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), alpha=1.5, steps=2)


def read_learner(path: Path) -> Any:
    mine = learner()
    mine.load(path)
    return state_of(mine)


def write_masks(path: Path) -> None:
    Masks({"w": state()["model"]["w"] > 0.5, "v": torch.ones(3, 5, dtype=torch.bool)}).save(path)


TARGETS: dict[str, Target] = {
    "IDX": Target(lambda path: write_idx(path, False), lambda path: read_idx_set(path, False)),
    "IDX, gzipped": Target(lambda path: write_idx(path, True), lambda path: read_idx_set(path, True)),
    "CIFAR": Target(lambda path: path.write_bytes(cifar_batch()) and None, lambda p: read_batch(p, md5(cifar_batch()))),
    "notMNIST": Target(write_letters, read_letters),
    "shards": Target(lambda path: write_shard(path, [(picture("JPEG"), 3), (picture("PNG"), 1)]), read_shard, False),
    "checkpoint": Target(lambda path: save_checkpoint(path, state()), load_checkpoint),
    "learner": Target(lambda path: learner().save(path), read_learner),
    "masks": Target(write_masks, lambda path: dict(Masks.load(path))),
    "metrics": Target(lambda path: path.write_text('{"step": 1, "loss": 0.5}\n' * 9) and None, read_metrics, False),
}


# --- damage -------------------------------------------------------------------------------------------------------


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The content with one to four accidents."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        content = chance.choice(ACCIDENTS)(content, chance)
    return content


def flip(content: bytes, chance: random.Random) -> bytes:
    if not content:
        return b"\0"
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]


def overwrite(content: bytes, chance: random.Random) -> bytes:
    place, size = chance.randrange(len(content) + 1), chance.choice((1, 4, 64, 4096))
    return (
        content[:place] + chance.choice((bytes(size), b"\xff" * size, chance.randbytes(size))) + content[place + size :]
    )


def at_the_start(content: bytes, chance: random.Random) -> bytes:
    """Headers have the lengths and types."""
    place = chance.randrange(min(64, len(content) + 1))
    return content[:place] + chance.randbytes(chance.choice((1, 2, 4, 8))) + content[place + 8 :]


def repeat(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content) + 1)
    return content[:place] + content[place : place + chance.choice((1, 16, 512))] * 3 + content[place:]


ACCIDENTS: list[Callable[[bytes, random.Random], bytes]] = [
    flip,
    flip,
    overwrite,
    at_the_start,
    repeat,
    lambda content, chance: content[: chance.randrange(len(content) + 1)],
    lambda content, chance: content[chance.randrange(len(content) + 1) :],
    lambda content, chance: chance.randbytes(chance.choice((0, 1, 8, 100, 5000))),
    lambda content, chance: chance.choice(
        (b"{}", b"null", b"[]", b"\x80\x02.", b"PK\x05\x06" + bytes(18), b"\x1f\x8b")
    ),
]


def rezipped(content: bytes, chance: random.Random) -> bytes:
    """A checkpoint whose parts are damaged and have the checksums of what they now are."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            part = old.read(name)
            new.writestr(name, damaged(part, chance) if chance.random() < 0.4 else part)
    return out.getvalue()


# --- cases --------------------------------------------------------------------------------------------------------


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
        way = rezipped if name == "checkpoint" and chance.random() < 0.3 else damaged
        path.write_bytes(way(content, chance))
        try:
            found = TARGETS[name].read(path)
        except PLAIN as error:
            return "refused" if str(self.place) in str(error) else "wrong"
        return "read" if way is rezipped or not TARGETS[name].exact or same_values(whole, found) else "wrong"

    def edited_run(self, chance: random.Random) -> str:
        """Damage or edit a JSON file of a finished run, draw its report anew, and put it back."""
        path = chance.choice(sorted(self.run.rglob("*.json")))
        content = path.read_bytes()
        path.write_bytes(edited(content, chance) if chance.random() < 0.6 else damaged(content, chance))
        try:
            return self.command_line(["report", str(self.run)])
        finally:
            path.write_bytes(content)

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
    names = [*EXPERIMENTS, "mnist", "MNIST-ONESHOT", "mnist_oneshot"]
    known: list[Callable[[], str]] = [
        lambda: chance.choice(("list", "run", "report", "results", "compare", "train")),
        lambda: chance.choice(names),
        lambda: chance.choice(OPTIONS),
        lambda: chance.choice(VALUES),
        lambda: chance.choice((str(run), str(run / "config.json"), str(run.parent), ".")),
        lambda: chance.choice(names)[: chance.randrange(12)],
    ]
    first = [chance.choice(("list", "run", "report", "results"))] if chance.random() < 0.8 else []
    if first == ["run"] and chance.random() < 0.7:
        first.append(chance.choice(names))
    return first + [chance.choice(known)() for _ in range(chance.randrange(6))]


def edited(content: bytes, chance: random.Random) -> bytes:
    """A JSON file in which somebody changed, dropped or added something."""
    value = json.loads(content)
    odd = chance.choice((None, [], {}, "x", -1, 10**30, 1.5, True, [None], {"a": []}, float("nan")))
    inner = value
    while isinstance(inner, dict) and inner and chance.random() < 0.8:
        key = chance.choice(list(inner))
        if not isinstance(inner[key], dict) or chance.random() < 0.3:
            if chance.random() < 0.3:
                del inner[key]
            else:
                inner[key] = odd
            return json.dumps(value).encode()
        inner = inner[key]
    return json.dumps(odd).encode()


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


def no_data(name: str, **options: Any) -> Any:
    """Commands that are right after all stop here instead of training."""
    raise DataNotFound(f"data set {name!r} was not found")


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
        data.load = no_data  # type: ignore[assignment]
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
