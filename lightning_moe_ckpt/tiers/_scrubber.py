"""Read referenced files again while training goes on, to find a flipped bit while there is a second copy.

Each rank reads the records in older files named by its own newest marker, referenced ones and spares, so every file has
one reader. It reads slowly, on a thread of its own, round after round. All ranks learn of bad copies at the next
window: the experts are taken again, and their bad copies are not referenced any more.

Invariant: only records that the newest marker still names are called bad. All other records may be deleted at any time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import xxhash

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import CheckpointError, Corrupt, KeyMissing, StorageError
from lightning_moe_ckpt.process import guard_forks
from lightning_moe_ckpt.storage import GenerationId, Pace, RankMarker, RecordEntry, SegmentEntry

log = rank_logger(__name__)

NBYTES_PER_SECOND = 16 * 2**20
"""Reading speed of one rank: a hundredth of a current disk's, and a TiB in less than a day."""
_CHUNK_NBYTES = 2**20
_PAUSE_SECONDS = 60.0
"""Pause between two rounds; a round is short if little is referenced."""
_JOIN_SECONDS = 4.0


class SegmentFiles(Protocol):
    """Source of files, such as `RunStore`."""

    def read_range(self, entry: SegmentEntry, start: int, out: memoryview) -> None:
        """Fill `out` with bytes of a segment."""


@dataclass(frozen=True, slots=True)
class BadCopy:
    """Damaged or missing copy of an operator in storage."""

    operator: str
    generation: GenerationId
    """Generation whose file has the copy."""
    spared: bool = True
    """Whether the marker names another copy of the operator."""


class Scrubber:
    """Read one rank's share of older files.

    Args:
        files: source of the files.
        newest: returns this rank's newest marker in storage; called from any thread.
        bandwidth: most bytes per second.
    """

    def __init__(
        self, files: SegmentFiles, newest: Callable[[], RankMarker | None], *, bandwidth: int = NBYTES_PER_SECOND
    ) -> None:
        self._files, self._newest, self._pace = files, newest, Pace(bandwidth)
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
        """Read all records in older files that the newest marker names, once.

        Returns:
            Bytes read.

        Raises:
            StorageError: the medium failed, which says nothing about the bytes; all other files were read.
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
        marker = self._newest()
        if marker is not self._marker:
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
                self._files.read_range(file, record.offset + start, view)
                digest.update(view)
        except (Corrupt, KeyMissing) as error:
            return str(error)
        return "" if digest.hexdigest() == record.digest else f"{file.key}: {record.name} is not what was written"


def _named(marker: RankMarker | None) -> Iterator[tuple[GenerationId, SegmentEntry, RecordEntry]]:
    """Yield the records in older files that a marker names."""
    for each in () if marker is None else (*marker.referenced, *marker.spares):
        for record in each.segment.records:
            yield each.generation, each.segment, record
