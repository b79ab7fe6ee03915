"""Checking stored segments against what their markers say, in memory and, in bounded memory, as they stream past.

A restore reads a segment into memory and checks it there. A scrub lets the file stream past: its digest and those of its
records are computed on the way, and only its header is kept. What passes here passes there, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage._backend import Backend
from lightning_moe_ckpt.storage._entries import SegmentEntry
from lightning_moe_ckpt.storage._record_table import RecordEntry
from lightning_moe_ckpt.storage._segment import SegmentLayout, _rebuild, _split_header, dtype_of, header_nbytes

_LENGTH_NBYTES = 8


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


def check_places(segment: SegmentEntry, data: memoryview) -> SegmentLayout:
    """Check that every record lies where the marker says; its bytes are not looked at.

    Args:
        segment: as its marker describes it.
        data: all bytes of the file.

    Returns:
        The layout that the file's header says.

    Raises:
        Corrupt: the first record that is elsewhere, or the header is not one.
    """
    layout = SegmentLayout.parse(data)
    _expect_places(segment, layout)
    return layout


def scrub_segment(backend: Backend, entry: SegmentEntry) -> None:
    """Read a segment file and check its header, its digest and that of every record.

    The caller has compared the size with the listing.

    Raises:
        Corrupt: the first thing that is not as written.
        KeyMissing: it is gone.
    """
    check_header(backend, entry)  # before the rest: what cannot be a segment of this size is not read to its end
    records = sorted(entry.records, key=lambda record: record.offset)
    file = xxhash.xxh3_128()
    digests = [xxhash.xxh3_128() for _ in records]
    position = first = 0
    for chunk in read_chunks(backend, entry.key, entry.nbytes):
        file.update(chunk)
        first = _feed(chunk, position, records, digests, first)
        position += chunk.nbytes
    _expect(entry.key, file.hexdigest(), entry.digest)
    for record, digest in zip(records, digests, strict=True):
        _expect(f"{entry.key}: {record.name}", digest.hexdigest(), record.digest)


def check_header(backend: Backend, entry: SegmentEntry) -> None:
    """Read the header of a segment file and compare it with what is said of the file. Raises as `scrub_segment`."""
    _check_places(entry, _read_header(backend, entry))


def scrub_record(backend: Backend, key: str, record: RecordEntry) -> None:
    """Read one record of a segment, in pieces, and check its digest. Raises as `scrub_segment`."""
    digest = xxhash.xxh3_128()
    for chunk in read_chunks(backend, key, record.nbytes, first=record.offset):
        digest.update(chunk)
    _expect(f"{key}: {record.name}", digest.hexdigest(), record.digest)


def _feed(
    chunk: memoryview, start: int, records: Sequence[RecordEntry], digests: Sequence[xxhash.xxh3_128], first: int
) -> int:
    """Give every record what this chunk, from byte `start` of the file, has of it; the first that may go on."""
    stop = start + chunk.nbytes
    for i in range(first, len(records)):
        begin, end = records[i].offset, records[i].offset + records[i].nbytes
        if begin >= stop:
            break
        if end > start:
            digests[i].update(chunk[max(begin, start) - start : min(end, stop) - start])
        if end <= stop and i == first:
            first += 1
    return first


def _read_header(backend: Backend, entry: SegmentEntry) -> bytes:
    """The file's first bytes up to the end of its header, whose length is in the first eight."""
    start = bytearray(min(_LENGTH_NBYTES, entry.nbytes))
    backend.get_range(entry.key, 0, memoryview(start))
    header = bytearray(_LENGTH_NBYTES + header_nbytes(bytes(start), entry.nbytes))
    backend.get_range(entry.key, 0, memoryview(header))
    return bytes(header)


def _check_places(entry: SegmentEntry, header: bytes) -> None:
    """Every record is where the header puts it, and the header is spelled by the rules of the format."""
    layout: SegmentLayout = _rebuild(_split_header(memoryview(header)))
    if layout.header != header or layout.nbytes != entry.nbytes:
        raise Corrupt(f"{entry.key}: the header is not spelled as this format writes it. Another copy may be good.")
    _expect_places(entry, layout)


def _expect_places(entry: SegmentEntry, layout: SegmentLayout) -> None:
    for record in entry.records:
        span = layout.spans.get(record.name)
        place = (record.offset, record.nbytes, dtype_of(record.dtype))
        if span is None or (span.offset, span.nbytes, span.dtype) != place:
            raise Corrupt(f"{entry.key}: {record.name} is not where its marker says.")


def _expect(what: str, found: str, written: str) -> None:
    if found != written:
        raise Corrupt(f"{what}: digest {found}, its marker says {written}. Another copy may be good.")
