"""Prepare host memory before the first copy; digest ranges, spell rows of text, and append to files.

Reserved memory is not mapped memory: the first write to every page is a fault, at a sixth of the speed of later writes.
So a background thread maps the pages ahead; it changes no byte and so may run while the memory is in use. With several
memory nodes, pages are requested from the node next to the device. Files of a tmpfs get huge pages where the kernel can
give them (`take_huge_pages`): then there is next to nothing to map, and nothing to unmap when the process dies.

A segment of 80,000 records is digested in one call of the compiled part: in Python it takes as many calls, between
which the interpreter lock goes to and fro. The compiled part calls XXH3 in the `xxhash` package, by the addresses of that
package's functions, so there is one implementation. It also appends to files, at a lower priority than training, which
may use every core. Without the compiled part, or if the package hides its functions, twins in Python do the same.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib
import json
import mmap
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.native._library import Library, cpu
from lightning_moe_ckpt.native._prototypes import Xxh3

log = rank_logger(__name__)

_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25
"""Linux 5.14 and 6.1 and later; Python's mmap has no names for them."""
_MADV_HUGEPAGE = 14
_PROT_NONE, _MAP_FIXED = 0, 0x10
_HUGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_PIECE_NBYTES = 8 * 2**20
"""Taken at once. Larger huge pages, such as those of 32 and 512 MiB beside small ones of 16 and 64 KiB, are too coarse for rings."""
_PATIENCE_SECONDS, _LEAST_SPEED, _LEAST_SPEED_BESIDE = 0.05, 2**30, 2**28
"""Huge pages come at 10 GB/s and more. Where memory is fragmented, or a virtual machine's host has to give it first, they take long:
below so many bytes per second the rest is left to a thread, and below fewer by that too."""
_STEP_NBYTES = 64 * 2**20
"""Bytes mapped per call; limits the time of stopping."""
_MAX_THREADS = 8
"""The kernel zeroes about 1.5 GB/s per thread; eight reach the bandwidth of most sockets' memory."""
_MPOL_PREFERRED = 1
_SYSCALL_MBIND = {"x86_64": 237, "aarch64": 235}
_NODES = Path("/sys/devices/system/node")
_PCI_DEVICES = Path("/sys/bus/pci/devices")


