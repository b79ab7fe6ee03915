"""Threads of the training process: calls beside training, and forks that are safe while threads run.

A thread that wakes up takes the interpreter lock from training as soon as training calls into torch, and holds up its next
line. While backward runs, training has no lines of Python, or few: a call that `CallThread` makes then costs training next
to nothing.

A loader worker is forked while threads of ours may be logging. Python makes the locks of `logging` anew in the child,
but not that of the stream behind a handler: forked in mid-write, the child waits for ever when it writes to standard
error itself, a warning, say (CPython 3.11; three of four forks beside a thread that logs all the time). So a fork waits
until no thread is in a handler that our records go to.

A child calls nothing of ours, and needs nothing else that our threads hold. Finalizers in the child touch queues,
which hand over without waiting, threads, which count as ended after a fork, and compiled engines, which compare
process ids. And our threads import nothing, so no import is left half done.

Finalizers of others are not safe: a process group of gloo waits for its threads, which a child does not have, and ends the
child by SIGSEGV (torch 2.13). Groups of before a recovery in place may be left in cycles, such as those of torch's pipeline
stages, until they are collected. So a child collects nothing that is older than itself.

OpenMP's threads do not survive a fork either, and the child's main thread does not know: libgomp waits for ever in the first
operation that is split between them. libgomp starts them in the first such operation of the parent, on any machine of two
cores or more where `OMP_NUM_THREADS` is not 1. Processes that this package forks therefore begin with `compute_alone`.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from functools import cache
from queue import SimpleQueue

import torch

PATIENCE_SECONDS = 1.0
"""Seconds that a fork waits for one handler, whose thread may itself wait for a handler that the fork holds."""

_held: list[logging.Handler] = []


@cache
def guard_forks() -> None:
    """Make forks of this process wait for our log messages, and leave its garbage alone, from now on."""
    os.register_at_fork(before=_quiesce, after_in_parent=_resume, after_in_child=_begin)


def compute_alone() -> None:
    """Let torch compute in this forked process on one thread, since threads of its parent are gone.

    Call it before any computation. torch does the same in workers of loaders. Threads that are started later have pools of their own.
    """
    torch.set_num_threads(1)
    # As Lightning's DDP starts, it asks for a thread per core, unless somebody has said how many.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _quiesce() -> None:
    if any(thread.name.startswith("moe-ckpt") for thread in threading.enumerate()):
        _held.extend(each for each in _handlers() if each.lock is None or each.lock.acquire(timeout=PATIENCE_SECONDS))


def _begin() -> None:
    _held.clear()
    gc.freeze()


def _resume() -> None:
    while _held:
        _held.pop().release()


def _handlers() -> Iterator[logging.Handler]:
    """Return the handlers of this package's records, without those of loggers inside it."""
    if logging.lastResort is not None:
        yield logging.lastResort
    logger: logging.Logger | None = logging.getLogger("lightning_moe_ckpt")
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


class CallThread:
    """A thread that makes one call at a time, for the training thread."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.busy = False
        """Whether `join` is due."""

    def begin(self, call: Callable[[], None]) -> None:
        """Make `call` on the thread; `join` comes before the next `begin`."""
        if self._thread is None:
            guard_forks()
            self._thread = threading.Thread(target=self._serve, name="moe-ckpt-seal", daemon=True)
            self._thread.start()
        self.busy = True
        self._calls.put(call)

    def join(self) -> None:
        """Wait for the call, and raise its error."""
        error = self._ended.get()
        self.busy = False  # after it: a signal may have ended the wait
        if error is not None:
            raise error

    def finish(self) -> None:
        """End the thread when its call has ended, with an error or without."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
        self._thread, self.busy = None, False
        self._calls, self._ended = SimpleQueue(), SimpleQueue()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001  # thread entry: raised by `join`
                self._ended.put(error)
            else:
                self._ended.put(None)
            del call  # while waiting, hold on to nobody's memory
