"""Copies between a CUDA device and page-locked host memory: one engine on torch's streams, and the compiled one.

Events keep the order; nothing here synchronises the device or the training stream:

* `submit`: the side stream waits for the work queued on the current stream so far, then copies.
* `fence`: the current stream waits for the copies, so a later kernel cannot overwrite a source too early.
* `wait`: the calling thread sleeps until the bytes have arrived.

Copy engines ignore stream priority, so a low-priority stream would not protect the copies of training. The compiled
engine batches, packs and paces copies. Its `fence` waits on the calling thread until all are queued, and pacing ends
for them, since the optimizer needs them now. Host memory given to its `register` is mapped and page-locked piece by
piece in the background; until that is done, copies into it are queued one by one and at the speed of ordinary memory.

`TorchDevice` is all that compiled code needs from torch on a device, here and in the kernels for gradients and Adam;
tests replace it by an emulation.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native._engine import (
    Copy,
    CopyEngine,
    CopyList,
    CopyTable,
    Ticket,
    copy_failed,
    split_at_pieces,
)
from lightning_moe_ckpt.native._host_memory import PageLocks, Preparation, node_of_pci_device
from lightning_moe_ckpt.native._library import Library, NativeError
from lightning_moe_ckpt.native._plan import (
    Arrangement,
    Cast,
    CopyPlan,
    Job,
    PlannedCopies,
    PlannedTable,
    Slices,
    Space,
    slices_of,
    slices_of_table,
)
from lightning_moe_ckpt.native._prototypes import Slice
from lightning_moe_ckpt.native._worker import CompiledEngine, CompiledTicket, Worker

log = rank_logger(__name__)

PIECE_NBYTES = 2**30
"""Bytes per `cudaHostRegister`: a call over 512 GiB fails on current drivers, and each holds a driver-wide lock."""
_POLL = timedelta(milliseconds=2)
_cuda: Any = torch.cuda
"""Events, streams and the runtime are partly untyped in torch."""

_left: list[dict[int, tuple[PageLocks, Preparation]]] = []
"""Memory that is never freed, because its engine's device hangs and may still write to it."""
_DEPTH = 1
"""Chunks queued with the device at a time. With a second one behind it the device's other copies wait for several."""


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
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while deadline is not None and not self._arrived.query():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"A snapshot of {self._num_copies} slices did not arrive in time.")
            time.sleep(_POLL.total_seconds())
        self._arrived.synchronize()
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

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise copy_failed(self._num_copies, self._error) from self._error


