"""Checking every byte of a stored file against what its marker says, in bounded memory.

A restore reads a segment into memory and checks it there. Here the file streams past: its digest and those of its
records are computed on the way, and only its header is kept. What passes here passes there, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage._backend import Backend
from lightning_moe_ckpt.storage._entries import SegmentEntry
from lightning_moe_ckpt.storage._ranges import read_chunks
from lightning_moe_ckpt.storage._record_table import RecordEntry
from lightning_moe_ckpt.storage._segment import SegmentLayout, _rebuild, _split_header, dtype_of, header_nbytes

_LENGTH_NBYTES = 8


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
    """Read one record of a segment, in pieces, and check its digest. Raises as `read_record`."""
    digest = xxhash.xxh3_128()
    for chunk in read_chunks(backend, key, record.nbytes, first=record.offset):
        digest.update(chunk)
    _expect(f"{key}: {record.name}", digest.hexdigest(), record.digest)


def read_record(backend: Backend, key: str, record: RecordEntry, out: memoryview) -> None:
    """Read one record of a segment into `out`, of exactly its size, and check its digest.

    Raises:
        Corrupt: other bytes than written; `out` then holds rubbish.
        KeyMissing: the segment is gone.
    """
    backend.get_range(key, record.offset, out)
    _expect(f"{key}: {record.name}", xxhash.xxh3_128_hexdigest(out), record.digest)


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
    if (record := next(_placed_elsewhere(entry, layout), None)) is not None:
        raise Corrupt(f"{entry.key}: {record.name} is not where its marker says.")


def _placed_elsewhere(entry: SegmentEntry, layout: SegmentLayout) -> Iterator[RecordEntry]:
    for record in entry.records:
        span = layout.spans.get(record.name)
        place = (record.offset, record.nbytes, dtype_of(record.dtype))
        if span is None or (span.offset, span.nbytes, span.dtype) != place:
            yield record


def _expect(what: str, found: str, written: str) -> None:
    if found != written:
        raise Corrupt(f"{what}: digest {found}, its marker says {written}. Another copy may be good.")
