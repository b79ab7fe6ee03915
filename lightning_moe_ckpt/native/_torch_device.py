"""Compiled code's needs from torch on a CUDA device, in one class that tests replace by an emulation."""

from __future__ import annotations

import ctypes
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.native._plan import Space

log = rank_logger(__name__)

_cuda: Any = torch.cuda
"""Events, streams and the runtime are partly untyped in torch."""
_PORTABLE = 1
"""Flag of `cudaHostRegister`: the memory is usable from every context."""


class TorchDevice:
    """A CUDA device of torch, with its current stream.

    Args:
        device: CUDA device; without an index, the current one.
    """

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
        """Wait for the work on the current stream, up to `patience`.

        Raises:
            TimeoutError: the work has not ended by then.
        """
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
            _take_error()
    return code


def _take_error() -> None:
    try:
        _cuda._sleep(0)  # noqa: SLF001  # the smallest kernel torch has
    except RuntimeError as error:
        log.debug("cleared: %s", error)
