"""The contract of copy engines, which copy training memory into pre-allocated host memory while training goes on.

`submit` returns at once. The caller may change the sources after `fence`, and read the destinations after `wait`.
The engine keeps the sources alive until it has read them. Both `fence` and `wait` report a failed copy, `submit` never
does, so the training thread meets a failed snapshot in one place.

Every compiled engine has a twin in Python. The compiled one adds pacing and handles many small slices well; the
bandwidth is the same.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native._copies import Copy, CopyList

log = logging.getLogger(__name__)


class Ticket(ABC):
    """One submitted list of copies."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether all bytes have arrived, or the copy has failed."""

    def fence(self) -> float:
        """Wait until the calling thread, or its current stream, may overwrite the sources.

        Returns:
            Seconds the calling thread was blocked. On CUDA the wait happens on the device and this is near zero.

        Raises:
            CheckpointError: the copy failed; the destinations hold garbage.
        """
        start = None if self.done else time.perf_counter()
        self.wait()
        return 0.0 if start is None else time.perf_counter() - start

    @abstractmethod
    def wait(self, timeout: timedelta | None = None) -> None:
        """Block until all bytes have arrived at the destinations. The engine writes nothing there afterwards.

        Raises:
            CheckpointError: the copy failed; the destinations hold garbage.
            TimeoutError: the copy is still running after `timeout`.
        """


class CopyEngine(Protocol):
    """Copies lists of tensors in the background. The training thread calls it; any thread may call `Ticket.wait`."""

    def register(self, buffer: Tensor) -> None:
        """Make a host buffer ready (page-lock it for CUDA). Slow; call it once per buffer, at start.

        Compiled engines do so in the background. With CUDA the buffer stays in memory until `unregister` or `close`.
        """

    def unregister(self, buffer: Tensor) -> None:
        """Undo `register`. With CUDA it waits for copies, because fenced ones may still be running."""

    def prepare(self, copies: Sequence[Copy]) -> CopyList:
        """Check and arrange a list that will be submitted many times. Call `register` before.

        Raises:
            ValueError: a pair differs in size, or its types have no exact or rounding conversion.
        """

    def submit(self, copies: Sequence[Copy] | CopyList) -> Ticket:
        """Start copying every (source, destination) pair and return at once."""

    def fence(self, ticket: Ticket) -> float:
        """Call `ticket.fence()`, after which the sources may be overwritten; return the seconds waited."""
        return ticket.fence()

    def wait(self, ticket: Ticket) -> None:
        """Call `ticket.wait()`, after which the destinations may be read."""
        ticket.wait()

    def close(self) -> None:
        """Finish what was submitted and release threads and streams. Closing twice is allowed."""


def copy_through(engine: CopyEngine, copies: Sequence[Copy]) -> None:
    """Copy into live tensors, such as host memory into parameters, and return when all bytes have arrived.

    Work queued earlier on the current stream runs before the copies, later work sees the new values. Version counters
    rise as with `copy_`.

    Raises:
        CheckpointError: the copy failed; the destinations hold garbage.
    """
    ticket = engine.submit(copies)
    engine.fence(ticket)
    engine.wait(ticket)
    for _, dst in copies:
        torch.autograd.graph.increment_version(dst)


def copy_failed(num_copies: int, cause: BaseException) -> CheckpointError:
    """Return the error for copies that did not arrive; raise it `from cause`."""
    return CheckpointError(
        f"A snapshot of {num_copies} slices failed: {cause}. The slot it was meant for must not be used; "
        "training itself is not affected."
    )
