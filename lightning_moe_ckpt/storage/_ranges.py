"""Reading objects piece by piece, for readers that must not hold a whole segment in memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from lightning_moe_ckpt.storage._backend import Backend

CHUNK_NBYTES = 4 * 2**20


def read_chunks(backend: Backend, key: str, nbytes: int, *, first: int = 0) -> Iterator[memoryview]:
    """Bytes `[first, first + nbytes)` of an object, in order; while one chunk is used, the next is being read.

    A view is overwritten by the chunk after the next: use it at once. Memory is two chunks, whatever the object.
    """
    buffers = [memoryview(bytearray(min(CHUNK_NBYTES, nbytes))) for _ in range(2)]

    def read(turn: int) -> memoryview:
        start = turn * CHUNK_NBYTES
        view = buffers[turn % 2][: min(CHUNK_NBYTES, nbytes - start)]
        backend.get_range(key, first + start, view)
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
