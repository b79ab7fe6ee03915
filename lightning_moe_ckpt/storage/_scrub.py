"""Check stored segments against their markers, in memory or as a stream.

A restore reads a segment into memory and checks it there. A scrub streams the file in bounded memory: it computes the
digests of file and records on the way and keeps only the header. Both checks accept the same files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage._backend import Backend
from lightning_moe_ckpt.storage._entries import RecordEntry, SegmentEntry
from lightning_moe_ckpt.storage._segment import SegmentLayout, dtype_of, header_nbytes

_LENGTH_NBYTES = 8


CHUNK_NBYTES = 4 * 2**20


def read_chunks(backend: Backend, key: str, nbytes: int, *, first: int = 0) -> Iterator[memoryview]:
    """Yield bytes `[first, first + nbytes)` of an object in chunks; the next chunk is read while one is in use.

    Use each view before asking for the next: its memory is reused. Memory is two chunks, whatever the object's size.
    """
    buffers = [memoryview(bytearray(min(CHUNK_NBYTES, nbytes))) for _ in range(2)]

    def read(turn: int) -> memoryview:
        start = turn * CHUNK_NBYTES
        view = buffers[turn % 2][: min(CHUNK_NBYTES, nbytes - start)]
        backend.get_range(key, first + start, view)
        return view

    if (turns := -(-nbytes // CHUNK_NBYTES)) <= 1:
        yield from map(read, range(turns))
        return
    with ThreadPoolExecutor(1, thread_name_prefix="moe-ckpt-read") as ahead:
        waiting = ahead.submit(read, 0)
        for turn in range(turns):
            view = waiting.result()
            if turn + 1 < turns:
                waiting = ahead.submit(read, turn + 1)
            yield view


def scrub_segment(backend: Backend, entry: SegmentEntry) -> None:
    """Read a segment file, whose size the caller has compared with the listing, and check its header, its digest and
    every record's. Raises `Corrupt` if one is damaged (the message names the first defect); `KeyMissing` if the file is
    gone.
    """
    check_header(backend, entry)  # first, so that a file that is no segment is not read to its end
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
    """Read the header of a segment file and compare it with the marker's entry. Raises like `scrub_segment`."""
    # The header's length is in the first eight bytes.
    start = bytearray(min(_LENGTH_NBYTES, entry.nbytes))
    backend.get_range(entry.key, 0, memoryview(start))
    header = bytearray(_LENGTH_NBYTES + header_nbytes(bytes(start), entry.nbytes))
    backend.get_range(entry.key, 0, memoryview(header))
    layout = SegmentLayout.of_header(bytes(header))
    if layout.nbytes != entry.nbytes:
        raise Corrupt(
            f"{entry.key}: its header says {layout.nbytes} bytes, its marker {entry.nbytes}. Another copy may be good."
        )
    expect_places(entry, layout)


def scrub_record(backend: Backend, key: str, record: RecordEntry) -> None:
    """Read one record of a segment in chunks and check its digest. Raises like `scrub_segment`."""
    digest = xxhash.xxh3_128()
    for chunk in read_chunks(backend, key, record.nbytes, first=record.offset):
        digest.update(chunk)
    _expect(f"{key}: {record.name}", digest.hexdigest(), record.digest)


def _feed(
    chunk: memoryview, start: int, records: Sequence[RecordEntry], digests: Sequence[xxhash.xxh3_128], first: int
) -> int:
    """Feed a chunk, which begins at byte `start`, to its records' digests; return the first unfinished record."""
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


def expect_places(entry: SegmentEntry, layout: SegmentLayout) -> None:
    """Raise `Corrupt` if a record is not where its marker says; digests are not looked at."""
    for record in entry.records:
        span = layout.spans.get(record.name)
        place = (record.offset, record.nbytes, dtype_of(record.dtype))
        if span is None or (span.offset, span.nbytes, span.dtype) != place:
            raise Corrupt(f"{entry.key}: {record.name} is not where its marker says.")


def _expect(what: str, found: str, written: str) -> None:
    if found != written:
        raise Corrupt(f"{what}: digest {found}, its marker says {written}. Another copy may be good.")
