"""Make generations durable while training goes on: the tier that survives everything.

Wait for the copy, digest every record and the whole file, store. After a generation's last segment this rank's marker
is stored; then, on the coordinator, come the commit over all ranks, and retention. Complete means committed on the
coordinator, and "my part is stored" on all other ranks.

A *scrubber* reads referenced files again while training goes on, to find a flipped bit while there is a second copy.
Each rank reads the records in older files named by its own newest marker, referenced ones and spares, so every file has
one reader. It reads slowly, on a thread of its own, round after round. All ranks learn of bad copies at the next
window: the experts are taken again, and their bad copies are not referenced any more.

Invariants: a marker is stored only after every segment it names, a commit only after every marker. Only records that
the newest marker still names are called bad; all other records may be deleted at any time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import xxhash
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.errors import CheckpointError, Corrupt, KeyMissing, StorageError
from lightning_moe_ckpt.process import guard_forks
from lightning_moe_ckpt.storage import (
    GenerationId,
    Pace,
    RankMarker,
    RecordEntry,
    ReferencedEntry,
    Retention,
    RunStore,
    SegmentEntry,
    carry_forward,
    carry_spares,
    full_records,
    segment_key,
)
from lightning_moe_ckpt.tiers._readers import STORAGE
from lightning_moe_ckpt.tiers._sealed import Markers, SealedSegment
from lightning_moe_ckpt.tiers._tier_worker import Base, References, TierWorker, WriteJob

log = rank_logger(__name__)

_BASES = 4
"""Generations whose markers are kept; the generation agreed on by all ranks is one of the two newest."""


class PersistWorker(TierWorker):
    """Take sealed segments of one rank and make their generations durable; `retention` says which committed ones to
    keep. The coordinator waits for other ranks up to `commit_timeout`.

    A generation with only some operators references older files for the rest. If such files turn out to be gone,
    `lost_base` is set, and the next generation must be whole. Where experts are taken in turns, markers also name the
    last copy but one of this rank's `duplicated` operators.
    """

    uses_references = True
    audiences = frozenset({"durable"})

    def __init__(
        self,
        store: RunStore,
        markers: Markers,
        *,
        retention: Retention,
        on_complete: Callable[[GenerationId], None] | None = None,
        commit_timeout: timedelta = timedelta(minutes=2),
        duplicated: Collection[str] = (),
    ) -> None:
        super().__init__(STORAGE, markers, on_complete=on_complete)
        self._store, self._rank = store, markers.rank
        self._retention = retention
        self._commit_timeout, self._duplicated = commit_timeout, frozenset(duplicated)
        self._bases: dict[GenerationId, RankMarker] = {}
        """This rank's markers of its newest stored generations; later partial generations reference their records."""
        self.audited: int | None = None
        """Step of the last clean audit: the newest generation up to there stays; `None` without audits."""
        self._agreed: GenerationId | None = None
        """Newest generation known to be committed."""

    def build_on(self, marker: RankMarker) -> None:
        """Let later generations reference an earlier incarnation's commit; `marker` is this rank's."""
        self._bases[marker.generation] = marker
        self._agreed = marker.generation

    @override
    def complete_everywhere(self, generation: GenerationId) -> None:
        self._agreed = generation

    def scrub(self) -> Scrubber:
        """Start to read again the older records named by this rank's newest marker, and return the reader."""
        scrubber = Scrubber(self._store.read_range, lambda: self.newest_marker)
        scrubber.start()
        return scrubber

    @property
    def newest_marker(self) -> RankMarker | None:
        """This rank's marker of the newest generation that it stored or may reference; from any thread."""
        bases = list(self._bases.items())
        return max(bases, key=lambda base: base[0])[1] if bases else None

    def marker_of(self, generation: GenerationId) -> RankMarker | None:
        """Return this rank's marker of a generation; `None` unless among the newest stored. From any thread."""
        return self._bases.get(generation)

    @override
    def give_up(self, generation: GenerationId) -> None:
        self.abandon(generation)  # the coordinator may be waiting for a marker that never comes

    @override
    def _interrupt(self) -> None:
        self._store.close()

    @override
    def _put(self, job: WriteJob, segment: SealedSegment) -> list[SegmentEntry]:
        (file,) = segment.files
        file.wait()
        digests = threading.Thread(target=file.digest, name="moe-ckpt-digest", daemon=True)
        digests.start()  # beside the write, which takes as long or longer: neither holds the interpreter lock
        try:
            self._store.put_segment(job.generation, self._rank, file.step, file.view)
        finally:
            digests.join()  # the thread reads the segment's memory, which is given back after this
        # Differences with files of their own in memory are stored together, in the generation of the last one.
        key = segment_key(job.generation, self._rank, file.step)
        return [each if each.key == key else replace(each, key=key) for each in segment.digested()]

    @override
    def _references(self, job: WriteJob) -> References:
        if job.request.follows:
            return self._chain(job.request.follows), ()
        base = job.request.base or Base(generation=self._agreed, missing=frozenset())
        marker = None if base.generation is None else self._bases.get(base.generation)
        if marker is None:
            if base.missing:
                self.lost_base = True
                raise CheckpointError(
                    "it has only some experts, and storage has no whole generation of this run to take the others from."
                )
            return (), ()
        if len(marker.steps) != 1 or not (base.missing or self._duplicated):
            return (), ()  # A marker of several steps has no states of one step to reference.
        bad = job.request.bad
        referenced = carry_forward(marker, base.missing, bad)
        gone = {record.operator for _, record in full_records(marker)} & base.missing
        gone -= {record.operator for entry in referenced for record in entry.segment.records}
        if gone:
            self.lost_base = True
            raise CheckpointError(
                f"storage has no good copy of {', '.join(sorted(gone))}, which it was to take from there."
            )
        return referenced, carry_spares(marker, base.missing, self._duplicated - base.missing, bad)

    def _chain(self, follows: Sequence[GenerationId]) -> tuple[ReferencedEntry, ...]:
        """Return the entries of a difference's predecessors. Raises `CheckpointError` if one is not stored."""
        if lacking := [generation for generation in follows if generation not in self._bases]:
            raise CheckpointError(f"it follows on {lacking[0]}, which is not stored.")
        entries = [(generation, segment) for generation in follows for segment in self._bases[generation].segments]
        return tuple(ReferencedEntry(generation=each, segment=segment) for each, segment in entries)

    @override
    def _finish(self, job: WriteJob, marker: RankMarker) -> None:
        self._release(job)  # storage has the bytes; other ranks may take long
        self._store.put_marker(marker)
        if self._rank == 0:
            try:
                self._store.commit(marker, timeout=self._commit_timeout, cancelled=lambda: not self._wanted(job))
            except Corrupt:
                # The next generation would reference the same records, and be refused for the same reason.
                self.lost_base = job.request.base is not None
                raise
            try:
                self._store.retain(self._retention, self.audited)
            except CheckpointError as error:  # harms nothing that is committed; the next call goes on from there
                self._note(job.generation, f"committed, but older ones could not be deleted: {error}", error)
        self._bases[job.generation] = marker
        # The generation agreed on may be older than many that are whole here: other ranks may have failed at those.
        agreed = {self._agreed, *job.request.follows}
        agreed.add(None if job.request.base is None else job.request.base.generation)
        for oldest in sorted(self._bases.keys() - agreed)[:-_BASES]:
            del self._bases[oldest]
        nbytes = sum(entry.nbytes for entry in job.entries)
        log.info("%s is durable: %s, read and written in %.2f s", job.generation, size_text(nbytes), job.seconds)


