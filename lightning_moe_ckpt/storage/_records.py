"""What markers and manifests say: segments, one rank's marker, and the commit over all ranks.

A commit is computed from the markers alone, so whoever writes it (the coordinator, its retry, or the next life that
promotes a generation) writes the same bytes. Coordinates are global: another number of ranks can read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage._digest import DIGEST_NAME, digest_of
from lightning_moe_ckpt.storage._json import Fields, decode, encode, read_integer, read_text
from lightning_moe_ckpt.storage._module import ModuleLine
from lightning_moe_ckpt.storage._names import GenerationId, marker_key, overflow_key, segment_key
from lightning_moe_ckpt.storage._record_table import RECORD_COLUMNS, RecordEntry, RecordTable


@dataclass(frozen=True, kw_only=True, slots=True)
class OverflowEntry:
    """A side file of a segment, for what did not fit into its journal record."""

    key: str
    nbytes: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentEntry:
    """One segment file as its rank wrote it."""

    step: int
    """Boundary at which it was captured."""
    key: str
    nbytes: int
    digest: str
    """Of the whole file."""
    records: Sequence[RecordEntry] = ()
    side_file: OverflowEntry | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMarker:
    """One rank's statement that all its segments of a generation are durable."""

    run_id: str
    rank: int
    world_size: int
    generation: GenerationId
    plan_hash: str
    segments: tuple[SegmentEntry, ...]
    """In step order."""
    policy: Mapping[str, object] = field(default_factory=dict)
    """What the session needs to understand the generation: JSON values with string keys, equal on all ranks."""
    module: ModuleLine | None = None
    """What was trained; rank 0 says it for all."""
    unix_time: int = 0
    """Seconds since 1970 by the clock of this rank; for retention by age, nothing else."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the segments."""
        return tuple(segment.step for segment in self.segments)

    def to_bytes(self) -> bytes:
        """The object as it is stored: a document, then a line of records per segment, then one about the module."""
        tables = [RecordTable.of(segment.records) for segment in self.segments]
        module = b"" if self.module is None else self.module.line
        return b"".join([encode("marker", _marker_body(self, tables)), *(table.line for table in tables), module])

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> RankMarker:
        """Read a stored marker; every byte is checked, records are parsed when they are looked at. Raises `Corrupt`."""
        end = data.find(b"\n") + 1
        body, lines = decode(data[:end], kind="marker", where=where), _Lines(data, end, where)
        _expect_digest(body, where)
        if body.rows("record_columns", read_text) != RECORD_COLUMNS:
            raise Corrupt(f"{where}: unknown record columns. Read it with the release that wrote it.")
        marker = cls(
            run_id=body.text("run_id"),
            rank=body.integer("rank"),
            world_size=body.integer("world_size"),
            generation=read_generation(body.plain("generation"), where),
            plan_hash=body.text("plan_hash"),
            segments=body.rows("segments", lambda value, at: _read_segment(value, at, lines)),
            policy=body.plain("policy"),
            module=body.optional("module", lambda value, at: ModuleLine(lines.take(value, at), where)),
            unix_time=body.integer("unix_time"),
        )
        body.end()
        lines.end()
        _expect_own_keys(marker, where)
        return marker


@dataclass(frozen=True, slots=True)
class StoredMarker:
    """A marker and the digest of the file it was read from."""

    marker: RankMarker
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """The manifest of a whole generation; it exists once this is stored."""

    run_id: str
    generation: GenerationId
    plan_hash: str
    world_size: int
    steps: tuple[int, ...]
    """Steps of each rank's segments, equal on all ranks."""
    markers: tuple[str, ...]
    """Digest of each rank's marker file, by rank."""
    nbytes: int
    """Size of all segments and side files together."""
    policy: Mapping[str, object] = field(default_factory=dict)
    unix_time: int = 0
    """When rank 0 wrote its marker, by its clock, in seconds since 1970."""

    @classmethod
    def of(cls, stored: Sequence[StoredMarker]) -> Commit:
        """The one commit these markers, in rank order, add up to.

        Raises:
            Corrupt: a rank is missing, or ranks disagree on what they wrote.
        """
        markers = [each.marker for each in stored]
        first = markers[0]
        for rank, marker in enumerate(markers):
            if marker.rank != rank or _common(marker) != _common(first):
                raise Corrupt(f"{first.generation}: rank {rank} does not agree with rank 0. The generation is skipped.")
        if len(markers) != first.world_size:
            raise Corrupt(f"{first.generation}: {len(markers)} of {first.world_size} markers.")
        return cls(
            run_id=first.run_id,
            generation=first.generation,
            plan_hash=first.plan_hash,
            world_size=first.world_size,
            steps=first.steps,
            markers=tuple(each.digest for each in stored),
            nbytes=sum(nbytes for marker in markers for nbytes in stored_sizes(marker).values()),
            policy=first.policy,
            unix_time=first.unix_time,
        )

    def to_bytes(self) -> bytes:
        """The document as it is stored."""
        body = {name.name: getattr(self, name.name) for name in fields(self)}
        return encode("commit", {**body, "generation": generation_body(self.generation), "digests": DIGEST_NAME})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Commit:
        """Read a stored commit. Raises `Corrupt`."""
        body = decode(data, kind="commit", where=where)
        _expect_digest(body, where)
        commit = cls(
            run_id=body.text("run_id"),
            generation=read_generation(body.plain("generation"), where),
            plan_hash=body.text("plan_hash"),
            world_size=body.integer("world_size"),
            steps=body.rows("steps", read_integer),
            markers=body.rows("markers", read_text),
            nbytes=body.integer("nbytes"),
            policy=body.plain("policy"),
            unix_time=body.integer("unix_time"),
        )
        body.end()
        if len(commit.markers) != commit.world_size:
            raise Corrupt(f"{where}: {len(commit.markers)} markers for a world of {commit.world_size}.")
        return commit


