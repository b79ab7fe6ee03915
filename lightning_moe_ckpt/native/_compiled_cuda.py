"""The copy engine between a CUDA device and host memory, compiled: batches, packing, pacing, completion without sync.

Keeps the contract of `CopyEngine`; `CudaCopyEngine` is its twin on torch's streams. Order is kept by events, as there:

* `submit`: the side stream waits for the work queued on the current stream so far, then copies.
* `fence`: the current stream waits for the copies. The calling thread waits until all are queued, and pacing ends for
  them, since the optimizer needs them now.
* `wait`: the calling thread sleeps until the bytes are there.

Host memory given to `register` is mapped and page-locked piece by piece in the background; until that is done, copies
into it are queued one by one and at the speed of ordinary memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native._copies import Copy
from lightning_moe_ckpt.native._cuda import CudaCopyEngine
from lightning_moe_ckpt.native._engine import Ticket, copy_failed
from lightning_moe_ckpt.native._library import Library, NativeError
from lightning_moe_ckpt.native._memory import Preparation, node_of_pci_device
from lightning_moe_ckpt.native._plan import Arrangement, Cast, Plan, PlannedCopies, Space, slices_of
from lightning_moe_ckpt.native._prototypes import Slice
from lightning_moe_ckpt.native._worker import CompiledEngine, CompiledTicket, Worker

PIECE_NBYTES = 2**30
"""Bytes per `cudaHostRegister`: one call over 512 GiB fails on current drivers, and each holds a driver-wide lock."""
_DEPTH = 2
"""Chunks queued with the device at a time."""
_SLICE_NBYTES = 64


class CompiledCudaEngine(CompiledEngine):
    """Copies in the order they were submitted, by the copy engines of `device`.

    Args:
        library: the CUDA part.
        device: where parameters live.
        arrangement: how lists are cut.
    """

    def __init__(self, library: Library, device: torch.device, arrangement: Arrangement | None = None) -> None:
        self._library = library
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._arrangement = replace(arrangement if arrangement is not None else Arrangement(), has_device=True)
        self._worker: Worker | None = None
        self._twin = CudaCopyEngine(self._device)
        self._newest: Ticket | None = None
        self._buffers: dict[int, tuple[Tensor, Preparation, list[int]]] = {}
        self._lock, self._waiting = threading.Lock(), set[int]()

    def start(self) -> None:
        """Make stream and thread now.

        Raises:
            NativeError: the device cannot be used.
        """
        self._running_worker()

    @override
    def register(self, buffer: Tensor) -> None:
        base, registered = buffer.data_ptr(), list[int]()
        self._note(base, ready=False)

        def register_piece(address: int, nbytes: int) -> None:
            self._library.moe_cuda_register(self._device.index, address, nbytes)
            registered.append(address)

        preparation = Preparation(
            buffer,
            node=self._node(),
            per_step=register_piece,
            done=lambda: self._note(base, ready=True),
            step_nbytes=PIECE_NBYTES,
        )
        self._buffers[base] = (buffer, preparation, registered)

    def finish_registering(self) -> None:
        """Wait until all memory given to `register` is ready, or cannot be made so, which was said then."""
        for _, preparation, _ in self._buffers.values():
            preparation.wait()

    @override
    def unregister(self, buffer: Tensor) -> None:
        _, preparation, registered = self._buffers.pop(buffer.data_ptr())
        preparation.stop()
        self._note(buffer.data_ptr(), ready=True)
        for address in registered:
            self._library.moe_cuda_unregister(self._device.index, address)

    @override
    def prepare(self, copies: Sequence[Copy]) -> PlannedCopies:
        planned = PlannedCopies(copies)
        slices = slices_of(planned, self._space)
        if slices is None:
            return planned
        to_device, from_device = slices["dst_space"] == Space.DEVICE, slices["src_space"] == Space.DEVICE
        if ((slices["cast"] != Cast.BYTES) & ~to_device & ~from_device).any():
            return planned  # conversions on the host are torch's
        planned.keep()
        planned.reads_host = bool((to_device & ~from_device).any())
        pieces = [(base, base + buffer.nbytes, PIECE_NBYTES) for base, (buffer, _, _) in self._buffers.items()]
        planned.plan = Plan(self._library, "cuda", slices, replace(self._arrangement, pieces=pieces))
        self._attach(planned, planned.plan)
        return planned

    @override
    def close(self) -> None:
        self._twin.close()
        if self._worker is not None:
            self._worker.stop()
        for buffer, _, _ in list(self._buffers.values()):
            self.unregister(buffer)
        self._worker, self._newest = None, None

    # -- private

    @override
    def _submit(self, copies: PlannedCopies) -> Ticket:
        if copies.plan is None:
            # Rare: the twin's stream knows nothing of the worker's, so the host keeps the order.
            self._finish_newest()
            return self._twin.submit(list(copies.pairs()))
        if not isinstance(self._newest, CompiledCudaTicket):
            self._finish_newest()
        stream = torch.cuda.current_stream(self._device).cuda_stream
        ticket = self._running_worker().submit(copies, stream)
        return CompiledCudaTicket(ticket, self._device, reads_host=copies.reads_host)

    def _finish_newest(self) -> None:
        if self._newest is not None and not self._newest.done:
            try:
                self._newest.wait()
            except CheckpointError:
                return  # told to whoever holds that ticket

    def _attach(self, copies: PlannedCopies, plan: Plan) -> None:
        """Staging memory and the list that kernels read: kept with the copies, on both sides."""
        num_units = int(self._library.moe_cuda_plan_num_units(plan.handle))
        if num_units == 0:
            return
        staging = torch.empty(plan.staging_nbytes, dtype=torch.uint8, device=self._device)
        bounce = torch.empty(plan.bounce_nbytes, dtype=torch.uint8, pin_memory=True)
        plan.attach(staging.data_ptr(), bounce.data_ptr())
        units = torch.empty(num_units * _SLICE_NBYTES, dtype=torch.uint8)
        self._library.moe_cuda_plan_units(plan.handle, (Slice * num_units).from_address(units.data_ptr()))
        on_device = units.to(self._device)
        self._library.moe_cuda_plan_set_units(plan.handle, on_device.data_ptr())
        copies.attached = [staging, bounce, on_device]

    def _space(self, tensor: Tensor) -> Space:
        if tensor.is_cuda:
            return Space.DEVICE
        address = tensor.data_ptr()
        ours = any(base <= address < base + buffer.nbytes for base, (buffer, _, _) in self._buffers.items())
        return Space.PINNED if ours or tensor.is_pinned() else Space.PAGEABLE

    def _node(self) -> int | None:
        properties: Any = torch.cuda.get_device_properties(self._device)
        found = (getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
        numbers = [number for number in found if number is not None]
        return node_of_pci_device("{:04x}:{:02x}:{:02x}.0".format(*numbers)) if len(numbers) == 3 else None

    def _note(self, base: int, *, ready: bool) -> None:
        """Batches may start when no buffer waits for being registered; also called by the preparing threads."""
        with self._lock:
            (self._waiting.discard if ready else self._waiting.add)(base)
            if self._worker is not None:
                self._worker.call("set_registered", self._worker.handle, int(not self._waiting))

    @override
    def _running_worker(self) -> Worker:
        if self._worker is None or not self._worker.is_ours:
            with self._lock:
                self._worker = Worker(self._library, "cuda", self._device.index, _DEPTH)
                self._worker.call("set_registered", self._worker.handle, int(not self._waiting))
            self._newest = None
        return self._worker


class CompiledCudaTicket(Ticket):
    """A list waiting for, or done by, the worker; the fence waits on the device.

    Where the device reads from the host (`reads_host`), the host waits: no stream keeps it from writing there.
    """

    def __init__(self, ticket: CompiledTicket, device: torch.device, *, reads_host: bool) -> None:
        self._ticket, self._device, self._reads_host = ticket, device, reads_host

    @property
    @override
    def done(self) -> bool:
        return self._ticket.done

    @override
    def fence(self) -> float:
        start = time.perf_counter()
        if not self._ticket.done:
            stream = torch.cuda.current_stream(self._device).cuda_stream
            worker = self._ticket.worker
            try:
                worker.call("fence", worker.handle, self._ticket.number, stream)
            except NativeError as error:
                raise copy_failed(self._ticket.num_copies, error) from error
        if self._reads_host or self._ticket.done:
            self._ticket.wait()  # raises if it failed
        return time.perf_counter() - start

    @override
    def wait(self, timeout: Any = None) -> None:
        self._ticket.wait(timeout)
