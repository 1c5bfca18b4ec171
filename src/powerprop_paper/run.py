"""`run.map(job, settings)`: jobs on all cores, each done once. Run the same script again and it goes on.

A job is a function of (config, folder, progress, **settings) that returns a dictionary of results; each setting has a
folder of its own in the folder of the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from powerprop.files import FileError, naming, sha256, sweep
from powerprop_paper.data import DataCorrupt
from powerprop_paper.display import display_for, say
from powerprop_paper.folder import (
    CONFIG,
    JOBS,
    LAYOUT,
    ROW,
    TIMES,
    RunError,
    Versions,
    advice,
    begin_row,
    changes,
    check_removable,
    check_same,
    folder_name,
    locked,
    read_row,
    remove_run,
    versions,
    write_row,
    write_sealed_json,
)
from powerprop_paper.pool import Failure, Outcome, Progress, Work, default_workers, run_all
from powerprop_paper.report import Mean
from powerprop_paper.train.distributed import Ranks, current_ranks, is_main
from powerprop_paper.train.fit import CheckpointError

if TYPE_CHECKING:
    from powerprop_paper.pages import Page

__all__ = ["Experiment", "JobsFailedError", "Progress", "Row", "Rows", "Run", "RunError"]

Job = Callable[..., Mapping[str, Any]]
Of = str | Callable[["Row"], Any]

MOST_JOBS = 100_000


class JobsFailedError(RuntimeError):
    """Some jobs failed; `failures` has the reason by the name of the job."""

    def __init__(self, failures: dict[str, Failure]) -> None:
        super().__init__(f"{len(failures)} jobs failed: {', '.join(failures)}")
        self.failures = failures


class Row(dict[str, Any]):
    """The settings and the results of one job in one dictionary.

    A training that left the finite numbers has `diverged`, a job that failed has `failed`, with the reason, and no
    results.
    """

    def __init__(
        self, values: Mapping[str, Any], folder: Path, files: Mapping[str, str] = {}, made: Sequence[Versions] = ()
    ) -> None:
        super().__init__(values)
        self.folder, self.files, self.versions = folder, files, made

    @property
    def lost(self) -> bool:
        """True if the job has no results: it diverged, or failed."""
        return "diverged" in self or "failed" in self

    def file(self, name: str) -> Path:
        """A file that the job wrote beside its results, as the job left it."""
        path = self.folder / name
        if not path.is_file():
            raise FileError(f"{path} is missing; {advice(self.folder)}")
        if sha256(path.read_bytes()) != self.files.get(name):
            raise FileError(f"{path} is damaged or edited: it is not what the job wrote; {advice(self.folder)}")
        return path


class Rows(list[Row]):
    """The table that pages are made of. Numbers leave out rows that diverged or failed; `lost` counts them."""

    def where(self, **settings: Any) -> Rows:
        """The rows with these settings."""
        wanted = plain(settings)
        return Rows(row for row in self if all(row.get(name) == value for name, value in wanted.items()))

    def by(self, *names: str) -> dict[Any, Rows]:
        """Rows by the value of a setting, or by the tuple of several, in the order in which they come."""
        found: dict[Any, Rows] = {}
        for row in self:
            key = tuple(_hashable(row[name]) for name in names)
            found.setdefault(key if len(names) > 1 else key[0], Rows()).append(row)
        return found

    @property
    def finished(self) -> Rows:
        """Those that have results."""
        return Rows(row for row in self if not row.lost)

    @property
    def lost(self) -> int:
        """How many have none."""
        return sum(row.lost for row in self)

    @property
    def notes(self) -> str:
        """What jobs have to say to the reader, each once."""
        return " ".join(sorted({row["note"] for row in self if row.get("note")}))

    def values(self, of: Of) -> list[Any]:
        """A result, or what a function makes of a row, of every row that has results."""
        return [row[of] if isinstance(of, str) else of(row) for row in self if not row.lost]

    def mean(self, of: Of) -> Mean | None:
        """Mean and standard deviation of a number; None if there is none."""
        found = self.values(of)
        return Mean.of(found) if found else None


@dataclass(frozen=True)
class Experiment:
    """A figure or table of the paper.

    name: as typed on the command line.
    title: one line for people.
    paper: where the paper shows it.
    presets: settings by name: `smoke` (seconds), `cpu` (minutes), `paper` (its own values), …
    main: `main(config, run)` maps jobs and returns the page.
    """

    name: str
    title: str
    paper: str
    presets: Mapping[str, Any]
    main: Callable[[Any, Run], Page]


class Run:
    """An experiment with its settings, in a folder. Nothing is written before the first `map`.

    Under torchrun every rank has one; rank 0 alone reads, writes and shows progress.

    workers: processes side by side, one thread each; all cores by default.
    fresh: remove what an earlier run left in the folder.
    """

    def __init__(
        self, experiment: Experiment, preset: str, config: Any, out: Path, *, workers: int | None = None,
        console: Console | None = None, fresh: bool = False,
    ) -> None:  # fmt: skip
        if workers is not None and workers < 1:
            raise RunError(f"workers must be at least 1, got {workers}")
        self.experiment, self.preset, self.config, self.out = experiment, preset, config, out
        self.workers, self.fresh = workers or default_workers(), fresh
        self.console = (console or Console()) if is_main() else Console(quiet=True)
        self.rows: dict[Path, Row] = {}
        self.failures: dict[str, Failure] = {}
        self._open: ExitStack | None = None
        if is_main():  # the ranks may join later
            check_removable(out) if fresh else check_same(out, self.description)

    @property
    def ranks(self) -> Ranks:
        """The processes that torchrun started, or this one alone."""
        return current_ranks()

    @property
    def description(self) -> dict[str, Any]:
        """What config.json says."""
        return {
            "layout": LAYOUT, "experiment": self.experiment.name, "preset": self.preset,
            "config": plain(asdict(self.config)),
        }  # fmt: skip

    def prepare(self, find: Callable[[], Any]) -> None:
        """Have the data at hand before a job asks for it; settings that it does not fit are an error of the run."""
        try:
            if self.ranks.main:
                find()
        except DataCorrupt:
            raise
        except ValueError as error:
            raise RunError(str(error)) from None
        self.ranks.barrier()

    def map(self, job: Job, settings: Iterable[Mapping[str, Any]], distributed: bool | None = None) -> Rows:
        """`job(config, folder, progress, **setting)` for each setting, unless its row is on the disk already.

        Jobs run side by side, one in each process. One that fails fails alone: its row says why, and the same command
        tries it again; a further `map` begins nothing, because what it is asked may depend on the row.

        job: a function of a module; with the same config and setting it returns the same results. Taken up again
            after a kill it goes on from what it left in `folder`.
        settings: of each job, plain data; the same twice is one job.
        distributed: None if a job is one process. Else jobs may run in turn, and all ranks of torchrun train each
            of them together; True runs them in turn without torchrun too, because one job fills the machine.
        """
        ranks = self.ranks
        if ranks.world > 1 and distributed is None:
            name = self.experiment.name
            raise RunError(f"{name} trains on one process per job, got {ranks.world} ranks; leave torchrun out")
        wanted = self._folders(job, settings)
        if ranks.main:
            self._begin()
            self._read({each: wanted[each] for each in wanted.keys() - self.rows if (each / ROW).exists()})
        self.rows = ranks.from_main(self.rows)
        if waiting := {folder: each for folder, each in wanted.items() if folder not in self.rows}:
            if self.failures:
                raise JobsFailedError(self.failures)
            self._say_what_is_done(len(wanted), len(waiting))
            self._work(job, waiting, bool(distributed))
        return Rows(self.rows[folder] for folder in wanted)

    def _folders(self, job: Job, settings: Iterable[Mapping[str, Any]]) -> dict[Path, dict[str, Any]]:
        """The settings by the folder of their job."""
        found: dict[Path, dict[str, Any]] = {}
        for each in settings:
            folder, values = self.out / JOBS / job.__name__ / folder_name(each), plain(each)
            if found.setdefault(folder, values) != values:
                raise RunError(f"{found[folder]} and {values} would both be in {folder}")
            if len(found) > MOST_JOBS:
                raise RunError(f"a run has at most {MOST_JOBS} jobs, these settings give more; ask for less")
        return found

    def _read(self, done: Mapping[Path, dict[str, Any]]) -> None:
        """Take up the rows of jobs that are done."""
        for folder, settings in done.items():
            found = read_row(folder, settings)
            self.rows[folder] = Row({**settings, **found["result"]}, folder, found["files"], found["versions"])

    def _work(self, job: Job, waiting: dict[Path, dict[str, Any]], in_turn: bool) -> None:
        """Do the jobs, and take their rows up."""
        ranks, now = self.ranks, versions()
        names = {folder: f"{job.__name__}/{folder.name}" for folder in waiting}
        works = [Work(names[each], perform, (job, self.config, waiting[each], each, now)) for each in waiting]
        display = display_for(self.console, self.experiment.name, len(works))
        outcome = Outcome()
        if ranks.world > 1:
            with display:
                for work in works:  # an error of any rank ends everything
                    display.update(work.key, 0.0, {})
                    outcome.results[work.key] = work.function(*work.arguments, partial(display.update, work.key))
                    display.finish(work.key, None)
                    ranks.barrier()
        elif in_turn:
            outcome = run_all(works, 1, display, torch.get_num_threads())
        else:
            outcome = run_all(works, self.workers, display)
        self.failures |= outcome.failures
        if ranks.main:
            with naming(self.out / TIMES), (self.out / TIMES).open("a") as file:
                file.writelines(json.dumps({"job": n, "seconds": each}) + "\n" for n, each in outcome.results.items())
            if any(failure.ends_all for failure in outcome.failures.values()):
                raise JobsFailedError(self.failures)
            self._read({folder: each for folder, each in waiting.items() if names[folder] in outcome.results})
            for folder in waiting.keys() - self.rows:
                self.rows[folder] = Row({**waiting[folder], "failed": self.failures[names[folder]].line}, folder)
        self.rows = ranks.from_main(self.rows)

    def _say_what_is_done(self, known: int, waiting: int) -> None:
        if waiting < known:
            say(self.console, f"{self.experiment.name}: {known - waiting} of {known} jobs are done")
        made = [row.versions[-1] for row in self.rows.values() if row.versions]
        if changed := next((text for each in made if (text := changes(each, versions()))), ""):
            text = f"warning: jobs in {self.out} were done with other versions: {changed}"
            say(self.console, f"{text}; the jobs that are left may differ from what one version gives", "yellow")

    def _begin(self) -> None:
        """Make the folder, or go on in one of the same run, and keep other processes out of it."""
        if self._open is not None:
            return
        if self.fresh:
            remove_run(self.out)
        check_same(self.out, self.description)
        self._open = locked(self.out)
        check_same(self.out, self.description)  # another process may have begun one meanwhile
        sweep(self.out)
        if not (self.out / CONFIG).exists():
            write_sealed_json(self.out / CONFIG, self.description)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        if self._open is not None:
            self._open.close()


def perform(job: Job, config: Any, settings: dict[str, Any], folder: Path, now: Versions, progress: Progress) -> float:
    """Do one job; its row.json says that it is done. Returns the seconds it took."""
    start = time.perf_counter()
    main = current_ranks().main
    if main:
        begin_row(folder, now)
    try:
        result = dict(job(config, folder, progress, **settings))
    except FloatingPointError as error:
        result = {"diverged": str(error)}
    except CheckpointError:
        raise
    except FileError as error:
        raise FileError(f"{error}; {advice(folder)}") from None
    if main:
        write_row(folder, settings, result)
    return round(time.perf_counter() - start, 3)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value
