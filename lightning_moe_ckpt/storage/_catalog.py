"""A run's stored objects: generations from one listing of `snap/`, readers of manifests and markers, constants, scrubs.

Constants are parameters that training does not change, stored once and named by every generation. Files of constants are
segments like any other. Their description is a document with a line of records per file, as in a marker. Files and
description are named by their digest, and lie under their incarnation: nobody else writes there, so constants that no
generation names can go as soon as the incarnation is over. Generations name the description in their `policy`, under
`CONSTANTS`; so do later incarnations' generations.

A restore reads a segment into memory and checks it there. A scrub streams the file in bounded memory: it computes the
digests of file and records on the way and keeps only the header. Both checks accept the same files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import xxhash

from lightning_moe_ckpt.errors import Corrupt, KeyMissing, NoUsableGeneration
from lightning_moe_ckpt.storage._backend import Backend
from lightning_moe_ckpt.storage._entries import MarkerLines, RecordEntry, SegmentEntry
from lightning_moe_ckpt.storage._json import decode, digest_of, encode, keys, many
from lightning_moe_ckpt.storage._markers import Commit, RankMarker, StoredMarker
from lightning_moe_ckpt.storage._names import (
    CONST_PREFIX,
    LOG_PREFIX,
    SNAP_PREFIX,
    GenerationId,
    Receipt,
    commit_key,
    marker_key,
    parse_const_key,
    parse_data_name,
    parse_marker_name,
    parse_receipt_name,
    parse_snap_key,
)
from lightning_moe_ckpt.storage._segment import SegmentLayout, dtype_of, header_nbytes

CONSTANTS = "constants"
"""Key of the constants' description in a policy; absent without constants."""


class Contents:
    """Stored objects of a generation: all are in `first`, bytes by key, unless `backend` is given to list them on demand."""

    def __init__(self, generation: GenerationId, backend: Backend | None = None) -> None:
        self.generation, self.backend = generation, backend
        self.first: dict[str, int] = {}

    @property
    def committed(self) -> bool:
        """Whether a listing of generations had a `_COMMITTED` object, readable or not."""
        return commit_key(self.generation) in self.first

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Bytes by key."""
        if self.backend is not None:
            listed = self.backend.list(self.generation.prefix)
            return {each.key: each.nbytes for each in listed if parse_snap_key(each.key) is not None}
        return self.first

    @cached_property
    def ranks(self) -> set[int]:
        """Ranks with a stored marker."""
        return {rank for name in self.names if (rank := parse_marker_name(name)) is not None}

    @cached_property
    def receipts(self) -> Mapping[int, Receipt]:
        """Receipts by rank; several of a rank say nothing."""
        found = [each for name in self.names if (each := parse_receipt_name(name)) is not None]
        alone = {each.rank: each for each in found}
        return alone if len(alone) == len(found) else {}

    @property
    def names(self) -> list[str]:
        """Last parts of the keys."""
        return [key[len(self.generation.prefix) :] for key in self.sizes]


Catalog = Mapping[GenerationId, Contents]

_PAGE = 1000
"""Objects of a request; a run of few ranks has no more."""


def read_catalog(backend: Backend) -> Catalog:
    """List the generations, and whether they are committed, in a request for each at most; foreign names are ignored.

    Objects of a large generation are listed on demand, anew for each catalog: files may have been lost.
    """
    catalog: dict[GenerationId, Contents] = {}
    after, is_end = "", False
    while not is_end:
        page = backend.list(SNAP_PREFIX, after, _PAGE)
        is_end = len(page) < _PAGE
        for entry in page:
            if (place := parse_snap_key(entry.key)) is not None:
                catalog.setdefault(place[0], Contents(place[0])).first[entry.key] = entry.nbytes
            after = entry.key
        if not is_end and place is not None:  # go on behind the generation, of which the page has the first objects
            catalog[place[0]].backend, after = backend, max(after, f"{place[0].prefix}z")
    return catalog


def read_commit(backend: Backend, generation: GenerationId, run_id: str | None = None) -> Commit:
    """Read a manifest. Raises `Corrupt` if damaged, or of another generation or run; `KeyMissing` if deleted."""
    key = commit_key(generation)
    commit = Commit.from_bytes(backend.get(key), key)
    if commit.generation != generation or run_id not in {None, commit.run_id}:
        raise Corrupt(f"{key}: belongs to {commit.generation} of run {commit.run_id}. It is skipped.")
    return commit


def run_reader(backend: Backend) -> Callable[[GenerationId], str | None]:
    """Return a function from a generation to its run's name, `None` if the manifest is damaged or missing.

    The function reads each manifest once, and raises `StorageError` if the medium fails.
    """
    read = cache(lambda generation: read_commit(backend, generation).run_id)

    def run_of(generation: GenerationId) -> str | None:
        try:
            return read(generation)
        except (Corrupt, KeyMissing):
            return None

    return run_of


def read_marker(backend: Backend, generation: GenerationId, rank: int) -> StoredMarker:
    """Read a marker. Raises `Corrupt` if damaged, or of another generation or rank; `KeyMissing` if deleted."""
    key = marker_key(generation, rank)
    data = backend.get(key)
    marker = RankMarker.from_bytes(data, key)
    if (marker.generation, marker.rank) != (generation, rank):
        raise Corrupt(f"{key}: is the marker of rank {marker.rank} for {marker.generation}. It is skipped.")
    return StoredMarker(marker, digest_of(data))


def read_committed_marker(backend: Backend, commit: Commit, rank: int) -> RankMarker:
    """Read a rank's marker. Raises `Corrupt` if the manifest has another digest; `KeyMissing` if the marker was deleted."""
    stored = read_marker(backend, commit.generation, rank)
    if stored.digest != commit.markers[rank]:
        raise Corrupt(f"{marker_key(commit.generation, rank)}: is not the marker that was committed.")
    return stored.marker


