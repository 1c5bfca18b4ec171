"""Independent jobs side by side: one process per core, one thread each."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from powerprop.files import FileError, cause
from powerprop_paper.data import DataCorrupt
from powerprop_paper.display import Display

Progress = Callable[[float, dict[str, float]], None]
"""What a job calls now and then: the fraction done and the values last measured."""


@dataclass(frozen=True)
class Work:
    """`function(*arguments, progress)`; with several workers it must be importable and its arguments picklable."""

    key: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Failure:
    """Why a job failed, in one line; with a traceback where the program may be wrong, not a file or the machine.

    `ends_all`: the machine is at fault (a full disk), so that the other jobs would fail too.
    """

    line: str
    traceback: str = ""
    ends_all: bool = False


@dataclass
class Outcome:
    """What the jobs returned, and why others failed, by key."""

    results: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)


def default_workers() -> int:
    """The number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(works: Sequence[Work], workers: int, display: Display, threads: int = 1) -> Outcome:
    """Run everything, `workers` at a time; a failure stops the others only if it would meet them too.

    One worker runs in this process, with so many threads, so that a debugger works. Leaving early (Ctrl-C) kills the
    workers.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    outcome = Outcome()
    with display:
        if min(workers, len(works)) <= 1:
            _run_here(works, threads, display, outcome)
        else:
            _run_side_by_side(works, workers, display, outcome)
    return outcome


def _run_here(works: Sequence[Work], threads: int, display: Display, outcome: Outcome) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)  # one: the same sums in the same order as in a worker
    try:
        for work in works:
            display.update(work.key, 0.0, {})
            value, failure = _call(work, partial(display.update, work.key))
            if _ends_all(work, value, failure, display, outcome):
                return
    finally:
        torch.set_num_threads(before)


def _run_side_by_side(works: Sequence[Work], workers: int, display: Display, outcome: Outcome) -> None:
    waiting = deque(works)
    crew: dict[Connection, tuple[BaseProcess, Work]] = {}
    try:
        while waiting or crew:
            while waiting and len(crew) < workers:
                connection, process = _hire()
                _assign(connection, process, waiting.popleft(), crew, display)
            said = wait(list(crew))
            for connection in [each for each in crew if each in said]:
                process, work = crew[connection]
                message = _receive(connection, process)
                if message[0] == "update":
                    display.update(work.key, *message[1:])
                    continue
                if _ends_all(work, message[1], message[2], display, outcome):
                    return
                del crew[connection]
                if process.is_alive() and waiting:
                    _assign(connection, process, waiting.popleft(), crew, display)
                else:
                    _dismiss(connection, process)
    finally:
        for connection, (process, _) in crew.items():
            _dismiss(connection, process)


def _hire() -> tuple[Connection, BaseProcess]:
    # Spawn, because a forked torch may hold locks of threads that no longer exist.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there,), daemon=True)
    with _deaf_to_interrupts():
        process.start()
    there.close()
    return here, process


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """A process that starts here never hears Ctrl-C, which reaches the whole group: the parent decides, and ends it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which would end this when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _assign(
    connection: Connection, process: BaseProcess, work: Work, crew: dict[Any, tuple[BaseProcess, Work]],
    display: Display,
) -> None:  # fmt: skip
    crew[connection] = (process, work)
    display.update(work.key, 0.0, {})
    connection.send(work)


def _receive(connection: Connection, process: BaseProcess) -> tuple[Any, ...]:
    """The next message of a worker; a worker that died without a word has failed its job."""
    try:
        message: tuple[Any, ...] = connection.recv()
    except (EOFError, OSError):
        process.join()
        code = process.exitcode
        hint = " (out of memory?)" if code == -9 else ""
        return "ended", None, Failure(f"its process died with exit code {code}{hint}")
    return message


def _dismiss(connection: Connection, process: BaseProcess) -> None:
    """End a worker at once: what it did is on the disk, what it was doing resumes."""
    process.kill()  # before the connection is closed, about which it would complain
    process.join()
    connection.close()


def _ends_all(work: Work, value: Any, failure: Failure | None, display: Display, outcome: Outcome) -> bool:
    """Take note of how a job ended; True if the others need not go on."""
    if failure is None:
        outcome.results[work.key] = value
    else:
        outcome.failures[work.key] = failure
    display.finish(work.key, failure.line if failure else None)
    return failure is not None and failure.ends_all


def _call(work: Work, progress: Progress) -> tuple[Any, Failure | None]:
    try:
        return work.function(*work.arguments, progress), None
    except OSError as error:
        return None, Failure(cause(error), ends_all=True)
    except (FileError, DataCorrupt) as error:
        return None, Failure(str(error))
    except Exception:
        text = traceback.format_exc().strip()
        return None, Failure(text.rpartition("\n")[2], text)
    finally:
        gc.collect()  # a learner refers to itself: gigabytes in so few objects that nothing else would collect them


def _work(connection: Connection) -> None:
    """A worker's life: work comes, updates and results go, until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it was not deaf to it from the beginning
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    with suppress(EOFError, BrokenPipeError):
        while True:
            work: Work = connection.recv()
            value, failure = _call(work, lambda done, values: connection.send(("update", done, values)))
            connection.send(("ended", value, failure))


def _die_with_parent() -> None:
    """A parent killed outright must not leave workers that write into the run it will resume."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
