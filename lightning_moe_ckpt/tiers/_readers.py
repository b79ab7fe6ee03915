"""Define what all tiers have in common (names, configuration, how recovery reads a copy), and read copies back.

Every tier holds a rank's segments, byte for byte as in storage, and the rank's marker with all digests. So a copy in
any tier can be checked against the marker in any other, and a bad record can be read from elsewhere.

Memory of this node, own or kept for others, is read by `pread`, not through a mapping: a file that shrinks or goes
meanwhile gives an error and not a SIGBUS.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import Corrupt, KeyMissing, StorageError
from lightning_moe_ckpt.launch import RerunRequest
from lightning_moe_ckpt.storage import (
    RING_HEADER_NBYTES,
    Commit,
    GenerationId,
    MemoryMarker,
    RankMarker,
    Resume,
    Retention,
    RingHeader,
    RunStore,
    SegmentEntry,
)
from lightning_moe_ckpt.tiers._holders import FailureDomain
from lightning_moe_ckpt.tiers._ring_state import read_header
from lightning_moe_ckpt.tiers._shm import (
    MemoryName,
    close_shared,
    marker_paths,
    memory_files,
    open_shared,
    read_shared,
    shared_directory,
)

log = rank_logger(__name__)

TierName = Literal["host", "peer", "storage"]
"""Memory of this node, memory of another node, or commits in storage."""
HOST: TierName = "host"
PEER: TierName = "peer"
STORAGE: TierName = "storage"
CHEAPEST: tuple[TierName, ...] = (HOST, PEER, STORAGE)

DEFAULT_MAX_CHUNK = 16 * 2**20
"""Bytes per message. Larger messages gain nothing even on fast networks, and training waits for one at most."""


Elastic = Literal["auto", "refuse"]
"""Answers to a generation that other ranks wrote, or ranks in another layout."""


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Configuration of one incarnation of a run, without the capture policy."""

    url: str
    retention: Retention = field(default_factory=Retention)
    """Rule for the committed generations to keep."""
    resume: Resume = "auto"
    storage_options: Mapping[str, Any] | None = None
    bandwidth: int | None = None
    """Bytes per second that this rank may write to storage; `None` for no cap."""
    replicas: int | Literal["auto"] = "auto"
    """Copies of each rank's generations in memory of other nodes; `auto` is 1 on several nodes, else 0."""
    memory_generations: int | Literal["auto"] = "auto"
    """Generations that memory has room for, 2 or 3; `auto` is 3 where that takes at most half of what is free."""
    redundancy: bool | Literal["auto"] = "auto"
    """Whether holders fill the state shared with an owner from their own memory; `auto` decides by measured speed."""
    max_chunk: int = DEFAULT_MAX_CHUNK
    """Bytes per message of a copy, the same on all ranks."""
    failure_domains: Sequence[FailureDomain] | None = None
    """Node and rack of every rank, by rank; `None` to let each rank detect its own."""
    dense_every_n_steps: int | None = None
    """Steps between dense generations in storage, each with all state of one boundary; `None` for never."""
    commit_timeout: timedelta = timedelta(seconds=120)
    """Longest wait at the end of training for a generation to become durable."""
    overhead_target: float | None = None
    """Share of training time that checkpoints may cost; `None` for as fast as possible."""
    storage_at_least: timedelta = timedelta(minutes=10)
    """Longest time from one generation of a tier to the next, whatever the cost."""
    elastic: Elastic = "auto"
    """Whether generations of other ranks, or of ranks in another layout, are resumed from, or refused."""
    freeze_heap: bool = True
    """Whether the garbage collector may ignore all objects alive as training begins."""
    audit_every_n_steps: int | None = None
    """Steps between audits, each of which says whether generations are good; `None` for none."""
    rerun: RerunRequest | None = None
    """Steps to run again, writing nothing; `None` to train on."""
    densify: str = ""
    """Tag, as of shared memory, of the only run that may be resumed; it ends once dense and stored. Empty to train on."""


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class Holding:
    """Copy of a rank's part of a generation, in a tier."""

    generation: GenerationId
    plan_hash: str
    owner: int
    """Rank whose segments the copy holds."""
    nbytes: int
    """Bytes of all segments together."""
    exact: bool = True
    """Whether the bytes are the owner's, not rebuilt from rounded gradients."""
    whole: bool = True
    """Whether the whole part is there, not some experts only."""
    file: str = ""
    """File name of a copy in memory, different for each copy of the same part."""
    seen: GenerationId | None = field(default=None, compare=False)
    """Newest commit known when the copy in memory was taken."""
    world_size: int = field(default=0, compare=False)
    """Number of ranks that wrote the generation; 0 where it was not looked up."""


