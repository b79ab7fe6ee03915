"""Reading parts of objects, for readers that must not hold a whole segment in memory.

Training reads whole segments into memory it has anyway, so the backends' contract has no ranges. Tools that look at a
stored run from a small machine add them here. Nothing in this module writes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from lightning_moe_ckpt.errors import Corrupt, KeyMissing, StorageError
from lightning_moe_ckpt.storage._backend import Backend, open_without_retries
from lightning_moe_ckpt.storage._fsspec import FsspecBackend
from lightning_moe_ckpt.storage._object import ObjectBackend
from lightning_moe_ckpt.storage._posix import PosixBackend
from lightning_moe_ckpt.storage._retry import Retrying

CHUNK_NBYTES = 4 * 2**20


class RangedBackend(Backend, Protocol):
    """A backend that also reads parts of objects."""

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on. Raises `KeyMissing`, or `Corrupt` if the object ends before."""


class _RangedPosix(PosixBackend):
    def get_range(self, key: str, start: int, out: memoryview) -> None:
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                filled = os.preadv(file.fileno(), [out], start) if out.nbytes else 0
                while filled < out.nbytes and (count := os.preadv(file.fileno(), [out[filled:]], start + filled)):
                    filled += count
        except FileNotFoundError as error:
            raise KeyMissing(f"get {path}: not there.") from error
        except OSError as error:
            raise StorageError(f"get {path}: {error.strerror or error}.") from error
        if filled != out.nbytes:
            raise Corrupt(f"{path}: ended at byte {start + filled} of {start + out.nbytes}. Another copy may be good.")


class _RangedFsspec(FsspecBackend):
    def get_range(self, key: str, start: int, out: memoryview) -> None:
        if out.nbytes:
            out[:] = self._range(key, start, start + out.nbytes)


class _RangedRetrying(Retrying):
    def __init__(self, backend: RangedBackend) -> None:
        super().__init__(backend)
        self._ranged = backend

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        self._retry(lambda: self._ranged.get_range(key, start, out))


def open_ranged(url: str, *, storage_options: Mapping[str, object] | None = None) -> RangedBackend:
    """As `open_backend`, for reading; nothing is written, and nothing has to be there.

    Raises:
        ConfigurationError: the scheme is unknown, its package is missing, or the options do not fit.
    """
    backend = open_without_retries(url, storage_options=storage_options)
    if isinstance(backend, ObjectBackend):
        return _RangedRetrying(backend)
    if isinstance(backend, PosixBackend):
        return _RangedRetrying(_RangedPosix(re.sub(r"^\w+://", "", url)))
    return _RangedRetrying(_RangedFsspec(url, storage_options=storage_options))


def read_chunks(backend: RangedBackend, key: str, nbytes: int) -> Iterator[memoryview]:
    """Bytes `[0, nbytes)` of an object, in order; while one chunk is used, the next is being read.

    A view is overwritten by the chunk after the next: use it at once. Memory is two chunks, whatever the object.
    """
    buffers = [memoryview(bytearray(min(CHUNK_NBYTES, nbytes))) for _ in range(2)]

    def read(turn: int) -> memoryview:
        start = turn * CHUNK_NBYTES
        view = buffers[turn % 2][: min(CHUNK_NBYTES, nbytes - start)]
        backend.get_range(key, start, view)
        return view

    turns = -(-nbytes // CHUNK_NBYTES)
    if turns <= 1:
        yield from map(read, range(turns))
        return
    with ThreadPoolExecutor(1, thread_name_prefix="moe-ckpt-read") as ahead:
        waiting = ahead.submit(read, 0)
        for turn in range(turns):
            view = waiting.result()
            if turn + 1 < turns:
                waiting = ahead.submit(read, turn + 1)
            yield view