def missing_objects(marker: RankMarker, contents: Contents) -> list[str]:
    """Return the keys of the marker's files that the listing lacks, or shows with another size."""
    return [segment.key for segment in marker.segments if contents.sizes.get(segment.key) != segment.nbytes]


def missing_parts(commit: Commit, contents: Contents) -> str | None:
    """Return a text on a committed generation's missing parts in the listing; `None` if all are there."""
    if absent := sorted(set(range(commit.world_size)) - contents.ranks):
        return f"markers of ranks {absent[:8]} are missing"
    # An abandoned window may have left segments of other steps beside a generation of its last step.
    steps = zip(map(parse_data_name, contents.names), contents.sizes.values(), strict=True)
    if (nbytes := sum(size for step, size in steps if step in commit.steps)) != commit.nbytes:
        return f"{nbytes} of {commit.nbytes} bytes of segments are there"
    return None


def delete_generation(backend: Backend, contents: Contents) -> None:
    """Delete a generation with its leftovers, manifest first: readers must never see a manifest without files."""
    files = [key for key in contents.sizes if key.endswith(".safetensors")]
    backend.delete(*contents.sizes.keys() & {commit_key(contents.generation)})
    backend.delete(*contents.sizes.keys() - {commit_key(contents.generation), *files})  # markers and receipts
    backend.delete(*files)
    backend.sweep(contents.generation.prefix)


_NAMED = 4


def nothing_at(url: str) -> str:
    """Return a message that there is no run at `url`, with the contents of a local folder."""
    folder = Path(url.removeprefix("file://"))
    if not url.startswith("file://"):
        return f"{url} holds no run. Check the URL."
    if not folder.is_dir():
        return (
            f"{url} holds no run: {'it is a file' if folder.exists() else 'there is no such folder'}. Check the path."
        )
    if not (names := sorted(path.name for path in folder.iterdir())):
        return f"{url} holds no run: the folder is empty. A run stores something there as soon as training begins."
    below = sorted(str(path.parent) for path in (*folder.glob(f"*/{LOG_PREFIX}"), *folder.glob(f"*/*/{LOG_PREFIX}")))
    if below:
        return f"{url} holds no run itself, folders below it do: {_named(below)}. Give one of these."
    return f"{url} holds no run, but other files: {_named(names)}. Check the path."


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def expect_folder(backend: Backend) -> None:
    """Raise `NoUsableGeneration` if the path is a file, where a listing could only fail."""
    # Not `Path.is_file`, which raises for a path that is too long; the listing reports that better.
    if backend.url.startswith("file://") and os.path.isfile(backend.url.removeprefix("file://")):  # noqa: PTH113
        raise NoUsableGeneration(nothing_at(backend.url))


def constants_bytes(files: Sequence[SegmentEntry]) -> bytes:
    """Return the description of constants' files."""
    lines = MarkerLines()
    return b"".join([encode(CONSTANTS, {"files": many(lines.segment()).body(tuple(files))}), *lines.written])


def constants_in(data: bytes, where: str) -> tuple[SegmentEntry, ...]:
    """Return the files described by `constants_bytes`. Raises `Corrupt`."""
    end = data.find(b"\n") + 1
    lines = MarkerLines(data, end)
    described = decode(data[:end], keys(dict[str, Any], files=many(lines.segment())), kind=CONSTANTS, where=where)
    lines.end(where)
    return tuple(described["files"])


def read_constants(backend: Backend, policy: Any) -> tuple[SegmentEntry, ...]:
    """Return a policy's files of constants with their records, if any. Raises `Corrupt`, `KeyMissing` of the description."""
    if (key := policy.get(CONSTANTS)) is None:
        return ()
    place = parse_const_key(str(key))
    data = backend.get(key) if place is not None else b""
    if place is None or digest_of(data) != place[1]:
        raise Corrupt(f"{key}: does not describe the constants that the generation was taken with.")
    return constants_in(data, key)


def sweep_constants(backend: Backend, catalog: Catalog, *, incarnation: int) -> int:
    """Delete constants that no manifest names, and return their bytes; nothing if some manifest cannot be read.

    Those from `incarnation` on stay: they may be about to be named.
    """
    places = [(each, place) for each in backend.list(CONST_PREFIX) if (place := parse_const_key(each.key)) is not None]
    if not (old := [each for each, place in places if place[0] < incarnation]):
        return 0
    named: set[str] = set()
    try:
        for generation in (each for each, contents in catalog.items() if contents.committed):
            if CONSTANTS in (policy := read_commit(backend, generation).policy):
                named |= {str(policy[CONSTANTS]), *(constant.key for constant in read_constants(backend, policy))}
    except (Corrupt, KeyMissing):
        return 0
    doomed = [each for each in old if each.key not in named]
    for described in (True, False):  # the description first
        backend.delete(*(each.key for each in doomed if each.key.endswith(".done") == described))
    return sum(each.nbytes for each in doomed)


# -- segments against their markers

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