class CudaCopyEngine(CopyEngine):
    """Copy engine with one side stream of `device`, in order of submission."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._runtime = TorchDevice(device)
        self._registered: dict[int, PageLocks] = {}
        self._pending: deque[CudaTicket] = deque()

    @override
    def register(self, buffer: Tensor, *, written: bool = False) -> None:
        base, locks = buffer.data_ptr(), PageLocks(buffer, self._runtime.unregister)
        self._registered[base] = locks
        for start in range(0, buffer.nbytes, PIECE_NBYTES):
            piece = (base + start, min(PIECE_NBYTES, buffer.nbytes - start))
            if (code := self._runtime.register(*piece)) != 0:
                locks.release()
                log.warning(
                    "copies into %s of host memory will be slower: cudaHostRegister of %s of it failed with error %d. "
                    "Raise the limit of locked memory (`ulimit -l`), or make the ring smaller.",
                    size_text(buffer.nbytes), size_text(piece[1]), code,
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
                copies = list(split_at_pieces(copies, base=base, end=end, piece_nbytes=PIECE_NBYTES))
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


class CompiledCudaEngine(CompiledEngine):
    """Copy engine with the copy engines of `device`, in the order of submission."""

    def __init__(self, library: Library, device: torch.device, arrangement: Arrangement | None = None) -> None:
        self._library, self._device = library, TorchDevice(device)
        self._arrangement = replace(arrangement if arrangement is not None else Arrangement(), has_device=True)
        self._worker: Worker | None = None
        self._twin = CudaCopyEngine(device)
        self._newest: Ticket | None = None
        self._buffers: dict[int, tuple[PageLocks, Preparation]] = {}
        self._lock, self._waiting = threading.Lock(), set[int]()
        # The worker ends a list before it begins the next one, so all prepared lists share one staging buffer.
        self._staging: Tensor | None = None
        self._bounce: Tensor | None = None
        self._lacked_memory = False

    def start(self) -> None:
        """Create stream and thread now. Raises `NativeError` if the device cannot be used."""
        self._running_worker()

    @override
    def register(self, buffer: Tensor, *, written: bool = False) -> None:
        base, library, index = buffer.data_ptr(), self._library, self._device.index
        self._note(base, ready=False)
        locks = PageLocks(buffer, lambda address: library.moe_cuda_unregister(index, address))

        def register_piece(address: int, nbytes: int) -> None:
            library.moe_cuda_register(index, address, nbytes)
            locks.pieces.append((address, nbytes))

        bus_id = self._device.pci_bus_id()
        preparation = Preparation(
            buffer,
            node=None if bus_id is None else node_of_pci_device(bus_id),
            per_step=register_piece,
            done=lambda: self._note(base, ready=True),
            step_nbytes=PIECE_NBYTES,
        )
        self._buffers[base] = (locks, preparation)

    def finish_registering(self) -> None:
        """Wait until all memory given to `register` is ready; failures were logged."""
        for _, preparation in self._buffers.values():
            preparation.wait()

    @override
    def unregister(self, buffer: Tensor) -> None:
        self._finish_newest()
        locks, preparation = self._buffers.pop(buffer.data_ptr())
        preparation.stop()
        self._note(buffer.data_ptr(), ready=True)
        locks.release()

    @override
    def prepare(self, copies: Sequence[Copy]) -> PlannedCopies:
        return self._prepare(copies, self._arrangement)

    @override
    def _check(self, copies: Sequence[Copy] | CopyList) -> PlannedCopies:
        # Without packing: the host would wait until the device has the list of what to pack.
        return self._prepare(copies, replace(self._arrangement, pack_below=0))

    def _prepare(self, copies: Sequence[Copy] | CopyList, arrangement: Arrangement) -> PlannedCopies:
        planned = PlannedCopies(copies)
        if (slices := slices_of(planned, self._space)) is not None and _is_for_device(slices):
            planned.keep()
            to_device, from_device = slices["dst_space"] == Space.DEVICE, slices["src_space"] == Space.DEVICE
            planned.reads_host = bool((to_device & ~from_device).any())
            self._plan(planned, slices, arrangement)
        return planned

    @override
    def prepare_table(self, table: CopyTable, block_U8: Tensor) -> PlannedTable:
        planned, slices = PlannedTable(table), slices_of_table(table, block_U8, self._space)
        if slices is not None and _is_for_device(slices):
            self._plan(planned, slices, self._arrangement)
        return planned

    @override
    def close(self) -> None:
        self._twin.close()
        if self._worker is not None and not self._worker.stop():
            _left.append(self._buffers)  # the device may still write to them
            self._buffers = {}
        for locks, _ in list(self._buffers.values()):
            self.unregister(locks.buffer)
        self._worker, self._newest, self._staging, self._bounce = None, None, None, None

    # -- private

    def _plan(self, planned: PlannedCopies | PlannedTable, slices: Slices, arrangement: Arrangement) -> None:
        """Arrange the slices as `planned.plan`. If there is no memory for packing, log it once and leave the plan out: torch copies."""
        pieces = [(base, base + locks.buffer.nbytes, PIECE_NBYTES) for base, (locks, _) in self._buffers.items()]
        plan = CopyPlan(self._library, slices, replace(arrangement, pieces=pieces))
        try:
            self._attach(planned, plan)
        except RuntimeError as error:  # torch raises no other error for lack of memory
            if not self._lacked_memory:
                log.warning("torch copies some slices, which is slower: there is no memory to pack them in: %s", error)
            self._lacked_memory = True
            return
        planned.plan = plan

    @override
    def _submit(self, copies: Job) -> Ticket:
        if copies.plan is None:
            # Rare: the twin's stream does not wait for the worker's, so the host keeps the order.
            self._finish_newest()
            return self._twin.submit(list(copies.pairs()))
        if not isinstance(self._newest, CompiledCudaTicket):
            self._finish_newest()
        ticket = self._running_worker().submit(copies, self._device.stream())
        return CompiledCudaTicket(ticket, self._device, reads_host=copies.reads_host)

    @override
    def _stream(self) -> tuple[int, ...]:
        return (self._device.stream(),)

    def _finish_newest(self) -> None:
        if self._newest is not None and not self._newest.done:
            try:
                self._newest.wait()
            except CheckpointError:
                return  # that ticket reports the failure

    def _attach(self, copies: PlannedCopies | PlannedTable, plan: CopyPlan) -> None:
        """Allocate staging memory and upload the list read by kernels; the copies keep both. Raises `RuntimeError` if
        memory is exhausted, or the device cannot be used.
        """
        if (num_units := int(self._library.moe_cuda_plan_num_units(plan.handle))) == 0:
            return
        self._staging = staging_U8 = _room(plan.staging_nbytes, self._staging, self._device.memory)
        self._bounce = bounce_U8 = _room(plan.bounce_nbytes, self._bounce, self._device.page_locked)
        plan.attach(staging_U8.data_ptr(), bounce_U8.data_ptr())
        units = (Slice * num_units)()
        self._library.moe_cuda_plan_units(plan.handle, units)
        units_U8 = self._device.upload_now(units)
        self._library.moe_cuda_plan_set_units(plan.handle, units_U8.data_ptr())
        copies.attached = [staging_U8, bounce_U8, units_U8]

    def _space(self, tensor: Tensor) -> Space:
        if not tensor.is_cuda:
            address = tensor.data_ptr()
            if any(base <= address < base + locks.buffer.nbytes for base, (locks, _) in self._buffers.items()):
                return Space.PINNED
        return self._device.space(tensor)

    def _note(self, base: int, *, ready: bool) -> None:
        """Note whether a buffer is registered; batches start when all are. Preparing threads call this too."""
        with self._lock:
            (self._waiting.discard if ready else self._waiting.add)(base)
            if self._worker is not None:
                self._worker.call("set_registered", self._worker.handle, int(not self._waiting))

    @override
    def _running_worker(self) -> Worker:
        if self._worker is None or not self._worker.is_ours:
            with self._lock:
                self._worker = Worker(self._library, self._device.index, _DEPTH)
                self._worker.call("set_registered", self._worker.handle, int(not self._waiting))
            self._newest = None
        return self._worker


def _is_for_device(slices: Slices) -> bool:
    """Return whether compiled code makes the copies; torch does conversions on the host."""
    on_device = (slices["dst_space"] == Space.DEVICE) | (slices["src_space"] == Space.DEVICE)
    return bool(((slices["cast"] == Cast.BYTES) | on_device).all())


def _room(nbytes: int, found: Tensor | None, make: Callable[[int], Tensor]) -> Tensor:
    return found if found is not None and found.nbytes >= nbytes else make(nbytes)


class CompiledCudaTicket(Ticket):
    """List of copies submitted to the worker; the fence waits on the device.

    If the device reads from the host (`reads_host`), the host waits instead: no stream keeps the host from writing
    there.
    """

    def __init__(self, ticket: CompiledTicket, device: TorchDevice, *, reads_host: bool) -> None:
        self._ticket, self._device, self._reads_host = ticket, device, reads_host

    @property
    @override
    def done(self) -> bool:
        return self._ticket.done

    @override
    def fence(self) -> float:
        start = time.perf_counter()
        if not self._ticket.done and self._device.is_capturing():
            self._ticket.wait()  # waiting for an outside event would break the user's graph
        if not self._ticket.done:
            worker = self._ticket.worker
            try:
                worker.call("fence", worker.handle, self._ticket.number, self._device.stream())
            except NativeError as error:
                raise copy_failed(self._ticket.num_copies, error) from error
            self._ticket.release_sources()  # torch's allocator follows the stream, which waits for the copies
        if self._reads_host or self._ticket.done:
            self._ticket.wait()  # raises if the copy failed
        return time.perf_counter() - start

    @override
    def wait(self, timeout: Any = None) -> None:
        self._ticket.wait(timeout)


_PORTABLE = 1
"""Flag of `cudaHostRegister`: the memory is usable from every context."""


class TorchDevice:
    """A CUDA device of torch, with its current stream; without an index, the current device."""

    def __init__(self, device: torch.device) -> None:
        self.index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device(device.type, self.index)

    def stream(self) -> int:
        """Handle of the current stream."""
        return torch.cuda.current_stream(self.device).cuda_stream

    def take_thread(self) -> None:
        """Make this device the current one of the calling thread, which must be a thread of this package.

        A new thread starts with device 0, and a call without a device would create a context there.
        """
        torch.cuda.set_device(self.device)

    def is_capturing(self) -> bool:
        """Whether work queued now becomes part of a user's graph."""
        return torch.cuda.is_current_stream_capturing()

    def memory(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def page_locked(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, structures: ctypes.Array[Any]) -> Tensor:
        """Copy C structures to the device on the current stream, without blocking the host.

        It copies from page-locked memory: a copy from other memory would wait for all work on the stream.
        """
        host_U8 = torch.frombuffer(bytearray(structures), dtype=torch.uint8).pin_memory()
        return host_U8.to(self.device, non_blocking=True)

    def upload_now(self, structures: ctypes.Array[Any]) -> Tensor:
        """Copy C structures to the device on a separate stream, and return when they have arrived."""
        stream = _cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            on_device_U8 = self.upload(structures)
        stream.synchronize()
        return on_device_U8

    def space(self, tensor: Tensor) -> Space:
        """Return the kind of a tensor's memory as this device sees it; `PINNED` if torch has page-locked it."""
        if tensor.is_cuda:
            return Space.DEVICE if tensor.device == self.device else Space.FOREIGN
        return Space.PINNED if tensor.is_pinned() else Space.PAGEABLE

    def pci_bus_id(self) -> str | None:
        """Return `domain:bus:device.function`; `None` if this torch does not say."""
        properties: Any = torch.cuda.get_device_properties(self.device)
        found = (getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
        numbers = [number for number in found if number is not None]
        return "{:04x}:{:02x}:{:02x}.0".format(*numbers) if len(numbers) == 3 else None

    def settle(self, patience: timedelta) -> None:
        """Wait for the work on the current stream, up to `patience`. Raises `TimeoutError` if the work has not ended by then."""
        event, deadline = _cuda.Event(), time.monotonic() + patience.total_seconds()
        event.record(torch.cuda.current_stream(self.device))
        while not event.query():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"work of milliseconds has not ended after {patience}")
            time.sleep(0.0005)

    def register(self, address: int, nbytes: int) -> int:
        """Page-lock host memory through torch's runtime; return the error code, 0 for success."""
        with torch.cuda.device(self.device):
            return _cleared(int(_cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE)))

    def unregister(self, address: int) -> int:
        """Undo `register`; return the error code."""
        with torch.cuda.device(self.device):
            return _cleared(int(_cuda.cudart().cudaHostUnregister(address)))


def _cleared(code: int) -> int:
    """Clear a pending error and return `code`; else torch would blame the next kernel for it."""
    if code != 0:
        try:
            ctypes.CDLL(None).cudaGetLastError()  # torch loads the runtime with its symbols for everybody
        except AttributeError:
            log.debug("the CUDA runtime has no symbol to clear error %d by; a small kernel takes it", code)
            try:
                _cuda._sleep(0)  # noqa: SLF001  # the smallest kernel torch has
            except RuntimeError as error:
                log.debug("cleared: %s", error)
    return code
