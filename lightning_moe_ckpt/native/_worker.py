"""Thread behind a compiled engine, the base class of such engines, and their tickets.

The library numbers submitted lists. A ticket asks for its number and keeps the memory alive meanwhile, because the
library only has addresses.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native._engine import (
    Copy,
    CopyEngine,
    CopyList,
    PipelinePhase,
    PreparedTable,
    Ticket,
    copy_failed,
)
from lightning_moe_ckpt.native._library import Library, NativeError
from lightning_moe_ckpt.native._plan import BlockCopies, Job, PlannedCopies, PlannedTable
from lightning_moe_ckpt.native._prototypes import GateCounts

log = rank_logger(__name__)

_TIMED_OUT, _WITHOUT_LIMIT, _FENCE = 1, -1, -2
_LONGEST_US = 60 * 10**6
"""Longest wait in microseconds for copies at a fit's end or of the process; copies take seconds at most."""
_left: dict[int, list[CompiledTicket]] = {}
"""Tickets of engines that did not end, by handle; they keep memory alive that the device may still read."""


class Worker:
    """Library's thread behind an engine, of the process that made it; the library's function to make the engine gets `arguments`."""

    def __init__(self, library: Library, *arguments: int) -> None:
        self._library, self._part, self._pid = library, library.part, os.getpid()
        self.handle = ctypes.c_void_p()
        self.call("create", *arguments, self.handle)
        self.pending: deque[CompiledTicket] = deque()
        free = getattr(library, f"moe_{library.part}_engine_free")
        self._end = weakref.finalize(self, _finish, free, self.handle, self._pid, self.pending)

    @property
    def is_ours(self) -> bool:
        """Whether this process has the thread; a forked child does not."""
        return self._pid == os.getpid()

    def submit(self, copies: Job, *stream: int) -> CompiledTicket:
        """Queue copies with a plan, after the work of `stream` if there are streams."""
        assert copies.plan is not None
        while self.pending and self.pending[0].done:
            self.pending.popleft()
        number = ctypes.c_uint64()
        self.call("submit", self.handle, copies.plan.handle, copies.base, *stream, number)
        ticket = CompiledTicket(self, number.value, copies)
        self.pending.append(ticket)
        return ticket

    def wait(self, number: int, limit_us: int) -> bool:
        """Wait; return whether the copies have arrived. Raises `NativeError` if they failed."""
        return self.call("wait", self.handle, number, limit_us) != _TIMED_OUT

    def fileno(self) -> int:
        """Return a descriptor for `select`: readable (8 bytes) when a ticket became done since the last read."""
        return self.call("event_fd", self.handle)

    def stop(self) -> bool:
        """Finish the submitted lists and end the thread; tickets stay usable. Returns whether the thread has ended. If
        the device hangs, the memory that it may still read stays allocated.
        """
        if self.is_ours and self.call("stop", self.handle, _LONGEST_US) == _TIMED_OUT:
            _leave(self.handle, self.pending)
            return False
        for ticket in self.pending if self.is_ours else ():
            assert ticket.done
        self.pending.clear()
        return True

    def call(self, name: str, *arguments: object) -> int:
        """Call the library's function `engine_<name>`."""
        return int(getattr(self._library, f"moe_{self._part}_engine_{name}")(*arguments) or 0)


def _finish(free: Callable[..., Any], handle: ctypes.c_void_p, pid: int, pending: deque[CompiledTicket]) -> None:
    """Free the engine, also at interpreter exit. `pending` keeps the sources alive until the thread has ended."""
    if pid == os.getpid() and free(handle, 0 if handle.value in _left else _LONGEST_US) == _TIMED_OUT:
        _leave(handle, pending)
        return
    pending.clear()


def _leave(handle: ctypes.c_void_p, pending: deque[CompiledTicket]) -> None:
    if handle.value not in _left:
        log.warning("copies have not ended after %.0f s; the process goes on without them", _LONGEST_US / 1e6)
        _left[handle.value or 0] = list(pending)


