"""Copies between CPU tensors on one background thread.

The first `submit` starts the thread, and again in a forked child, because threads do not survive a fork. One thread is
enough: copies are bound by memory bandwidth, and a second thread would only take another core from training.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue

from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native._copies import Copy, CopyList
from lightning_moe_ckpt.native._engine import CopyEngine, Ticket, copy_failed


class CpuTicket(Ticket):
    """A list of copies submitted to the background thread."""

    def __init__(self, copies: Sequence[Copy] | CopyList) -> None:
        self._copies: Sequence[Copy] | CopyList = copies if isinstance(copies, CopyList) else list(copies)
        self._arrived = threading.Event()
        self._error: BaseException | None = None
        self._pid = os.getpid()
        self._num_copies = len(self._copies)

    @property
    @override
    def done(self) -> bool:
        return self._arrived.is_set()

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        if not self.done and self._pid != os.getpid():
            raise CheckpointError("This snapshot was submitted before a fork; only the parent process can wait for it.")
        if not self._arrived.wait(timeout.total_seconds() if timeout is not None else None):
            raise TimeoutError(f"A snapshot of {self._num_copies} slices is not done after {timeout}.")
        self._raise_failure()

    def run(self) -> None:
        """Copy everything. Called on the background thread only."""
        try:
            self._copy_all()
        except BaseException as error:  # noqa: BLE001  # thread entry: raised again by fence and wait
            self._error = error
        finally:
            self._copies = ()  # release the sources, which were read, before the ticket is done
            self._arrived.set()

    def _copy_all(self) -> None:
        (self._copies if isinstance(self._copies, CopyList) else CopyList(self._copies)).run()

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise copy_failed(self._num_copies, self._error) from self._error


class CpuCopyEngine(CopyEngine):
    """Copies in the order they were submitted, on one daemon thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[CpuTicket | None] | None = None
        self._stop: weakref.finalize[..., CpuCopyEngine] | None = None
        self._pid = 0

    @override
    def register(self, buffer: Tensor) -> None:
        """Do nothing: CPU copies need no preparation."""

    @override
    def unregister(self, buffer: Tensor) -> None:
        """Do nothing."""

    @override
    def prepare(self, copies: Sequence[Copy]) -> CopyList:
        return CopyList(copies)

    @override
    def submit(self, copies: Sequence[Copy] | CopyList) -> Ticket:
        ticket = CpuTicket(copies)
        self._running_queue().put(ticket)
        return ticket

    @override
    def close(self) -> None:
        if self._stop is not None and self._pid == os.getpid():
            self._stop()
        self._queue, self._stop = None, None

    def _running_queue(self) -> SimpleQueue[CpuTicket | None]:
        if self._queue is None or self._pid != os.getpid():
            self._pid, self._queue = os.getpid(), SimpleQueue()
            thread = threading.Thread(target=_serve, args=(self._queue,), name="moe-ckpt-copy", daemon=True)
            thread.start()
            # The finalizer also runs at interpreter exit: a daemon thread inside torch at that point would crash it.
            self._stop = weakref.finalize(self, _finish, self._queue, thread)
        return self._queue


def _serve(queue: SimpleQueue[CpuTicket | None]) -> None:
    while (ticket := queue.get()) is not None:
        ticket.run()
        del ticket  # do not hold the last one while waiting for the next


def _finish(queue: SimpleQueue[CpuTicket | None], thread: threading.Thread) -> None:
    queue.put(None)
    thread.join()
