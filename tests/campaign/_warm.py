"""Processes that have imported everything and trained next to nothing, forked before any test: all lives descend from them.

The test process itself is no parent for them: earlier tests leave threads, process groups and torch's thread pool
behind, and a fork would inherit their locks but not their threads. There are as many as campaigns should run at once.
A short fit fills the caches of Python, torch and Lightning first, which is a quarter of a life.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from _heap import freeze_heap

from campaign._training import Checkpointing, Setup, train
from lightning_moe_ckpt.testing import Attempt, run_attempts

Result = TypeVar("Result")


class WarmParents:
    """Runs functions in forks of warm processes. Functions, arguments and results travel as pickles."""

    def __init__(self, count: int) -> None:
        self._parents: dict[Connection, int] = {}
        for _ in range(count):
            ours, theirs = multiprocessing.Pipe()
            pid = os.fork()
            if pid == 0:
                for other in [ours, *self._parents]:
                    other.close()  # else an open copy here would hide from a sibling that the tests are over
                try:
                    _rehearse()
                    _serve(theirs)
                finally:  # only an error comes here, and a copy of pytest must not go on
                    traceback.print_exc()
                    os._exit(1)
            theirs.close()
            self._parents[ours] = pid

    def call(self, function: Callable[..., Result], /, *args: Any, patience: float = 280.0, **kwargs: Any) -> Result:
        """Run `function` in a fork of a warm process.

        Raises:
            TimeoutError: no result within `patience` seconds; the fork was interrupted.
        """
        (result,) = self.map(function, [(args, kwargs)], patience=patience)
        return result

    def map(
        self,
        function: Callable[..., Result],
        calls: Iterable[tuple[tuple[Any, ...], Mapping[str, Any]]],
        *,
        patience: float = 280.0,
    ) -> list[Result]:
        """Run several calls, as many at once as there are warm processes. Results are in the order of the calls."""
        waiting = list(enumerate(calls))[::-1]
        results: dict[int, Any] = {}
        running: dict[Connection, tuple[int, int]] = {}
        free = list(self._parents)
        deadline = time.monotonic() + patience
        while waiting or running:
            while waiting and free:
                connection = free.pop()
                index, (args, kwargs) = waiting.pop()
                connection.send((function, args, dict(kwargs)))
                running[connection] = index, connection.recv()
            for connection in self._ready(running, deadline):
                index, _ = running.pop(connection)
                results[index] = connection.recv()
                free.append(connection)
        for result in results.values():
            if isinstance(result, BaseException):
                raise result
        return [results[index] for index in sorted(results)]

    def _ready(self, running: Mapping[Connection, tuple[int, int]], deadline: float) -> list[Any]:
        ready = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if ready:
            return ready
        for connection, (_, pid) in running.items():
            os.kill(pid, signal.SIGINT)  # `run_attempts` then kills its ranks on its way out
            connection.recv()
        raise TimeoutError("a campaign did not end in time")

    def close(self) -> None:
        """End the warm processes."""
        for connection, pid in self._parents.items():
            connection.close()
            os.waitpid(pid, 0)


def _rehearse() -> None:
    """Train once, with checkpoints. It must leave no thread, which no fork would have, and nothing that a run can see."""
    if torch.cuda.is_available():  # then autograd starts threads for its devices
        return
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        url = (Path(folder) / "run").as_uri()
        life = Attempt(index=0, rank=0, world_size=1, seed=0, url=url, workdir=Path(folder), kill=None)
        train(Setup(batches=2, epochs=1, checkpointing=Checkpointing(policy="sparse", window=2)), life)
    os.environ.clear()
    os.environ.update(environment)
    give_up = time.monotonic() + 10.0  # a thread that was joined is there until the kernel has time to end it
    while len(left := list(Path("/proc/self/task").iterdir())) > 1 and time.monotonic() < give_up:
        time.sleep(0.01)
    assert len(left) == 1, f"forks would lack threads: {[thread.name for thread in threading.enumerate()]}"
    freeze_heap()


def _serve(connection: Connection) -> NoReturn:
    while True:
        try:
            function, args, kwargs = connection.recv()
        except EOFError:
            os._exit(0)
        except KeyboardInterrupt:  # what it was meant for has just ended
            continue
        if function is run_attempts:  # does nothing here but fork and wait, so it needs no fork of its own
            connection.send(os.getpid())
            connection.send(_result(function, args, kwargs))
            continue
        pid = os.fork()
        if pid == 0:
            _answer(connection, function, args, kwargs)
        connection.send(pid)
        os.waitpid(pid, 0)


def _answer(connection: Connection, function: Callable[..., Any], args: Any, kwargs: Any) -> NoReturn:
    connection.send(_result(function, args, kwargs))
    os._exit(0)


def _result(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001  # process entry: the caller raises it
        return _portable(error)


def _portable(error: BaseException) -> BaseException:
    """The error without its traceback, which does not travel; failures of the harness itself keep it as text."""
    if isinstance(error, AssertionError):
        return error
    return RuntimeError(traceback.format_exc())