class Tier(Protocol):
    """Copies that this process can read without another process's help; `tests/tiers/_contract.py` tests the contract.

    Any thread may read. The caller checks digests: a tier promises nothing about the bytes.
    """

    @property
    def name(self) -> str:
        """Name of the tier: `host`, `peer` or `storage`."""

    def holdings(self) -> list[Holding]:
        """Return every complete copy, newest first; incomplete copies and those of other runs are left out."""

    def read_marker(self, holding: Holding) -> RankMarker:
        """Return a copy's marker. Raises `Corrupt` if the marker is damaged, `KeyMissing` if the copy is gone."""

    def read_into(self, holding: Holding, entry: SegmentEntry, offset: int, out: memoryview) -> None:
        """Fill all of `out` with a segment's bytes from `offset` on, without checking digests, or raise. Raises
        `KeyMissing` if the copy is gone, or has no such bytes; `StorageError` if the copy cannot be read; `Corrupt` if
        the copy is too short.
        """

    def close(self) -> None:
        """Close all files opened for reading; nothing is deleted."""


T = TypeVar("T")

Places = Mapping[str, Sequence[tuple[int, int, int]]]
"""Extents in a ring by file key: first byte of the file, end, and position behind the ring's header."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    memory: Path
    header: RingHeader
    marker: Path
    status: tuple[int, int, int]
    """Inode, size and modification time of the marker's file at parsing."""
    places: Places
    """Extents from the parsed marker."""


class HostTier:
    """Read every ring and replica of the run with `tag` in this node's shared memory, whichever rank owns it; other
    memory is ignored. The directory is by default as in `shared_directory`.
    """

    name = HOST

    def __init__(self, tag: str, directory: Path | None = None) -> None:
        self._tag = tag
        self._directory = directory if directory is not None else shared_directory()
        self._places: dict[Holding, _Place] = {}
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._told: set[Path] = set()

    def holdings(self) -> list[Holding]:
        self.close()  # files may have been replaced since the last call
        for path, name in memory_files(self._directory, self._tag):
            if name.tag == self._tag:
                self._list(path, name)
        return sorted(self._places, reverse=True)

    def read_marker(self, holding: Holding) -> RankMarker:
        return self._of(holding, lambda place: _read_marker(place.marker, place.header).marker)

    def read_into(self, holding: Holding, entry: SegmentEntry, offset: int, out: memoryview) -> None:
        """Fill `out` with a segment's bytes from `offset` on, unchecked. Raises `StorageError`, `KeyMissing`."""
        place, places = self._of(holding, lambda place: (place, _current_places(place)))
        end = offset + out.nbytes
        held = [a - first for first, stop, a in places.get(entry.key, ()) if first <= offset and end <= stop]
        if not held:
            raise KeyMissing(f"{place.memory}: has no {out.nbytes} bytes at {offset} of {entry.key}.")
        _read_fully(self._open(place.memory), RING_HEADER_NBYTES + held[0] + offset, out, place.memory)

    def close(self) -> None:
        self._places = {}
        while self._descriptors:
            close_shared(self._descriptors.popitem()[1])

    # -- private

    def _list(self, path: Path, name: MemoryName) -> None:
        try:
            header = self._header(path)
        except FileNotFoundError:
            return  # gone meanwhile
        except (Corrupt, OSError) as error:
            self._skipped(path, error, logging.INFO)  # its process may have died while making the ring
            return
        for file in marker_paths(path):
            try:
                status = _status(file)
                marker = _read_marker(file, header)
                holding = _holding(marker, name)
            except (_OtherRingError, FileNotFoundError):
                continue  # of an earlier ring, or gone meanwhile
            except (Corrupt, OSError) as error:
                self._skipped(file, error, logging.WARNING)
                continue
            places = marker.places(header)
            place = _Place(memory=path, header=header, marker=file, status=status, places=places)
            self._places[holding] = place

    def _skipped(self, path: Path, error: Exception, level: int) -> None:
        """Log, once per file, that a file cannot be read."""
        if path not in self._told:
            self._told.add(path)
            log.log(level, "%s is skipped: %s Other copies are looked for, in memory and in storage.", path, error)

    def _of(self, holding: Holding, look: Callable[[_Place], T]) -> T:
        """Return `look`'s result for a copy's location. Raises `KeyMissing` if the copy is gone."""
        if (place := self._places.get(holding)) is None:
            raise KeyMissing(f"{self._directory}: no memory of {holding}.")
        try:
            return look(place)
        except FileNotFoundError as error:
            raise KeyMissing(f"{place.marker}: is gone, the memory was filled anew.") from error

    def _header(self, path: Path) -> RingHeader:
        descriptor = self._open(path)
        page = bytearray(RING_HEADER_NBYTES)
        _read_fully(descriptor, 0, memoryview(page), path)
        return read_header(bytes(page), os.fstat(descriptor).st_size, str(path))

    def _open(self, path: Path) -> int:
        with self._lock:  # two threads must not open a file twice: only one descriptor would be closed
            if path not in self._descriptors:
                self._descriptors[path] = open_shared(path)
            return self._descriptors[path]


