"""The emulated device as the package meets it: its library, and `TorchDevice` on memory of the CPU.

Python's side of the device is the CPU itself: what torch does, it does at once, on memory that the emulation knows to be
a device's. So that a later step cannot overtake copies, a fence waits for what the training stream holds by then.
"""

from __future__ import annotations

import bisect
import ctypes as c
import functools
import mmap
import operator
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from door import CompiledCudaTicket, Space, TorchDevice
from torch import Tensor

from lightning_moe_ckpt.native import _library
from lightning_moe_ckpt.native._library import Library, NativeError
from native.emulator.build import build

LIBRARY_VARIABLE = "MOE_CKPT_EMULATED"
"""Path of a library that is built already, such as one with a sanitizer."""
HANGS = -1
"""In the place of an error code: the work of that call never ends."""
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "set": (None, [c.c_char_p, c.c_int64]),
    "plant": (None, [c.c_char_p, c.c_int, c.c_int]),
    "heal": (None, []),
    "forget_registered": (None, []),
    "release": (None, []),
    "calls": (c.c_int64, [c.c_char_p]),
    "contexts": (c.c_uint, []),
    "last_error": (c.c_int, []),
    "stream": (c.c_void_p, [c.c_int]),
    "drain": (c.c_int, [c.c_void_p, c.c_int64]),
    "sleep": (None, [c.c_void_p, c.c_uint]),
    "fill": (None, [c.c_void_p, c.c_void_p, c.c_int, c.c_size_t]),
    "capture": (None, [c.c_void_p, c.c_int]),
    "capture_status": (c.c_int, [c.c_void_p]),
    "add_device_memory": (None, [c.c_void_p, c.c_size_t, c.c_int]),
    "remove_device_memory": (None, [c.c_void_p]),
    "device_of": (c.c_int, [c.c_void_p]),
    "add_page_locked": (None, [c.c_void_p, c.c_size_t]),
    "remove_page_locked": (None, [c.c_void_p]),
    "is_page_locked": (c.c_int, [c.c_void_p, c.c_size_t]),
    "num_registered": (c.c_int64, []),
}
_OUTSIDE_THE_ENGINE = ("moe_cuda_quantize", "moe_cuda_select", "moe_cuda_adam_replay")

Put = Callable[[Any, str, Any], None]