def stored_sizes(marker: RankMarker) -> dict[str, int]:
    """Key and size of every object that must exist for this marker to be true."""
    stored: list[SegmentEntry | OverflowEntry] = list(marker.segments)
    stored += [segment.side_file for segment in marker.segments if segment.side_file is not None]
    return {each.key: each.nbytes for each in stored}


def generation_body(generation: GenerationId) -> dict[str, object]:
    """JSON form of a generation."""
    return {"step": generation.step, "epoch": generation.epoch}


def read_generation(value: object, where: str) -> GenerationId:
    """Read a generation. Raises `Corrupt`."""
    body = Fields(value, where)
    generation = GenerationId(step=body.integer("step"), epoch=body.integer("epoch"))
    body.end()
    return generation


class _Lines:
    """The lines behind a marker's document, taken one after the other."""

    def __init__(self, data: bytes, start: int, where: str) -> None:
        self._data, self._next, self._where = data, start, where

    def take(self, value: object, where: str) -> bytes:
        """The next line, which must be the one that `value` describes."""
        body = Fields(value, where)
        nbytes, digest = body.integer("nbytes"), body.text("digest")
        body.end()
        line = self._data[self._next : self._next + nbytes]
        self._next += nbytes
        if len(line) != nbytes or digest_of(line) != digest:
            raise Corrupt(f"{where}: a line of it is not the one that was written. Another copy may be good.")
        return line

    def end(self) -> None:
        """Refuse bytes that nothing describes."""
        if self._next != len(self._data):
            raise Corrupt(f"{self._where}: {len(self._data) - self._next} bytes too many. Another copy may be good.")


def _common(marker: RankMarker) -> tuple[object, ...]:
    """What all ranks must agree on."""
    return (
        marker.run_id, marker.world_size, marker.generation, marker.plan_hash, marker.steps, marker.policy,
    )  # fmt: skip


def _marker_body(marker: RankMarker, tables: Sequence[RecordTable]) -> dict[str, object]:
    return {
        "run_id": marker.run_id,
        "rank": marker.rank,
        "world_size": marker.world_size,
        "generation": generation_body(marker.generation),
        "plan_hash": marker.plan_hash,
        "digests": DIGEST_NAME,
        "record_columns": RECORD_COLUMNS,
        "segments": [_segment_body(*each) for each in zip(marker.segments, tables, strict=True)],
        "policy": marker.policy,
        "unix_time": marker.unix_time,
        "module": None if marker.module is None else _line_body(marker.module.line),
    }


def _line_body(line: bytes) -> dict[str, object]:
    return {"nbytes": len(line), "digest": digest_of(line)}


def _segment_body(segment: SegmentEntry, table: RecordTable) -> dict[str, object]:
    side = segment.side_file
    return {
        "step": segment.step,
        "key": segment.key,
        "nbytes": segment.nbytes,
        "digest": segment.digest,
        "records": _line_body(table.line),
        "side_file": None if side is None else {"key": side.key, "nbytes": side.nbytes, "digest": side.digest},
    }


def _read_segment(value: object, where: str, lines: _Lines) -> SegmentEntry:
    body = Fields(value, where)
    segment = SegmentEntry(
        step=body.integer("step"),
        key=body.text("key"),
        nbytes=body.integer("nbytes"),
        digest=body.text("digest"),
        records=RecordTable(lines.take(body.plain("records"), where), where),
        side_file=body.optional("side_file", _read_overflow),
    )
    body.end()
    return segment


def _read_overflow(value: object, where: str) -> OverflowEntry:
    body = Fields(value, where)
    side_file = OverflowEntry(key=body.text("key"), nbytes=body.integer("nbytes"), digest=body.text("digest"))
    body.end()
    return side_file


def _expect_digest(body: Fields, where: str) -> None:
    if (name := body.text("digests")) != DIGEST_NAME:
        raise Corrupt(f"{where}: digests are {name!r}, this release reads {DIGEST_NAME!r}.")


def _expect_own_keys(marker: RankMarker, where: str) -> None:
    """Refuse a marker that points at another generation's or rank's files."""
    for segment in marker.segments:
        side_key = segment.side_file.key if segment.side_file else None
        place = (marker.generation, marker.rank, segment.step)
        if segment.key != segment_key(*place) or side_key not in {None, overflow_key(*place)}:
            raise Corrupt(f"{where}: refers to {segment.key}, which is not a file of {marker_key(*place[:2])}.")
