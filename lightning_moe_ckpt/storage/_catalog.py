"""A run's stored objects: generations from one listing of `snap/`, readers of manifests and markers, and the constants.

Constants are parameters that training does not change, stored once and named by every generation. Files of constants are
segments like any other. Their description is a document with a line of records per file, as in a marker. Files and
description are named by their digest, and lie under their incarnation: nobody else writes there, so constants that no
generation names can go as soon as the incarnation is over. Generations name the description in their `policy`, under
`CONSTANTS`; so do later incarnations' generations.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from lightning_moe_ckpt.errors import Corrupt, KeyMissing, NoUsableGeneration
from lightning_moe_ckpt.storage._backend import Backend
from lightning_moe_ckpt.storage._entries import MarkerLines, SegmentEntry
from lightning_moe_ckpt.storage._json import Form, decode, digest_of, encode, keys, many
from lightning_moe_ckpt.storage._markers import Commit, RankMarker, StoredMarker
from lightning_moe_ckpt.storage._names import (
    CONST_PREFIX,
    LOG_PREFIX,
    SNAP_PREFIX,
    GenerationId,
    Receipt,
    commit_key,
    const_key,
    marker_key,
    parse_const_key,
    parse_data_name,
    parse_marker_name,
    parse_receipt_name,
    parse_snap_key,
)

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


class _Description(NamedTuple):
    files: tuple[SegmentEntry, ...]


def put_constants(backend: Backend, generation: GenerationId, files: Sequence[SegmentEntry]) -> str:
    """Store the description of durable files, and return its key."""
    data = constants_bytes(files)
    key = const_key(generation, digest_of(data), "done")
    backend.put(key, data)
    return key


def constants_bytes(files: Sequence[SegmentEntry]) -> bytes:
    """Return the description of constants' files."""
    lines = MarkerLines()
    return b"".join([encode(CONSTANTS, _form(lines).body(_Description(tuple(files)))), *lines.written])


def constants_in(data: bytes, where: str) -> tuple[SegmentEntry, ...]:
    """Return the files described by `constants_bytes`. Raises `Corrupt`."""
    end = data.find(b"\n") + 1
    lines = MarkerLines(data, end)
    described = decode(data[:end], _form(lines), kind=CONSTANTS, where=where)
    lines.end(where)
    return described.files


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


def _form(lines: MarkerLines) -> Form[_Description]:
    return keys(_Description, files=many(lines.segment()))
