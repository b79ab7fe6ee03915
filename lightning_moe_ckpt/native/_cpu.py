"""Copies between CPU tensors on one background thread: in Python, or outside the interpreter.

The first `submit` starts the thread, and again in a forked child, because threads do not survive a fork. One thread is
enough: copies are bound by memory bandwidth, and a second thread would only take another core from training.

The compiled engine takes one call per list, on a thread that never takes the GIL. A list that was not prepared, or that
the library cannot arrange, such as a conversion known only to torch, goes to the twin's thread in Python, behind
all earlier lists.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue

from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native._engine import Copy, CopyEngine, CopyList, CopyTable, Ticket, copy_failed
from lightning_moe_ckpt.native._host_memory import Preparation
from lightning_moe_ckpt.native._library import Library
from lightning_moe_ckpt.native._plan import (
    Arrangement,
    CopyPlan,
    Job,
    PlannedCopies,
    PlannedTable,
    slices_of,
    slices_of_table,
)
from lightning_moe_ckpt.native._worker import CompiledEngine, CompiledTicket, Worker

_DEPTH = 2
"""Chunks between two looks at other work; CPU copies run one after another anyway."""


class CpuTicket(Ticket):
    """List of copies submitted to the background thread."""

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
        if self._error is not None:
            raise copy_failed(self._num_copies, self._error) from self._error

    def run(self) -> None:
        """Copy everything. Called on the background thread only."""
        try:
            (self._copies if isinstance(self._copies, CopyList) else CopyList(self._copies)).run()
        except BaseException as error:  # noqa: BLE001  # thread entry: raised again by fence and wait
            self._error = error
        finally:
            self._copies = ()  # release the sources, which were read, before the ticket is done
            self._arrived.set()


class CpuCopyEngine(CopyEngine):
    """Copy engine by torch on one daemon thread, which copies lists in the order of submission."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[CpuTicket | None] | None = None
        self._stop: weakref.finalize[..., CpuCopyEngine] | None = None
        self._pid = 0

    @override
    def register(self, buffer: Tensor, *, written: bool = False) -> None:
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
        del ticket  # do not hold the last list while waiting for the next


def _finish(queue: SimpleQueue[CpuTicket | None], thread: threading.Thread) -> None:
    queue.put(None)
    thread.join()


class CompiledCpuEngine(CompiledEngine):
    """Copy engine with one thread outside the interpreter, in the order of submission. A fence does not wait for other
    whole lists. One chunk may be shared by `threads`; one is right beside training: copies are bound by memory.
    """

    def __init__(self, library: Library, arrangement: Arrangement | None = None, *, threads: int = 1) -> None:
        self._library, self._threads = library, threads
        self._arrangement = arrangement if arrangement is not None else Arrangement()
        self._worker: Worker | None = None
        self._twin = CpuCopyEngine()
        self._newest: Ticket | None = None
        self._newest_of_twin: Ticket | None = None
        self._preparations: dict[int, Preparation] = {}

    @override
    def register(self, buffer: Tensor, *, written: bool = False) -> None:
        """Map the buffer's memory in the background, before the first copies; not beside a restart that has cores to share."""
        if not written:
            self._preparations[buffer.data_ptr()] = Preparation(buffer)

    @override
    def unregister(self, buffer: Tensor) -> None:
        if (preparation := self._preparations.pop(buffer.data_ptr(), None)) is not None:
            preparation.stop()

    @override
    def prepare(self, copies: Sequence[Copy]) -> PlannedCopies:
        planned = PlannedCopies(copies)
        if (slices := slices_of(planned)) is not None:
            planned.keep()
            planned.plan = CopyPlan(self._library, slices, self._arrangement)
        return planned

    @override
    def prepare_table(self, table: CopyTable, block_U8: Tensor) -> PlannedTable:
        planned, slices = PlannedTable(table), slices_of_table(table, block_U8)
        if slices is not None:
            planned.plan = CopyPlan(self._library, slices, self._arrangement)
        return planned

    @override
    def close(self) -> None:
        self._twin.close()
        if self._worker is not None:
            self._worker.stop()
        while self._preparations:
            self._preparations.popitem()[1].stop()
        self._worker, self._newest, self._newest_of_twin = None, None, None

    @override
    def _check(self, copies: Sequence[Copy] | CopyList) -> PlannedCopies:
        # Arranging takes 2 to 3 us a pair, torch's own call 0.6: a list gains from it when it is submitted again.
        return PlannedCopies(copies)

    @override
    def _submit(self, copies: Job) -> Ticket:
        worker = self._running_worker()
        if copies.plan is not None and (self._newest_of_twin is None or self._newest_of_twin.done):
            return worker.submit(copies)
        self._newest_of_twin = self._twin.submit(_Later(copies, self._newest))
        return self._newest_of_twin

    @override
    def _running_worker(self) -> Worker:
        if self._worker is None or not self._worker.is_ours:
            self._worker = Worker(self._library, _DEPTH, self._threads)
            self._newest, self._newest_of_twin = None, None
        return self._worker


class _Later(CopyList):
    """Copies on the twin's thread that wait for all earlier lists."""

    def __init__(self, copies: Job, after: Ticket | None) -> None:
        super().__init__(list(copies.pairs()))
        self._after = after

    @override
    def run(self, *, non_blocking: bool = False) -> None:
        if isinstance(self._after, CompiledTicket):
            with suppress(CheckpointError):  # the holder of that ticket gets the error; the order is kept either way
                self._after.wait()
        super().run(non_blocking=non_blocking)
