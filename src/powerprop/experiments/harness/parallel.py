"""Independent jobs side by side: one process per core, one thread each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from powerprop.experiments.harness.display import Display

Report = Callable[[float, dict[str, float]], None]
"""What a job calls now and then: the fraction done and the values last measured."""


@dataclass(frozen=True)
class Task:
    """`function(*arguments, report)`; with several workers it must be importable and its arguments picklable."""

    key: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


@dataclass
class Outcome:
    """What the jobs returned, and the tracebacks of those that failed, by key."""

    results: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def default_workers() -> int:
    """The number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_tasks(tasks: Sequence[Task], workers: int, display: Display) -> Outcome:
    """Run all tasks, `workers` at a time; one that fails does not stop the others.

    One worker runs in this process, so that a debugger works. Leaving early (Ctrl-C) kills the workers.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    outcome = Outcome()
    with display:
        run = _run_here if min(workers, len(tasks)) <= 1 else _run_side_by_side
        run(tasks, workers, display, outcome)
    return outcome


def _run_here(tasks: Sequence[Task], workers: int, display: Display, outcome: Outcome) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same sums in the same order as in a worker
    try:
        for task in tasks:
            display.update(task.key, 0.0, {})
            value, error = _call(task, lambda done, values, key=task.key: display.update(key, done, values))  # type: ignore[misc]
            _settle(task, value, error, display, outcome)
    finally:
        torch.set_num_threads(threads)


def _run_side_by_side(tasks: Sequence[Task], workers: int, display: Display, outcome: Outcome) -> None:
    waiting = deque(tasks)
    crew: dict[Connection, tuple[BaseProcess, Task]] = {}
    try:
        while waiting or crew:
            while waiting and len(crew) < workers:
                connection, process = _hire()
                _assign(connection, process, waiting.popleft(), crew, display)
            for connection in _ready(crew):
                process, task = crew[connection]
                message = _receive(connection, process)
                if message[0] == "update":
                    display.update(task.key, *message[1:])
                    continue
                del crew[connection]
                _settle(task, message[1], message[2], display, outcome)
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
    process.start()
    there.close()
    return here, process


def _assign(
    connection: Connection,
    process: BaseProcess,
    task: Task,
    crew: dict[Any, tuple[BaseProcess, Task]],
    display: Display,
) -> None:
    crew[connection] = (process, task)
    display.update(task.key, 0.0, {})
    connection.send(task)


def _ready(crew: dict[Connection, tuple[BaseProcess, Task]]) -> list[Connection]:
    """The workers that have something to say; waits for one."""
    said = wait(list(crew))
    return [connection for connection in crew if connection in said]


def _receive(connection: Connection, process: BaseProcess) -> tuple[Any, ...]:
    """The next message of a worker; a worker that died without a word has failed its job."""
    try:
        message: tuple[Any, ...] = connection.recv()
    except (EOFError, OSError):
        process.join()
        code = process.exitcode
        return "ended", None, f"its process died with exit code {code}" + (" (out of memory?)" if code == -9 else "")
    return message


def _dismiss(connection: Connection, process: BaseProcess) -> None:
    """End a worker at once: what it did is on the disk, what it was doing resumes."""
    connection.close()
    process.kill()
    process.join()


def _settle(task: Task, value: Any, error: str | None, display: Display, outcome: Outcome) -> None:
    if error is None:
        outcome.results[task.key] = value
        display.finish(task.key, None)
    else:
        outcome.errors[task.key] = error
        display.finish(task.key, error.strip().rpartition("\n")[2])


def _call(task: Task, report: Report) -> tuple[Any, str | None]:
    try:
        return task.function(*task.arguments, report), None
    except Exception:
        return None, traceback.format_exc()


def _work(connection: Connection) -> None:
    """A worker's life: tasks come, updates and results go, until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    while True:
        try:
            task: Task = connection.recv()
        except EOFError:
            return
        value, error = _call(task, lambda done, values: connection.send(("update", done, values)))
        connection.send(("ended", value, error))


def _die_with_parent() -> None:
    """A parent killed outright must not leave workers that write into the run it will resume."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
