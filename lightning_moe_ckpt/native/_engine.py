"""The copy engine: device or training memory into pre-allocated host memory while training goes on.

`submit` returns at once. The caller may change the sources after `fence`, and read the destinations after `wait`.
The engine keeps the sources alive until it has read them. A failed copy is reported by both `fence` and `wait`, never
by `submit`, so the training thread meets a failed snapshot in one place.

Compiled engines do so where they were built, and the ones in Python are their twins. What compiling adds is pacing
and many small slices, not bandwidth.
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
        """Make it safe for the calling thread to overwrite the sources: without a stream, wait for the copies.

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
        """Block until all bytes have arrived at the destinations. Nothing writes there after it, failed or not.

        Raises:
            CheckpointError: the copy failed; the destinations hold garbage.
            TimeoutError: the copy is still running after `timeout`.
        """


class CopyEngine(Protocol):
    """Where copies are submitted. Calls come from the training thread; `Ticket.wait` may come from any thread."""

    def register(self, buffer: Tensor) -> None:
        """Make a host buffer ready (page-lock it for CUDA). Slow; call it once per buffer, at start.

        Compiled engines do so in the background. With CUDA the buffer stays in memory until `unregister` or `close`.
        """

    def unregister(self, buffer: Tensor) -> None:
        """Undo `register`. With CUDA it waits for copies: those that were fenced may still be under way."""

    def prepare(self, copies: Sequence[Copy]) -> CopyList:
        """Check and arrange a list that will be submitted many times. Call `register` before.

        Raises:
            ValueError: a pair differs in size, or its types have no exact or rounding conversion.
        """

    def submit(self, copies: Sequence[Copy] | CopyList) -> Ticket:
        """Start copying every (source, destination) pair and return at once."""

    def fence(self, ticket: Ticket) -> float:
        """`ticket.fence()`: the sources may be overwritten after it; returns the seconds waited."""
        return ticket.fence()

    def wait(self, ticket: Ticket) -> None:
        """`ticket.wait()`: the destinations may be read after it."""
        ticket.wait()

    def close(self) -> None:
        """Finish what was submitted and release threads and streams. Closing twice is allowed."""


def copy_through(engine: CopyEngine, copies: Sequence[Copy]) -> None:
    """Copy into live tensors and return when all bytes have arrived, such as host memory into parameters.

    Work queued on the current stream before runs before, and what is queued after sees the new values. Version counters
    rise as with `copy_`: a compiled engine knows addresses only.

    Raises:
        CheckpointError: the copy failed; the destinations hold garbage.
    """
    ticket = engine.submit(copies)
    engine.fence(ticket)
    engine.wait(ticket)
    for _, dst in copies:
        torch.autograd.graph.increment_version(dst)


def copy_failed(num_copies: int, cause: BaseException) -> CheckpointError:
    """The error for copies that did not arrive; raise it `from cause`."""
    return CheckpointError(
        f"A snapshot of {num_copies} slices failed: {cause}. The slot it was meant for must not be used; "
        "training itself is not affected."
    )