class CompiledEngine(CopyEngine):
    """Base of the compiled engines: lists are arranged once, and tickets report failures."""

    _newest: Ticket | None

    @override
    @abstractmethod
    def prepare(self, copies: Sequence[Copy]) -> PlannedCopies: ...

    @override
    def submit(self, copies: Sequence[Copy] | CopyList) -> Ticket:
        try:
            self._newest = self._submit(copies if isinstance(copies, PlannedCopies) else self._check(copies))
        except (ValueError, RuntimeError) as error:
            return FailedTicket(len(copies), error)
        return self._newest

    @override
    def submit_table(self, prepared: PreparedTable, block_U8: Tensor) -> Ticket:
        if not isinstance(prepared, PlannedTable) or prepared.plan is None:
            return super().submit_table(prepared, block_U8)
        try:
            self._newest = self._submit(BlockCopies(prepared, block_U8))
        except (ValueError, RuntimeError) as error:
            return FailedTicket(len(prepared.table), error)
        return self._newest

    def fileno(self) -> int:
        """Return the descriptor of `Worker.fileno`."""
        return self._running_worker().fileno()

    @override
    def enter(self, phase: PipelinePhase) -> None:
        worker = self._running_worker()
        worker.call("enter", worker.handle, int(phase), *self._stream())

    @override
    def fit_gaps(self, nbytes: int) -> None:
        worker = self._running_worker()
        worker.call("fit", worker.handle, nbytes)

    @override
    def gate_counts(self) -> GateCounts:
        worker, counts = self._running_worker(), GateCounts()
        worker.call("counts", worker.handle, counts)
        return counts

    def _stream(self) -> tuple[int, ...]:
        """Return the current stream, where there are streams."""
        return ()

    @abstractmethod
    def _check(self, copies: Sequence[Copy] | CopyList) -> PlannedCopies:
        """Check a list that is used once."""

    @abstractmethod
    def _submit(self, copies: Job) -> Ticket:
        """Queue copies after those submitted before."""

    @abstractmethod
    def _running_worker(self) -> Worker:
        """Return this process's thread, started if necessary."""


class CompiledTicket(Ticket):
    """List of copies submitted to the compiled worker."""

    def __init__(self, worker: Worker, number: int, copies: Job) -> None:
        self.worker, self.number = worker, number
        self._copies: Job | list[Tensor] | None = copies
        """Keeps memory alive until the bytes have arrived."""
        self.num_copies = len(copies)
        self._error: NativeError | None = None

    @property
    @override
    def done(self) -> bool:
        if self._copies is not None and self.worker.is_ours:
            self._ask(0)
        return self._copies is None

    @override
    def fence(self) -> float:
        start = None if self.done else time.perf_counter()
        self._wait(_FENCE)
        return 0.0 if start is None else time.perf_counter() - start

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        self._wait(_WITHOUT_LIMIT if timeout is None else timeout // timedelta(microseconds=1))

    def _wait(self, limit_us: int) -> None:
        if self._copies is not None:
            if not self.worker.is_ours:
                raise CheckpointError(
                    "This snapshot was submitted before a fork; only the parent process can wait for it."
                )
            self._ask(limit_us)
        if self._copies is not None:
            raise TimeoutError(f"A snapshot of {self.num_copies} slices is not done after {limit_us / 1e6} s.")
        if self._error is not None:
            raise copy_failed(self.num_copies, self._error) from self._error

    def release_sources(self) -> None:
        """Release the sources before they are read; the caller ensures that later writes to their memory come after."""
        if self._copies is not None and not isinstance(self._copies, list):
            self._copies = self._copies.written()

    def _ask(self, limit_us: int) -> None:
        """Wait, then release the sources if already read."""
        try:
            if self.worker.wait(self.number, limit_us):
                self._copies = None
        except NativeError as error:
            self._error, self._copies = error, None


class FailedTicket(Ticket):
    """List that could not be queued; `fence` and `wait` raise the error."""

    def __init__(self, num_copies: int, error: Exception) -> None:
        self._num_copies, self._error = num_copies, error

    @property
    @override
    def done(self) -> bool:
        return True

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        raise copy_failed(self._num_copies, self._error) from self._error