# -- reading again

NBYTES_PER_SECOND = 16 * 2**20
"""Reading speed of one rank: a hundredth of a current disk's, and a TiB in less than a day."""
_CHUNK_NBYTES = 2**20
_PAUSE_SECONDS = 60.0
"""Pause between two rounds; a round is short if little is referenced."""
_JOIN_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class BadCopy:
    """Damaged or missing copy of an operator in storage."""

    operator: str
    generation: GenerationId
    """Generation whose file has the copy."""
    spared: bool = True
    """Whether the marker names another copy of the operator."""


class Scrubber:
    """Read one rank's share of older files by `read`, at no more than `bandwidth` bytes per second; see `RunStore.read_range`.
    `newest` returns this rank's newest marker in storage; called from any thread.
    """

    def __init__(
        self,
        read: Callable[[SegmentEntry, int, memoryview], None],
        newest: Callable[[], RankMarker | None],
        *,
        bandwidth: int = NBYTES_PER_SECOND,
    ) -> None:
        self._read, self._newest, self._pace = read, newest, Pace(bandwidth)
        self._found: deque[BadCopy] = deque()
        self._known: set[tuple[str, GenerationId]] = set()
        self._marker: RankMarker | None = None
        self._copies: set[tuple[str, GenerationId]] = set()
        """Operators named by the newest marker, each with the generation of the file with its copy."""
        self._closing = threading.Event()
        self._said = ""
        """Failure of the last round, logged once."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the reading thread."""
        guard_forks()
        self._thread = threading.Thread(target=self._serve, name="moe-ckpt-scrub", daemon=True)
        self._thread.start()

    def take_found(self, most: int) -> list[BadCopy]:
        """Return at most `most` bad copies that were not taken yet; takes constant time."""
        return [self._found.popleft() for _ in range(min(most, len(self._found)))]

    def close(self) -> None:
        """End the thread; a read under way may go on for a moment."""
        self._closing.set()
        self._pace.close()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
            self._thread = None

    def round(self) -> int:
        """Read all records in older files that the newest marker names, once. Returns bytes read. Raises `StorageError`
        if the medium failed, which says nothing about the bytes; all other files were read.
        """
        nbytes = 0
        unread: dict[str, StorageError] = {}
        for generation, file, record in _named(self._newest()):
            copy = record.operator, generation
            if copy in self._known or file.key in unread or not self._is_named(copy):
                continue
            try:
                reason = self._what_is_wrong(file, record)
            except StorageError as error:
                if self._closing.is_set():
                    raise
                unread[file.key] = error
                continue
            nbytes += record.nbytes
            if reason and self._is_named(copy):
                self._known.add(copy)
                others = {at for name, at in self._copies if name == record.operator}
                self._found.append(BadCopy(record.operator, generation, spared=others != {generation}))
                log.warning("%s: its copy of %s is bad; it is taken again: %s", record.operator, generation, reason)
        if unread:
            raise next(iter(unread.values()))
        return nbytes

    # -- private

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                self.round()
            except CheckpointError as error:
                if not self._closing.is_set() and str(error) != self._said:
                    self._said = str(error)
                    log.warning("some of what is referenced could not be read again, and is tried on: %s", error)
            except BaseException:  # thread entry: nothing above would see it
                log.exception("what is referenced is not read again any more")
                return
            self._closing.wait(_PAUSE_SECONDS)

    def _is_named(self, copy: tuple[str, GenerationId]) -> bool:
        if (marker := self._newest()) is not self._marker:
            self._marker = marker
            self._copies = {(record.operator, generation) for generation, _, record in _named(marker)}
        return copy in self._copies

    def _what_is_wrong(self, file: SegmentEntry, record: RecordEntry) -> str:
        """Return why a record is bad; empty if the record is intact."""
        digest, chunk = xxhash.xxh3_128(), bytearray(min(self._pace.chunk_nbytes(_CHUNK_NBYTES), max(record.nbytes, 1)))
        try:
            for start in range(0, record.nbytes, len(chunk)):
                view = memoryview(chunk)[: record.nbytes - start]
                self._pace.wait(view.nbytes)
                self._read(file, record.offset + start, view)
                digest.update(view)
        except (Corrupt, KeyMissing) as error:
            return str(error)
        return "" if digest.hexdigest() == record.digest else f"{file.key}: {record.name} is not what was written"


def _named(marker: RankMarker | None) -> Iterator[tuple[GenerationId, SegmentEntry, RecordEntry]]:
    """Yield the records in older files that a marker names."""
    for each in () if marker is None else (*marker.referenced, *marker.spares):
        for record in each.segment.records:
            yield each.generation, each.segment, record