def _status(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _current_places(place: _Place) -> Places:
    """Return where in memory the generation's files lie now; the marker is parsed again only if it was replaced."""
    if _status(place.marker) == place.status:
        return place.places
    return _read_marker(place.marker, place.header).places(place.header)


class _OtherRingError(Corrupt):
    """A marker of an earlier ring under the same file name."""


def _read_marker(path: Path, header: RingHeader) -> MemoryMarker:
    """Read a marker beside a ring. Raises `Corrupt`, also if the marker belongs to another ring."""
    marker = MemoryMarker.from_bytes(read_shared(path), str(path))
    if marker.ring != header.nonce:
        raise _OtherRingError(f"{path}: speaks of a ring that is not there any more.")
    try:
        marker.places(header)
    except LookupError as error:
        raise Corrupt(f"{path}: speaks of {error}, which the ring does not have.") from error
    return marker


def _holding(file: MemoryMarker, name: MemoryName) -> Holding:
    marker = file.marker
    if marker.rank != name.owner:
        raise Corrupt(f"{name}: holds rank {marker.rank}. Another copy may be good.")
    return Holding(
        generation=marker.generation,
        plan_hash=marker.plan_hash,
        owner=marker.rank,
        nbytes=sum(segment.nbytes for segment in marker.segments),
        exact=not marker.rounded,
        whole=not file.experts,
        file=str(name),
        seen=file.seen,
        world_size=marker.world_size,
    )


def _read_fully(descriptor: int, start: int, out: memoryview, path: Path) -> None:
    done = 0
    while done < out.nbytes:
        try:
            count = os.preadv(descriptor, [out[done:]], start + done)
        except OSError as error:
            raise StorageError(
                f"{path}: cannot be read at {start + done} ({error}). Another copy may be good."
            ) from error
        if count == 0:
            raise StorageError(f"{path}: ends at {start + done}. Another copy may be good.")
        done += count


class ObjectTier:
    """Read generations of every rank, whole or by range; of commits that may be restored, as the coordinator found them."""

    name = STORAGE

    def __init__(self, store: RunStore, commits: Sequence[Commit]) -> None:
        self._store = store
        self._commits = {commit.generation: commit for commit in commits}

    def holdings(self) -> list[Holding]:
        """Return one copy per rank and commit, newest first. No bytes are read; `nbytes` is an equal share per rank."""
        return [
            Holding(
                generation=generation,
                plan_hash=commit.plan_hash,
                owner=owner,
                nbytes=commit.nbytes // commit.world_size,
                world_size=commit.world_size,
            )
            for generation, commit in sorted(self._commits.items(), reverse=True)
            for owner in range(commit.world_size)
        ]

    def read_marker(self, holding: Holding) -> RankMarker:
        """Return the marker. Raises `Corrupt` if its digest is not the manifest's, `KeyMissing` if the marker is gone."""
        commit = self._commits.get(holding.generation)
        if commit is None or holding.owner >= commit.world_size:
            raise KeyMissing(f"{self._store.url}: no commit of {holding}.")
        return self._store.read_marker(commit, holding.owner)

    def read_into(self, holding: Holding, entry: SegmentEntry, offset: int, out: memoryview) -> None:
        """Fill `out` with a range of the object."""
        self._store.read_range(entry, offset, out)

    def close(self) -> None:
        """Do nothing: the store belongs to the caller."""
