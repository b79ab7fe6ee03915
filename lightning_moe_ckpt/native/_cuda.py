"""Copies from a CUDA device into page-locked host memory on a side stream.

Events keep the order; nothing here synchronises the device or the training stream:

* `submit`: the side stream waits for the work queued on the current stream so far, then copies.
* `fence`: the current stream waits for the copies, so a later kernel cannot overwrite a source too early.
* `wait`: the calling thread sleeps on the event of the copies.

Copy engines ignore stream priority, so a low-priority stream would not protect the copies of training. Only the
compiled engine paces its copies.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.native._copies import Copy, CopyList, split_at_pieces
from lightning_moe_ckpt.native._engine import CopyEngine, Ticket, copy_failed
from lightning_moe_ckpt.native._memory import PageLocks
from lightning_moe_ckpt.native._torch_device import TorchDevice

log = logging.getLogger(__name__)

_PIECE_NBYTES = 2**30
"""Bytes per `cudaHostRegister`: one call over 512 GiB fails on current drivers, and each holds a driver-wide lock."""
_POLL = timedelta(milliseconds=2)
_cuda: Any = torch.cuda
"""Events, streams and the runtime are partly untyped in torch."""


class CudaTicket(Ticket):
    """Copies queued on the side stream, with the event that follows them."""

    def __init__(self, num_copies: int, device: torch.device) -> None:
        self._sources: CopyList | None = None
        self._device = device
        self._arrived: Any = _cuda.Event(blocking=True)
        self._error: Exception | None = None
        self._num_copies = num_copies

    @property
    @override
    def done(self) -> bool:
        return bool(self._arrived.query())

    @override
    def fence(self) -> float:
        start = time.perf_counter()
        torch.cuda.current_stream(self._device).wait_event(self._arrived)
        self._sources = None  # torch's allocator follows the stream, which waits for the copies
        self._raise_failure()
        return time.perf_counter() - start

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._arrived.synchronize()
        else:
            self._poll(time.monotonic() + timeout.total_seconds())
        self._raise_failure()

    def enqueue(self, stream: torch.cuda.Stream, arrange: Callable[[], CopyList]) -> None:
        """Queue the copies behind the current stream's work and mark their end."""
        ready = _cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        stream.wait_event(ready)
        try:
            self._sources = arrange()
            with torch.cuda.stream(stream):
                self._sources.run(non_blocking=True)
        except (RuntimeError, ValueError) as error:
            self._error = error
        finally:
            # torch copies tensors of another device on the current stream of that device.
            for device in (self._sources.devices() if self._sources is not None else set()) - {self._device}:
                stream.wait_stream(torch.cuda.current_stream(device))
            # Also after a failure: some copies may be queued, and their sources must stay until these have run.
            self._arrived.record(stream)

    def release(self) -> bool:
        """Release the sources if the copies are done; return whether they are."""
        if self.done:
            self._sources = None
        return self._sources is None

    def _poll(self, deadline: float) -> None:
        while not self._arrived.query():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"A snapshot of {self._num_copies} slices did not arrive in time.")
            time.sleep(_POLL.total_seconds())

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise copy_failed(self._num_copies, self._error) from self._error


class CudaCopyEngine(CopyEngine):
    """Copies in the order they were submitted, on one side stream of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._runtime = TorchDevice(device)
        self._registered: dict[int, PageLocks] = {}
        self._pending: deque[CudaTicket] = deque()

    @override
    def register(self, buffer: Tensor) -> None:
        base, locks = buffer.data_ptr(), PageLocks(buffer, self._runtime.unregister)
        self._registered[base] = locks
        for start in range(0, buffer.nbytes, _PIECE_NBYTES):
            piece = (base + start, min(_PIECE_NBYTES, buffer.nbytes - start))
            code = self._runtime.register(*piece)
            if code != 0:
                locks.release()
                log.warning(
                    "copies into %d bytes of host memory will be slower: cudaHostRegister of %d of them failed with error %d. "
                    "Raise the limit of locked memory (`ulimit -l`), or make the ring smaller.",
                    buffer.nbytes, piece[1], code,
                )  # fmt: skip
                return
            locks.pieces.append(piece)

    @override
    def unregister(self, buffer: Tensor) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        self._registered.pop(buffer.data_ptr()).release()

    @override
    def prepare(self, copies: Sequence[Copy]) -> CopyList:
        for base, locks in self._registered.items():
            if len(locks.pieces) > 1:
                end = sum(locks.pieces[-1])
                copies = list(split_at_pieces(copies, base=base, end=end, piece_nbytes=_PIECE_NBYTES))
        return CopyList(copies)

    @override
    def submit(self, copies: Sequence[Copy] | CopyList) -> Ticket:
        self._release_finished()
        if self._stream is None:
            self._stream = _cuda.Stream(self._device)
        ticket = CudaTicket(len(copies), self._device)
        ticket.enqueue(self._stream, lambda: copies if isinstance(copies, CopyList) else self.prepare(copies))
        self._pending.append(ticket)
        return ticket

    @override
    def close(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        self._release_finished()
        self._stream = None
        while self._registered:
            self._registered.popitem()[1].release()

    def _release_finished(self) -> None:
        while self._pending and self._pending[0].release():
            self._pending.popleft()
