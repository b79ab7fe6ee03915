"""Make forks safe: the child can log, collects no garbage of its parent's, and torch computes in it.

A loader worker is forked while threads of ours may be logging. Python makes the locks of `logging` anew in the child,
but not that of the stream behind a handler: forked in mid-write, the child waits for ever when it writes to standard
error itself, a warning, say (CPython 3.11; three of four forks beside a thread that logs all the time). So a fork waits
until no thread is in a handler that our records go to.

Nothing else that our threads hold is wanted in a child, which calls nothing of ours. What finalizers touch there are
queues, which hand over without waiting, threads, which count as ended after a fork, and compiled engines, which compare
process ids. And our threads import nothing, so no import is left half done.

Not so finalizers of others: a process group of gloo waits for its threads, which a child does not have, and ends it by
SIGSEGV (torch 2.13). Groups of before a recovery in place may be left in cycles, such as those of torch's pipeline stages,
until they are collected. So a child collects nothing that is older than itself.

OpenMP's threads do not survive a fork either, and the child's main thread does not know: libgomp waits for ever in the first
operation that is split between them. It starts them in the first such operation of the parent, on any machine of two cores
or more where `OMP_NUM_THREADS` is not 1. Processes that this package forks therefore begin with `compute_alone`.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Iterator
from functools import cache

import torch

PATIENCE_SECONDS = 1.0
"""Seconds that a fork waits for one handler, whose thread may itself wait for a handler that the fork holds."""

_held: list[logging.Handler] = []


@cache
def guard_forks() -> None:
    """Make forks of this process wait for our log messages, and leave its garbage alone, from now on."""
    os.register_at_fork(before=_quiesce, after_in_parent=_resume, after_in_child=_begin)


def compute_alone() -> None:
    """Let torch compute in this forked process, on one thread: it has not the others that its parent may have had.

    Call it first. torch does the same in workers of loaders. Threads that are started later have pools of their own.
    """
    torch.set_num_threads(1)
    # As Lightning's DDP starts, it asks for a thread per core, unless somebody has said how many.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _quiesce() -> None:
    if any(thread.name.startswith("moe-ckpt") for thread in threading.enumerate()):
        _held.extend(
            handler for handler in _handlers() if handler.lock is None or handler.lock.acquire(timeout=PATIENCE_SECONDS)
        )


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