class Emulator:
    """The library with its emulated devices; its functions without `emulator_` are attributes."""

    def __init__(self, path: Path) -> None:
        handle = c.CDLL(str(path))
        self.library = Library(handle, "cuda")
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(handle, f"emulator_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        for name in _OUTSIDE_THE_ENGINE:
            setattr(self.library, name, self._drained(getattr(self.library, name)))
        self._training: dict[tuple[int, int], int] = {}
        self.patience_ms = 30_000
        """How long training waits for its stream where it has to."""
        self.training_memory: Callable[[Tensor], bool] | None = None
        """Says which tensors are to be a device's; by default those that were made as such."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the emulation has no emulator_{name}")

    def training(self, index: int = 0) -> int:
        """The stream that training uses on a device."""
        key = (os.getpid(), index)
        if key not in self._training:
            self._training[key] = self.stream(index)
        return self._training[key]

    def settle(self) -> None:
        """Wait for all that training has queued.

        Raises:
            TimeoutError: something does not end.
        """
        for pid, index in [*self._training]:
            if pid == os.getpid() and not self.drain(self.training(index), self.patience_ms):
                raise TimeoutError(f"the training stream has work left after {self.patience_ms} ms")

    def memory(self, nbytes: int, index: int = 0) -> Tensor:
        """Bytes of a device."""
        return self.adopt(torch.empty(nbytes, dtype=torch.uint8), index)

    def adopt(self, tensor: Tensor, index: int = 0) -> Tensor:
        """Make the memory behind a tensor a device's, as long as it lives."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self.add_device_memory(storage.data_ptr(), storage.nbytes(), index)
            weakref.finalize(storage, self.remove_device_memory, storage.data_ptr()).atexit = False
        return tensor

    def page_locked(self, nbytes: int) -> Tensor:
        """Bytes as torch's allocator makes them."""
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            self.add_page_locked(tensor.data_ptr(), nbytes)
            weakref.finalize(tensor.untyped_storage(), self.remove_page_locked, tensor.data_ptr()).atexit = False
        return tensor

    def space(self, tensor: Tensor, index: int) -> Space:
        """As `TorchDevice.space`."""
        if self.training_memory is not None and self.training_memory(tensor):
            self.adopt(tensor, index)
        found = self.device_of(tensor.data_ptr())
        if found >= 0:
            return Space.DEVICE if found == index else Space.FOREIGN
        locked = self.is_page_locked(tensor.data_ptr(), max(tensor.nbytes, 1))
        return Space.PINNED if locked else Space.PAGEABLE

    @contextmanager
    def settings(self, **values: int) -> Iterator[None]:
        """Settings of runtime.cpp, put back afterwards."""
        before = {"jitter_us": 0, "held_block": -1, "shared_nbytes": 232448, "host_pointer_for_registered": 1}
        for name, value in values.items():
            self.set(name.encode(), value)
        try:
            yield
        finally:
            for name in values:
                self.set(name.encode(), before[name])

    def _drained(self, function: Callable[..., int]) -> Callable[..., int]:
        """Memory of torch's allocator follows the stream; here it would be gone before the kernel runs."""

        @functools.wraps(function)
        def call(*arguments: Any) -> int:
            code = function(*arguments)
            assert self.drain(arguments[-1], self.patience_ms), "a kernel does not end"
            return code

        return call


def load() -> Emulator:
    """The emulated devices of this process."""
    return Emulator(Path(os.environ[LIBRARY_VARIABLE]) if LIBRARY_VARIABLE in os.environ else build())


def install(emulator: Emulator, put: Put) -> None:
    """Let the package find emulated devices.

    Args:
        emulator: see `load`.
        put: as `setattr`, perhaps with a memory.
    """

    def begin(self: TorchDevice, device: torch.device) -> None:
        self.index, self.device = device.index or 0, torch.device("cpu")

    def upload(_: TorchDevice, structures: c.Array[Any]) -> Tensor:
        tensor = emulator.memory(c.sizeof(structures))
        c.memmove(tensor.data_ptr(), structures, c.sizeof(structures))
        return tensor

    put(TorchDevice, "__init__", begin)
    put(TorchDevice, "stream", lambda self: emulator.training(self.index))
    put(TorchDevice, "is_capturing", lambda self: emulator.capture_status(self.stream()) != 0)
    put(TorchDevice, "take_thread", lambda _: None)
    put(TorchDevice, "memory", lambda self, nbytes: emulator.memory(nbytes, self.index))
    put(TorchDevice, "page_locked", lambda _, nbytes: emulator.page_locked(nbytes))
    put(TorchDevice, "upload", upload)
    put(TorchDevice, "upload_now", upload)
    put(TorchDevice, "space", lambda self, tensor: emulator.space(tensor, self.index))
    put(TorchDevice, "pci_bus_id", lambda _: None)
    put(TorchDevice, "settle", lambda *_: emulator.settle())
    put(TorchDevice, "register", functools.partial(_code, emulator.library.moe_cuda_register))
    put(TorchDevice, "unregister", functools.partial(_code, emulator.library.moe_cuda_unregister))
    put(_library, "cuda", lambda: emulator.library)
    fence = CompiledCudaTicket.fence

    def fence_and_settle(self: CompiledCudaTicket) -> float:
        seconds = fence(self)
        emulator.settle()
        return seconds

    put(CompiledCudaTicket, "fence", fence_and_settle)
    _install_torchs_streams(emulator, put)


def _code(function: Callable[..., int], *arguments: int) -> int:
    """Torch's runtime gives codes in the place of errors."""
    try:
        return function(0, *arguments)
    except NativeError:
        return 712


def _install_torchs_streams(emulator: Emulator, put: Put) -> None:
    """For the twin: what it queues with torch has happened when the call returns."""

    def event(**_: Any) -> Any:
        return SimpleNamespace(
            record=lambda _: emulator.settle(), query=lambda: True, synchronize=lambda: None, elapsed_time=lambda _: 0.0
        )

    def stream(*_: Any) -> Any:
        names = ("wait_event", "wait_stream", "synchronize")
        return SimpleNamespace(
            cuda_stream=emulator.training(), **{name: lambda *_: emulator.settle() for name in names}
        )

    put(torch.cuda, "Event", event)
    put(torch.cuda, "Stream", stream)
    put(torch.cuda, "current_stream", stream)
    put(torch.cuda, "stream", lambda _: _nothing())


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def is_anonymous(tensor: Tensor) -> bool:
    """Whether a tensor is in memory of this process alone, as a device's would be: not of a file, as rings and segments.

    What is mapped is read anew after `mappings_changed`.
    """
    address = tensor.data_ptr()
    if address == 0:
        return False
    inode = _inode_at(address)
    if inode is None:
        mappings_changed()
        inode = _inode_at(address)
    return inode == 0


def mappings_changed() -> None:
    """There may be a file now where something else was."""
    _mappings.cache_clear()


def _inode_at(address: int) -> int | None:
    """Of the file that is mapped there, 0 if it is none; `None` if nothing was there when somebody looked last."""
    mappings = _mappings()
    index = bisect.bisect_right(mappings, address, key=operator.itemgetter(0)) - 1
    return mappings[index][2] if index >= 0 and address < mappings[index][1] else None


@functools.cache
def _mappings() -> list[tuple[int, int, int]]:
    """(begin, end, inode) of everything in this process's memory, in order."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split(maxsplit=5)
        begin, end = span.split("-")
        found.append((int(begin, 16), int(end, 16), int(inode)))
    return found


def registered_memory(nbytes: int) -> Tensor:
    """Host memory in whole pages, as rings are."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
