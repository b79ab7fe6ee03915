"""The copy engine: device or training memory into pre-allocated host memory while training goes on.

`submit` returns at once. The caller may change the sources after `fence`, and read the destinations after `wait`.
The engine keeps the sources alive until it has read them. A failed copy is reported by both `fence` and `wait`, never
by `submit`, so the training thread meets a failed snapshot in one place.

Compiled engines do so where they were built, and the ones in Python are their twins. What compiling adds is pacing
and many small slices, not bandwidth.
"""

from __future__ import annotations

import functools
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
        """Undo `register`. No copy into `buffer` may be under way."""

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


def create_engine(device: torch.device) -> CopyEngine:
    """The engine for parameters that live on `device`, compiled if the library for it is there.

    Raises:
        ValueError: neither a CPU nor a CUDA device.
    """
    from lightning_moe_ckpt.native._compiled import CompiledCpuEngine
    from lightning_moe_ckpt.native._cpu import CpuCopyEngine
    from lightning_moe_ckpt.native._cuda import CudaCopyEngine
    from lightning_moe_ckpt.native._library import cpu

    if device.type == "cpu":
        library = cpu()
        return CompiledCpuEngine(library) if library is not None else CpuCopyEngine()
    if device.type == "cuda":
        return _compiled_cuda_engine(device) or CudaCopyEngine(device)
    raise ValueError(f"`create_engine(device={device})`: snapshots are taken from 'cpu' and 'cuda' devices only.")


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


def _compiled_cuda_engine(device: torch.device) -> CopyEngine | None:
    from lightning_moe_ckpt.native._compiled_cuda import CompiledCudaEngine
    from lightning_moe_ckpt.native._device_check import cuda_for
    from lightning_moe_ckpt.native._library import NativeError, status

    library = cuda_for("copies", device)
    if library is None:
        part = status("cuda")
        if part.library is None and "MOE_CKPT_NATIVE=0" not in part.reason:
            _warn_once(f"torch copies snapshots of {device}, which is slower: the compiled CUDA part {part.reason}")
        return None
    engine = CompiledCudaEngine(library, device)
    try:
        engine.start()
    except NativeError as error:
        log.warning("the compiled engine cannot use %s, snapshots go through torch: %s", device, error)
        return None
    return engine


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)


def copy_failed(num_copies: int, cause: BaseException) -> CheckpointError:
    """The error for copies that did not arrive; raise it `from cause`."""
    return CheckpointError(
        f"A snapshot of {num_copies} slices failed: {cause}. The slot it was meant for must not be used; "
        "training itself is not affected."
    )
