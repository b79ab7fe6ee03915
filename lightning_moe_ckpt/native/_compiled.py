"""The copy engine between CPU tensors, compiled: one call per list, on one thread that never takes the interpreter lock.

Keeps the contract of `CopyEngine`; `CpuCopyEngine` is its twin in Python. A list that the library cannot arrange, such
as a conversion that only torch knows, goes to the twin's thread, behind what was submitted before it.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native._copies import Copy, CopyList
from lightning_moe_ckpt.native._cpu import CpuCopyEngine
from lightning_moe_ckpt.native._engine import CopyEngine, Ticket, copy_failed
from lightning_moe_ckpt.native._library import Library, NativeError
from lightning_moe_ckpt.native._plan import Arrangement, Plan, PlannedCopies, slices_of

_TIMED_OUT = 1


class Worker:
    """The thread behind an engine, of the process that made it.

    Args:
        library: the CPU part.
        depth: chunks queued at a time.
        threads: that share the copying of one chunk.
    """

    def __init__(self, library: Library, *, depth: int, threads: int) -> None:
        self._library, self._pid = library, os.getpid()
        self.handle = ctypes.c_void_p()
        library.moe_cpu_engine_create(depth, threads, self.handle)
        self.pending: deque[CompiledTicket] = deque()
        self._end = weakref.finalize(self, _finish, library, self.handle, self._pid, self.pending)

    @property
    def is_ours(self) -> bool:
        """Whether this process has the thread: a forked child has not."""
        return self._pid == os.getpid()

    def submit(self, copies: PlannedCopies) -> CompiledTicket:
        """Queue a list that has a plan."""
        assert copies.plan is not None
        while self.pending and self.pending[0].done:
            self.pending.popleft()
        number = ctypes.c_uint64()
        self._library.moe_cpu_engine_submit(self.handle, copies.plan.handle, number)
        ticket = CompiledTicket(self, number.value, copies)
        self.pending.append(ticket)
        return ticket

    def wait(self, number: int, timeout: timedelta | None) -> bool:
        """Whether the copies have arrived by then; raises `NativeError` if they failed."""
        limit = -1 if timeout is None else timeout // timedelta(microseconds=1)
        return bool(self._library.moe_cpu_engine_wait(self.handle, number, limit) != _TIMED_OUT)

    def fileno(self) -> int:
        """Readable when a ticket became done since it was last read (8 bytes), for `select` and event loops."""
        return int(self._library.moe_cpu_engine_event_fd(self.handle))

    def stop(self) -> None:
        """Finish what was submitted and end the thread; tickets can be asked on."""
        if self.is_ours:
            self._library.moe_cpu_engine_stop(self.handle)
            for ticket in self.pending:
                assert ticket.done
        self.pending.clear()


def _finish(library: Library, handle: ctypes.c_void_p, pid: int, pending: deque[CompiledTicket]) -> None:
    """Also runs at interpreter exit. `pending` is an argument so that the sources live until the thread has ended."""
    if pid == os.getpid():
        library.moe_cpu_engine_free(handle)
    pending.clear()


class CompiledTicket(Ticket):
    """A list waiting for, or done by, the compiled worker."""

    def __init__(self, worker: Worker, number: int, copies: PlannedCopies) -> None:
        self._worker, self._number = worker, number
        self._copies: PlannedCopies | None = copies
        self._num_copies = len(copies)
        self._error: NativeError | None = None

    @property
    @override
    def done(self) -> bool:
        if self._copies is not None and self._worker.is_ours:
            self._ask(timedelta(0))
        return self._copies is None

    @override
    def fence(self) -> float:
        if self.done:
            self._raise_failure()
            return 0.0
        start = time.perf_counter()
        self.wait()
        return time.perf_counter() - start

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        if self._copies is not None:
            if not self._worker.is_ours:
                raise CheckpointError(
                    "This snapshot was submitted before a fork; only the parent process can wait for it."
                )
            self._ask(timeout)
        if self._copies is not None:
            raise TimeoutError(f"A snapshot of {self._num_copies} slices is not done after {timeout}.")
        self._raise_failure()

    def _ask(self, timeout: timedelta | None) -> None:
        """Wait, and let go of the sources if they have been read."""
        try:
            if self._worker.wait(self._number, timeout):
                self._copies = None
        except NativeError as error:
            self._error, self._copies = error, None

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise copy_failed(self._num_copies, self._error) from self._error


class FailedTicket(Ticket):
    """A list that could not even be queued; told where failures are told."""

    def __init__(self, num_copies: int, error: Exception) -> None:
        self._num_copies, self._error = num_copies, error

    @property
    @override
    def done(self) -> bool:
        return True

    @override
    def fence(self) -> float:
        raise copy_failed(self._num_copies, self._error) from self._error

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        raise copy_failed(self._num_copies, self._error) from self._error


class CompiledCpuEngine(CopyEngine):
    """Copies in the order they were submitted, on one thread outside the interpreter.

    Args:
        library: the CPU part.
        arrangement: how lists are cut; fences do not wait for whole lists of others.
        threads: that share the copying of one chunk. One is right beside training: copies are bound by memory.
    """

    def __init__(self, library: Library, arrangement: Arrangement | None = None, *, threads: int = 1) -> None:
        self._library, self._threads = library, threads
        self._arrangement = arrangement if arrangement is not None else Arrangement()
        self._worker: Worker | None = None
        self._twin = CpuCopyEngine()
        self._newest: Ticket | None = None
        self._newest_of_twin: Ticket | None = None

    @override
    def register(self, buffer: Tensor) -> None:
        """Nothing to do: any host memory will do."""

    @override
    def unregister(self, buffer: Tensor) -> None:
        """Nothing to do."""

    @override
    def prepare(self, copies: Sequence[Copy]) -> PlannedCopies:
        planned = PlannedCopies(copies)
        slices = slices_of(planned)
        if slices is not None:
            planned.plan = Plan(self._library, "cpu", slices, self._arrangement)
        return planned

    @override
    def submit(self, copies: Sequence[Copy] | CopyList) -> Ticket:
        try:
            planned = copies if isinstance(copies, PlannedCopies) else self.prepare(_pairs(copies))
            self._newest = self._submit(planned)
        except (ValueError, RuntimeError) as error:
            return FailedTicket(len(copies), error)
        return self._newest

    @override
    def fence(self, ticket: Ticket) -> float:
        return ticket.fence()

    @override
    def wait(self, ticket: Ticket) -> None:
        ticket.wait()

    def fileno(self) -> int:
        """As `Worker.fileno`."""
        return self._running_worker().fileno()

    @override
    def close(self) -> None:
        self._twin.close()
        if self._worker is not None:
            self._worker.stop()
        self._worker, self._newest, self._newest_of_twin = None, None, None

    def _submit(self, copies: PlannedCopies) -> Ticket:
        worker = self._running_worker()
        if copies.plan is not None and (self._newest_of_twin is None or self._newest_of_twin.done):
            return worker.submit(copies)
        self._newest_of_twin = self._twin.submit(_Later(copies, self._newest))
        return self._newest_of_twin

    def _running_worker(self) -> Worker:
        if self._worker is None or not self._worker.is_ours:
            self._worker = Worker(self._library, depth=2, threads=self._threads)
            self._newest, self._newest_of_twin = None, None
        return self._worker


class _Later(CopyList):
    """Copies that wait, on the twin's thread, until what was submitted before them has been made."""

    def __init__(self, copies: CopyList, after: Ticket | None) -> None:
        super().__init__(list(copies.pairs()))
        self._after = after

    @override
    def run(self, *, non_blocking: bool = False) -> None:
        if isinstance(self._after, CompiledTicket):
            with suppress(CheckpointError):  # told to whoever holds that ticket; the order is kept either way
                self._after.wait()
        super().run(non_blocking=non_blocking)


def _pairs(copies: Sequence[Copy] | CopyList) -> Sequence[Copy]:
    return list(copies.pairs()) if isinstance(copies, CopyList) else copies
