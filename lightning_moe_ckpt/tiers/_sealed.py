"""Describe a sealed segment, and the marker over a generation's segments, once for all tiers.

Each tier has a thread of its own. The first thread to ask computes; the other threads wait and take the same value. So
a copy in one tier can be checked against, and mended from, a copy in any other.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native import Ticket
from lightning_moe_ckpt.operators import RecordKind
from lightning_moe_ckpt.policies import Audience
from lightning_moe_ckpt.storage import (
    GenerationId,
    Lineage,
    ModuleEntry,
    ModuleLine,
    RankMarker,
    RecordRows,
    ReferencedEntry,
    SegmentEntry,
    segment_key,
)
from lightning_moe_ckpt.tiers._delta_plan import Gradients

_REMEMBERED = 4
"""Markers kept for tiers that have not asked yet; for a slower tier the marker is made again, with the same bytes."""


class StepRecord(Protocol):
    """Record of the optimizer step that led to a segment."""

    def gradients(self) -> Gradients | None:
        """Return the step's gradients, once copied; `None` if not known for certain. From any thread."""


@dataclass(kw_only=True, eq=False, slots=True)
class SealedFile:
    """File whose bytes are final, or will be when its ticket is done."""

    generation: GenerationId
    rank: int
    step: int
    view: memoryview
    """All bytes of the file; not written to until the generation is released."""
    records: RecordRows
    """Entries of the file's records in the marker, without digests."""
    ticket: Ticket | None = None
    audience: Audience = "durable"
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _entry: SegmentEntry | None = field(default=None, init=False, repr=False)

    def wait(self) -> None:
        """Wait until the bytes are final. Raises `CheckpointError` if the copy failed."""
        if self.ticket is not None:
            self.ticket.wait()

    def digest(self) -> None:
        """Compute the result of `digested`, on a thread of its own; an error is raised by the next `digested`."""
        with suppress(CheckpointError):
            self.digested()

    def digested(self) -> SegmentEntry:
        """Return the file's entry in the marker; the first call waits for the copy and digests, from any thread. Raises
        `CheckpointError` if the copy failed.
        """
        with self._lock:
            if self._entry is None:
                self.wait()
                records, digest = self.records.digested_with_file(self.view)
                self._entry = SegmentEntry(
                    step=self.step,
                    key=segment_key(self.generation, self.rank, self.step, self.audience),
                    nbytes=self.view.nbytes,
                    digest=digest,
                    records=records,
                )
            return self._entry


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SealedSegment:
    """Files written by one boundary, one behind the other, the durable one first."""

    files: Sequence[SealedFile]
    view: memoryview
    """Bytes of all files."""
    step_record: StepRecord | None = None
    """Record of the optimizer step; rebuilds this durable file from the previous boundary's."""
    mirrors: Mapping[int, memoryview] = field(default_factory=dict)
    """Bytes of other ranks' segments captured from the state here, by rank; see `_mirrors`."""
    mirrored: tuple[int, int] | None = None
    """First byte, and the byte after the last, of the run captured by the holders of this rank's copies."""

    @property
    def generation(self) -> GenerationId:
        """Generation that the segment belongs to."""
        return self.files[0].generation

    @property
    def step(self) -> int:
        """Boundary of the segment."""
        return self.files[0].step

    @property
    def ticket(self) -> Ticket | None:
        """Ticket for all copies."""
        return self.files[0].ticket

    def of(self, audiences: Collection[Audience]) -> SealedSegment:
        """Return the part that a tier takes: the durable file, or all."""
        files = [file for file in self.files if file.audience in audiences]
        return replace(self, files=files, view=self.view[: sum(file.view.nbytes for file in files)])

    def digested(self) -> list[SegmentEntry]:
        """Return the files' entries in the marker; see `SealedFile.digested`."""
        return [file.digested() for file in self.files]


class Markers:
    """Make the markers of one rank. Rank 0 is the coordinator, which commits and deletes; its markers have the
    description of the module. That of the policy, in JSON values, is the same on all ranks. `lineage` is the past of
    this incarnation.
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
        self._made: dict[tuple[GenerationId, int, bool], RankMarker] = {}
        """Markers by generation, number of files, and whether they refer to other generations."""

    def of(
        self,
        generation: GenerationId,
        entries: Sequence[SegmentEntry],
        *,
        plan_hash: str,
        plan_json: str,
        unix_time: int = 0,
        referenced: Sequence[ReferencedEntry] = (),
        spares: Sequence[ReferencedEntry] = (),
    ) -> RankMarker:
        """Return the marker of a generation whose segments are all digested, in any order; from any thread.

        The plan's hash is equal on all ranks, or the commit fails; its JSON is kept as `plan` in the marker's policy.
        `unix_time` is the begin of the generation, seconds since 1970, the same for all tiers, however late a tier is.
        Entries of older generations complete this rank's part, and spares are used if a copy turns out bad.
        """
        segments = tuple(sorted(entries, key=lambda entry: entry.step))  # stable: files of one step keep order
        with self._lock:
            key = generation, len(segments), bool(referenced or spares)
            known = self._made.get(key)
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
                unix_time=unix_time,
                referenced=tuple(referenced),
                spares=tuple(spares),
                lineage=self._lineage,
            )
            self._made[key] = marker
            for oldest in list(self._made)[:-_REMEMBERED]:
                del self._made[oldest]
            return marker


def is_partial(stored: Mapping[str, object]) -> bool:
    """Return whether a generation holds some operators only, as far as the plan in its marker's policy can be read."""
    return _stored_plan(stored).get("partial") is True


def is_differential(stored: Mapping[str, object]) -> bool:
    """Return whether a generation is a difference to the step before, by the plan in its marker's policy."""
    steps = _stored_plan(stored).get("steps")
    files = steps[0].get("durable") if isinstance(steps, list) and steps and isinstance(steps[0], dict) else None
    return isinstance(files, dict) and RecordKind.DELTA.value in files


def _stored_plan(policy: Mapping[str, object]) -> dict[str, Any]:
    text = policy.get("plan")
    record = json.loads(text) if isinstance(text, str) else None
    plan = record.get("plan") if isinstance(record, dict) else None
    return plan if isinstance(plan, dict) else {}