class Preparation:
    """Uint8 host memory that a background thread makes ready, `step_nbytes` of whole pages at a time; kept alive until
    the thread has finished.

    `node` is the memory node for the pages; `None` leaves the choice to the kernel. On the thread `per_step` is called
    for each range (address, bytes) after its pages are mapped, and `done` at the end. By default a share of the cores
    that this process may use maps a range.
    """

    def __init__(
        self,
        buffer: Tensor,
        *,
        node: int | None = None,
        per_step: Callable[[int, int], None] | None = None,
        done: Callable[[], None] | None = None,
        step_nbytes: int = _STEP_NBYTES,
        threads: int | None = None,
    ) -> None:
        self._buffer: Tensor | None = buffer
        self._node, self._per_step, self._done, self._step_nbytes = node, per_step, done, step_nbytes
        self._threads = threads or preparing_threads()
        self._stopped, self._pid = threading.Event(), os.getpid()
        self.failure: Exception | None = None
        """Reason why `per_step` gave up; the rest of the buffer is not prepared."""
        self._thread = threading.Thread(target=self._run, name="moe-ckpt-prepare", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Block until everything is ready, or `failure` is set."""
        if self._pid == os.getpid():
            self._thread.join()

    def stop(self) -> None:
        """End early."""
        self._stopped.set()
        self.wait()

    def _run(self) -> None:
        try:
            self._prepare()
        except Exception as error:  # noqa: BLE001  # thread entry: the owner looks at `failure`
            self.failure = error
            log.warning("host memory could not be prepared, copies will be slower: %s", error)
        finally:
            self._buffer = None

    def _prepare(self) -> None:
        assert self._buffer is not None
        base, nbytes = self._buffer.data_ptr(), self._buffer.nbytes
        if self._node is not None:
            prefer_node(base, nbytes, self._node)
        pages, at = HugePages(_LEAST_SPEED_BESIDE), base
        with ThreadPoolExecutor(self._threads, "moe-ckpt-prepare") as pool:
            for start in range(0, nbytes, self._step_nbytes):
                size = min(self._step_nbytes, nbytes - start)
                while at < base + start + size and not self._stopped.is_set():
                    at = pages.take(at, base + nbytes)
                if self._stopped.is_set():
                    return
                list(pool.map(populate, *zip(*_shares(base + start, size, self._threads), strict=True)))
                if self._per_step is not None:
                    self._per_step(base + start, size)
        if self._done is not None:
            self._done()


class PageLocks:
    """Page-locked pieces of host memory, which is kept alive until `release`. Pieces are unlocked before the memory is
    freed, even without `release`: if memory is unmapped first, the driver keeps its address locked, and new memory
    there cannot be locked. `unlock` takes a piece's address.
    """

    def __init__(self, buffer: Tensor, unlock: Callable[[int], object]) -> None:
        self.buffer = buffer
        self.pieces: list[tuple[int, int]] = []
        """(address, bytes) of each locked piece."""
        self._end = weakref.finalize(self, _unlock_all, buffer, self.pieces, unlock, os.getpid())
        self._end.atexit = False  # the system unlocks everything at exit; a hanging device must not delay it

    def release(self) -> None:
        """Unlock all pieces. No copy may be running there."""
        self._end()


def _unlock_all(buffer: Tensor, pieces: list[tuple[int, int]], unlock: Callable[[int], object], pid: int) -> None:
    # CUDA does not work in a forked child, such as a worker of a loader.
    for address, _ in pieces if pid == os.getpid() else ():
        try:
            unlock(address)
        except Exception as error:  # noqa: BLE001, PERF203  # may run in a collection; other pieces are given back
            size = size_text(buffer.nbytes)
            log.warning("a piece of %s of page-locked memory could not be given back: %s", size, error)
    pieces.clear()


def preparing_threads() -> int:
    """Return half of the cores this process may use, divided by the machine's ranks; one to eight."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores // 2 // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1), 1), _MAX_THREADS)


def _shares(address: int, nbytes: int, num: int) -> list[tuple[int, int]]:
    """Cut a range into up to `num` (address, bytes) of whole pages; the last may end within a page."""
    share = -(-nbytes // num)
    share += -share % mmap.PAGESIZE
    return [(address + start, min(share, nbytes - start)) for start in range(0, nbytes, share)]


def populate(address: int, nbytes: int) -> bool:
    """Map all pages of a range for writing; no byte changes. Returns whether the kernel can do this (Linux 5.14). If
    not, pages are mapped one by one when they are first written. Raises `OSError` if the range is not mapped memory, or
    there is no memory left.
    """
    start = address - address % mmap.PAGESIZE
    code = _libc().madvise(start, address + nbytes - start, _MADV_POPULATE_WRITE)
    number = ctypes.get_errno() if code else 0
    if number not in (0, errno.EINVAL, errno.ENOSYS):
        raise OSError(number, f"mapping {nbytes} bytes ahead: {os.strerror(number)}")
    return number == 0


def map_file(descriptor: int) -> Tensor:
    """Map a whole file, which must not be empty, as uint8; the mapping ends with the last view, and keeps no descriptor.
    It begins at a multiple of the size of huge pages, without which they would be mapped in small ones. Raises `OSError`.
    """
    nbytes, unit = os.fstat(descriptor).st_size, max(huge_page_nbytes(), mmap.PAGESIZE)
    reserved = _mapped(None, nbytes + unit, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    start, stop = reserved + -reserved % unit, reserved + nbytes + unit
    try:
        _mapped(start, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    except OSError:
        _libc().munmap(reserved, nbytes + unit)
        raise
    end = start + nbytes + -nbytes % mmap.PAGESIZE
    for first, last in ((reserved, start), (end, stop)):
        if last > first:
            _libc().munmap(first, last - first)
    memory = (ctypes.c_ubyte * nbytes).from_address(start)
    weakref.finalize(memory, _libc().munmap, start, nbytes).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _mapped(address: int | None, nbytes: int, access: int, flags: int, descriptor: int) -> int:
    found: int = _libc().mmap(address, nbytes, access, flags, descriptor, 0)
    if found == _MAP_FAILED:
        raise OSError(number := ctypes.get_errno(), f"mapping {nbytes} bytes: {os.strerror(number)}")
    return found


def host_buffer(nbytes: int) -> Tensor:
    """Return uint8 memory with any contents, in huge pages where it is large: faults of small ones take longer than to fill them."""
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    _advise(buffer.data_ptr(), nbytes, _MADV_HUGEPAGE)
    return buffer


class HugePages:
    """Puts huge pages in the place of small ones in one buffer, piece by piece, until the kernel refuses, or is slower than `least_speed`
    bytes per second. No byte changes, so others may use the buffer meanwhile.
    """

    def __init__(self, least_speed: float) -> None:
        self._least_speed, self._seconds = least_speed, 0.0
        self.nbytes = 0
        """Bytes of the pieces taken."""
        self.wanted = huge_page_nbytes() > 0
        """Whether further ones are worth a try."""

    def take(self, address: int, end: int) -> int:
        """Take the whole ones of a range's first piece; return the piece's end."""
        stop = _end_of_piece(address, end)
        if self.wanted:
            began, taken = time.perf_counter(), _advise(address, stop - address, _MADV_COLLAPSE)
            self._seconds += time.perf_counter() - began
            self.nbytes += (stop - address) * taken
            in_use = not taken and ctypes.get_errno() == errno.EAGAIN  # a page of this piece, at this moment
            self.wanted = (taken or in_use) and self._seconds < _PATIENCE_SECONDS + self.nbytes / self._least_speed
        return stop


def take_huge_pages(descriptor: int, memory: Tensor) -> int:
    """Give a new file of a tmpfs, mapped as `memory`, huge pages, whatever the option `huge` of its mount. Returns how
    many bytes have them now: 0 before Linux 6.1, unless the mount gives them, and on other file systems; `Preparation`
    goes on behind them. Raises `OSError` if the tmpfs is full.
    """
    unit, base, pages, at = huge_page_nbytes(), memory.data_ptr(), HugePages(_LEAST_SPEED), memory.data_ptr()
    end = base + (memory.nbytes // unit * unit if unit else 0)
    while at < end and pages.wanted:
        stop = _end_of_piece(at, end)
        for start in range(at, stop, unit):  # the kernel passes over ranges without any page
            os.posix_fallocate(descriptor, start - base, mmap.PAGESIZE)
        if os.fstat(descriptor).st_blocks * 512 >= stop - base:
            return end - base  # the mount gives a whole one for each
        at = pages.take(at, end)
    return pages.nbytes


def _end_of_piece(address: int, end: int) -> int:
    return min(end, address - address % _PIECE_NBYTES + _PIECE_NBYTES)


def _advise(address: int, nbytes: int, advice: int) -> bool:
    """Give advice on the whole huge pages of a range. Returns whether the kernel follows it."""
    unit = huge_page_nbytes() or nbytes + 1
    start, end = address + -address % unit, (address + nbytes) // unit * unit
    return end <= start or _libc().madvise(start, end - start, advice) == 0


@functools.cache
def huge_page_nbytes() -> int:
    """Return the bytes of a huge page; 0 if the kernel has none, or only very large ones."""
    try:
        nbytes = int(_HUGE_PAGE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
    return nbytes if nbytes <= _PIECE_NBYTES else 0


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Ask the kernel to take the unmapped pages of a range from memory node `node`, if it has room. Returns whether the
    kernel accepted.
    """
    if (syscall := _SYSCALL_MBIND.get(platform.machine())) is None:
        return False
    mask = (ctypes.c_ulong * 16)()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask[node // bits] = 1 << node % bits
    start = address - address % mmap.PAGESIZE
    size = ctypes.c_ulong(address + nbytes - start)
    limit = ctypes.c_ulong(bits * len(mask))
    flags = ctypes.c_uint(0)
    code = _libc().syscall(ctypes.c_long(syscall), ctypes.c_void_p(start), size, _MPOL_PREFERRED, mask, limit, flags)
    if code != 0:
        log.debug("mbind to node %d: %s", node, os.strerror(ctypes.get_errno()))
    return bool(code == 0)


def num_nodes() -> int:
    return len(list(_NODES.glob("node[0-9]*"))) or 1


def node_of_pci_device(bus_id: str) -> int | None:
    """Return the memory node next to a device; `None` with one node only, or if the firmware does not say."""
    path = _PCI_DEVICES / bus_id.lower() / "numa_node"
    if num_nodes() < 2 or not path.exists():
        return None
    node = int(path.read_text())
    return node if node >= 0 else None


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)  # every call drops the interpreter lock
    size, number, place = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    libc.mmap.restype, libc.mmap.argtypes = place, (place, size, number, number, number, ctypes.c_long)
    libc.munmap.argtypes, libc.madvise.argtypes = (place, size), (place, size, number)
    return libc


_MAP_FAILED = ctypes.c_void_p(-1).value


_HEX = 32
_SAMPLE = bytes(range(256)) * 4
"""Bytes that reach each of XXH3's code paths for lengths of input."""


class Ranges:
    """Ranges of a buffer, in any order; made once for buffers of one layout. Each has its first byte and the byte
    behind its last; an array has them in columns.
    """

    def __init__(self, pairs: Iterable[tuple[int, int]] | npt.NDArray[np.int64]) -> None:
        rows = pairs.T if isinstance(pairs, np.ndarray) else [*pairs]
        self._pairs = np.array(rows, np.uint64, order="C").reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._pairs)

    def digest(self, view: memoryview, separator: bytes) -> tuple[bytes | memoryview, str]:
        """Return the digests of all ranges as text, joined by `separator` (without a zero byte), and the whole buffer's
        digest. The bytes are C-contiguous, and must not be written to meanwhile. Raises `ValueError` if a range is not
        within the buffer.
        """
        if not ((self._pairs[:, 0] <= self._pairs[:, 1]) & (self._pairs[:, 1] <= view.nbytes)).all():
            raise ValueError(f"`Ranges.digest`: a range is not within the buffer of {view.nbytes} bytes.")
        library, functions = cpu(), package_functions()
        if library is None or functions is None:
            return digest_in_python(self._pairs, view, separator)
        return digest_compiled(library, functions, self._pairs, view, separator)


Pairs = npt.NDArray[np.uint64]


def digest_compiled(
    library: Library, functions: Xxh3, pairs: Pairs, view: memoryview, separator: bytes
) -> tuple[bytes | memoryview, str]:
    """Compute `Ranges.digest` in one call of the compiled part, which raises if a range is not in the buffer."""
    # Not zeroed first: that would hold the lock for as long as the pages take.
    texts = np.empty(max(len(pairs) * (_HEX + len(separator)) - len(separator), 0), np.uint8)
    whole = ctypes.create_string_buffer(_HEX)
    bytes_at = np.frombuffer(view, np.uint8).ctypes.data if view.nbytes else None
    library.moe_digest_ranges(
        functions, bytes_at, view.nbytes, pairs.ctypes.data, len(pairs), separator, texts.ctypes.data, whole
    )
    return memoryview(texts), whole.raw.decode("ascii")  # type: ignore[arg-type]  # arrays are buffers


def digest_in_python(pairs: Pairs, view: memoryview, separator: bytes) -> tuple[bytes | memoryview, str]:
    """Compute `Ranges.digest`, one range after another."""
    texts = [xxhash.xxh3_128_hexdigest(view[start:stop]).encode("ascii") for start, stop in pairs.tolist()]
    return separator.join(texts), str(xxhash.xxh3_128_hexdigest(view))


@functools.cache
def package_functions() -> Xxh3 | None:
    """Return the addresses of the package's functions; `None` if they are not exported, or differ."""
    try:
        library = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
        # Functions that pick the processor's instructions are only in newer packages, and on x86 only.
        picking = "_dispatch" if hasattr(library, "XXH3_128bits_update_dispatch") else ""
        names = [each.format(picking) for each in _NAMES]
        functions = Xxh3(*(ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in names))
    except (ImportError, OSError, AttributeError) as error:
        log.debug("xxhash is called from Python, range by range: %s", error)
        return None
    part = cpu()
    pairs = np.array([(0, nbytes) for nbytes in (0, 1, 16, 128, 240, len(_SAMPLE))], np.uint64)
    sample = pairs, memoryview(_SAMPLE), b","
    if part is not None and digest_compiled(part, functions, *sample) != digest_in_python(*sample):
        log.warning("xxhash is called from Python, range by range: called directly it gives other digests")
        return None
    return functions


_NAMES = (
    "XXH3_128bits{}", "XXH3_createState", "XXH3_freeState", "XXH3_128bits_reset", "XXH3_128bits_update{}",
    "XXH3_128bits_digest",
)  # fmt: skip


Numbers = npt.NDArray[np.int64]
Spelled = str | Numbers | tuple[Sequence[str], Numbers]
"""Part of every row: a constant, or per row a number, or a text's index. Negative numbers and indices add nothing."""
TextColumn = tuple[Sequence[str] | None, Numbers]  # texts with their indices by row, or numbers by row


def spell_rows(parts: Sequence[Spelled], count: int) -> bytes:
    """Return `count` rows of ASCII text with commas between them, each row all parts without anything between."""
    columns: list[TextColumn] = []
    for part in parts:
        column = ([part], np.zeros(count, np.int64)) if isinstance(part, str) else part
        columns.append(column if isinstance(column, tuple) else (None, column))
        assert len(columns[-1][1]) == count, f"a part has {len(columns[-1][1])} values for {count} rows"
    library = cpu()
    return spell_in_python(columns) if library is None else spell_compiled(library, columns)


def spell_compiled(library: Library, columns: Sequence[TextColumn]) -> bytes:
    """Compute `spell_rows` in one call of the compiled part."""
    count = nbytes = len(columns[0][1])
    kept: list[npt.NDArray[Any]] = []  # alive until the call: text, bounds and values of each column
    for texts, numbers in columns:
        values = np.ascontiguousarray(numbers, np.int64)
        text = np.frombuffer(b"\0" + "".join(texts or ()).encode("ascii"), np.uint8)[1:]  # a place even if empty
        bounds = np.cumsum([0, *map(len, texts or ())], dtype=np.int64)
        longest = len(str(values.max(initial=0)))
        nbytes += count * longest if texts is None else int(np.diff(bounds)[values[values >= 0]].sum())
        kept += [text, bounds, values]
    spelled = np.array([each.ctypes.data for each in kept], np.uint64)
    spelled[::3] *= [texts is not None for texts, _ in columns]
    out, written = np.empty(nbytes, np.uint8), ctypes.c_uint64()
    library.moe_spell_rows(spelled.ctypes.data, len(columns), count, out.ctypes.data, nbytes, written)
    return out[: written.value].tobytes()


def spell_in_python(columns: Sequence[TextColumn]) -> bytes:
    """Compute `spell_rows`, value by value."""
    spelled = [
        [("" if value < 0 else str(value) if texts is None else texts[value]) for value in values.tolist()]
        for texts, values in columns
    ]
    return ",".join(map("".join, zip(*spelled, strict=True))).encode("ascii")


RecordValues = tuple[Numbers, bytes, Numbers, list[list[Any]]]
"""Values by column and row, names in JSON with commas between them, each name's first byte, and different values by column."""


def read_records(line: bytes | memoryview, kinds: str, count: int) -> RecordValues | None:
    """Return a marker's line of `count` records by column; `None` if it has to be parsed as JSON. `kinds` as in cpu_read.cpp."""
    if (library := cpu()) is None:
        return None
    text, room = np.frombuffer(line, np.uint8), len(line) + 4 * len(kinds) + 8
    values, bounds = np.empty((len(kinds) + 1, count), np.int64), np.empty(count + 1, np.int64)
    names, distinct, written = np.empty(room, np.uint8), np.empty(room, np.uint8), ctypes.c_uint64()
    places = [each.ctypes.data for each in (values, names, bounds, distinct)]
    library.moe_read_records(text.ctypes.data, len(text), kinds.encode(), count, *places, written)
    if not written.value:
        return None
    return values, names[: bounds[-1] - 1].tobytes(), bounds, json.loads(distinct[: written.value].tobytes())


_LARGE_NBYTES = 2**18
"""Least bytes written by a thread of the compiled part, which takes 30 us to begin."""


def append(file: int, chunk: memoryview, position: int) -> None:
    """Append `chunk` to a file of `position` bytes, and let the device begin to write; `fsync` makes the chunk durable.
    Raises `OSError` as `os.write` does. Beginning early is a hint only. Measured: 256 MB are durable in two thirds of
    the time of write-then-fsync.
    """
    if (library := cpu()) is None or chunk.nbytes < _LARGE_NBYTES:
        append_in_python(file, chunk, position)
    elif code := library.moe_append(file, np.frombuffer(chunk, np.uint8).ctypes.data, chunk.nbytes, position):
        raise OSError(code, os.strerror(code))


def append_in_python(file: int, chunk: memoryview, position: int) -> None:
    """Append like `append`, on the calling thread; each write releases the interpreter lock."""
    while chunk.nbytes:
        written = os.write(file, chunk)
        if _sync_file_range is not None:
            _sync_file_range(file, position, written, 2)  # SYNC_FILE_RANGE_WRITE
        position, chunk = position + written, chunk[written:]


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
