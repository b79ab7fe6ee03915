"""A sealed segment and the marker over a generation's segments, as every tier keeps them: digested once, made once.

Each tier has a thread of its own. Whichever asks first computes, the others wait for it and take the same value; so a
copy in one tier can be checked against, and mended from, a copy in any other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native import Ticket
from lightning_moe_ckpt.storage import (
    BorrowedEntry,
    GenerationId,
    Lineage,
    ModuleEntry,
    ModuleLine,
    RankMarker,
    RecordRows,
    SegmentEntry,
    digest_of,
    segment_key,
)
from lightning_moe_ckpt.tiers import Gradients

K = TypeVar("K")
T = TypeVar("T")

_REMEMBERED = 4
"""Markers kept for tiers that have not asked yet; a slower one has its own made again, with the same bytes."""
_REMEMBERED_TIMES = 1000
"""Generations that the slowest tier may be behind for that; later only the time differs, which no reader compares."""


class RecordDigests:
    """Digests of the records of one segment, computed when they are first wanted, on whatever thread.

    Args:
        records: of the segment.
        view: all its bytes, which are final before `all` is called.
    """

    def __init__(self, records: RecordRows, view: memoryview) -> None:
        self._records, self._view = records, view
        self._lock = threading.Lock()
        self._found: list[str] | None = None

    def all(self) -> list[str]:
        """In the order of the records."""
        with self._lock:
            if self._found is None:
                self._found = self._records.digests(self._view)
            return self._found


class StepRecord(Protocol):
    """What the optimizer step that led to a segment has consumed."""

    def gradients(self) -> Gradients | None:
        """As they were; waits until they are copied, from any thread. `None` if they are not known for certain."""


@dataclass(kw_only=True, eq=False, slots=True)
class SealedSegment:
    """A segment whose bytes are final, or will be when its ticket is done."""

    generation: GenerationId
    rank: int
    step: int
    view: memoryview
    """All bytes of the file; not written to until the generation is released."""
    records: RecordRows
    """What the marker says of its records, but for their digests."""
    ticket: Ticket | None = None
    persisted: SealedSegment | None = None
    """The file within it that goes to storage, where that is not all of it."""
    step_record: StepRecord | None = None
    """From which it can be rebuilt by who has the segment of the boundary before."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _entry: SegmentEntry | None = field(default=None, init=False, repr=False)
    shared: RecordDigests | None = None
    """Where its records are digested once, together with those of the segment that it is within."""
    places: Sequence[int] = ()
    """Of its records there."""

    def wait(self) -> None:
        """Until its bytes are final. Raises `CheckpointError` if the copy failed."""
        if self.ticket is not None:
            self.ticket.wait()

    def digest(self) -> None:
        """As `digested`, for a thread of its own: what goes wrong is raised by the next `digested`."""
        with suppress(CheckpointError):
            self.digested()

    def digested(self) -> SegmentEntry:
        """What the marker says of it; the first call waits for the copy and digests, from any thread.

        Raises:
            CheckpointError: the copy failed.
        """
        with self._lock:
            if self._entry is None:
                self._entry = self._digest()
            return self._entry

    def _digest(self) -> SegmentEntry:
        self.wait()
        return SegmentEntry(
            step=self.step,
            key=segment_key(self.generation, self.rank, self.step),
            nbytes=self.view.nbytes,
            digest=digest_of(self.view),
            records=self.records.with_digests(self._record_digests()),
        )

    def _record_digests(self) -> list[str]:
        if self.shared is None:
            return self.records.digests(self.view)
        known = self.shared.all()
        return [known[place] for place in self.places]


class Markers:
    """Makes the markers of one rank.

    Args:
        run_id: of the run in storage.
        rank: this rank; rank 0 is the coordinator, which commits and deletes.
        world_size: ranks whose markers a commit needs.
        policy: what the markers say of the policy, the same on all ranks; JSON values.
        module: what the marker of rank 0 says of the module.
        lineage: what it says of this life's past.
    """

    def __init__(
        self,
        *,
        run_id: str,
        rank: int,
        world_size: int,
        policy: Mapping[str, object] | None = None,
        module: ModuleEntry | None = None,
        lineage: Lineage | None = None,
    ) -> None:
        self.run_id, self.rank, self.world_size = run_id, rank, world_size
        self._policy = dict(policy or {})
        self._lineage = lineage
        self._module = None if module is None else ModuleLine.of(module)  # spelled once, not per generation
        self._lock = threading.Lock()
        self._made: dict[tuple[GenerationId, str], RankMarker] = {}
        self._times: dict[GenerationId, int] = {}

    def of(
        self,
        generation: GenerationId,
        entries: Sequence[SegmentEntry],
        *,
        plan_hash: str,
        plan_json: str,
        borrowed: Sequence[BorrowedEntry] = (),
        spares: Sequence[BorrowedEntry] = (),
    ) -> RankMarker:
        """The marker of a generation whose segments are all digested; from any thread.

        Args:
            generation: its name.
            entries: of all its segments, in any order.
            plan_hash: equal on all ranks, or the commit fails.
            plan_json: kept as `plan` in the marker's policy.
            borrowed: what older generations hold of this rank's part.
            spares: what they hold besides, for what turns out bad.
        """
        segments = tuple(sorted(entries, key=lambda entry: entry.step))
        with self._lock:
            known = self._made.get((generation, plan_hash))
            if known is not None and [e.digest for e in known.segments] == [e.digest for e in segments]:
                return known
            marker = RankMarker(
                run_id=self.run_id,
                rank=self.rank,
                world_size=self.world_size,
                generation=generation,
                plan_hash=plan_hash,
                segments=segments,
                policy={**self._policy, "plan": plan_json},
                module=self._module,
                unix_time=self._times.setdefault(generation, int(time.time())),
                borrowed=tuple(borrowed),
                spares=tuple(spares),
                lineage=self._lineage,
            )
            self._made[generation, plan_hash] = marker
            _forget(self._made, _REMEMBERED)
            _forget(self._times, _REMEMBERED_TIMES)
            return marker


def _forget(remembered: dict[K, T], limit: int) -> None:
    """Leave the `limit` newest entries."""
    for oldest in list(remembered)[:-limit]:
        del remembered[oldest]
