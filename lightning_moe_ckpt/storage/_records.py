"""Markers and manifests: one rank's marker with its segments, and the commit over all ranks.

A commit is computed from the markers alone. So every writer (the coordinator, its retry, or the next incarnation that
promotes a generation) writes the same bytes. Coordinates are global: another number of ranks can read them.

A generation may lack operators and reference them: its markers name older files, and the records in them, with the newest
state of each operator. They name files that hold the bytes, never a generation that references in turn. Markers also name
spares: the second newest copy of each operator, used if the newest is damaged. A missing spare is no defect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache

from lightning_moe_ckpt.errors import Corrupt, StorageRefused
from lightning_moe_ckpt.storage._entries import (
    MarkerLines,
    ModuleLine,
    ReferencedEntry,
    SegmentEntry,
    generation_body,
    line_body,
    read_generation,
    read_reference,
    read_segment,
    reference_body,
    segment_body,
)
from lightning_moe_ckpt.storage._json import (
    BORROWING,
    DIGEST_NAME,
    OF_A_LIFE,
    SPARING,
    VERSION,
    Fields,
    decode_any,
    encode,
    read_integer,
    read_text,
)
from lightning_moe_ckpt.storage._log import Lineage
from lightning_moe_ckpt.storage._names import (
    DURABLE,
    MAX_MARKER_NBYTES,
    NODE,
    GenerationId,
    marker_key,
    segment_key,
)
from lightning_moe_ckpt.storage._record_table import RECORD_COLUMNS, RecordTable

_PLANS = 8
"""Number of plan texts remembered as valid; all ranks, and most generations, share one plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMarker:
    """One rank's statement that all its segments of a generation are durable."""

    run_id: str
    rank: int
    world_size: int
    generation: GenerationId
    plan_hash: str
    segments: tuple[SegmentEntry, ...]
    """In step order; within a step the durable file comes first."""
    policy: Mapping[str, object] = field(default_factory=dict)
    """What a restore needs to interpret the generation: JSON values with string keys, equal on all ranks."""
    module: ModuleLine | None = None
    """Description of the trained module; only rank 0's marker has it."""
    unix_time: int = 0
    """Seconds since 1970 by this rank's clock; used for retention by age only."""
    referenced: tuple[ReferencedEntry, ...] = ()
    """Records of this rank that are in older generations' files, oldest first; see `carry_forward`."""
    spares: tuple[ReferencedEntry, ...] = ()
    """Second newest copies of operators, oldest first; see `carry_spares`."""
    lineage: Lineage | None = None
    """Ancestors of the incarnation that wrote it; only rank 0's marker has them."""
    rounded: bool = False
    """Whether this is a replica that was rebuilt from rounded gradients: its bytes are not those of its owner."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Distinct steps of the segments, in order."""
        return tuple(dict.fromkeys(segment.step for segment in self.segments))

    def slot_offset(self, entry: SegmentEntry) -> int:
        """Return the byte at which a file begins in its ring slot; a slot holds all files of a step in a row."""
        files = [each for each in self.segments if each.step == entry.step]
        return sum(each.nbytes for each in files[: [each.key for each in files].index(entry.key)])

    @property
    def needs(self) -> tuple[GenerationId, ...]:
        """Older generations whose files hold part of this one, in order."""
        return tuple(sorted({each.generation for each in self.referenced}))

    def to_bytes(self) -> bytes:
        """Encode as a JSON document, then a line of records for each file that it names, then the module's line."""
        segments = [*self.segments, *(each.segment for each in (*self.referenced, *self.spares))]
        tables = [RecordTable.of(segment.records) for segment in segments]
        module = b"" if self.module is None else self.module.line
        document = encode(
            "marker", _marker_body(self, tables), version=_version(self.generation, self.referenced, self.spares)
        )
        data = b"".join([document, *(table.line for table in tables), module])
        if len(data) > MAX_MARKER_NBYTES:
            raise StorageRefused(
                f"the marker of {self.generation} would have {len(data)} bytes; {MAX_MARKER_NBYTES} are read back. Plan shorter "
                "windows, or spread the model over more ranks."
            )
        return data

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> RankMarker:
        """Read a stored marker. All digests are checked now, records are parsed on first use. Raises `Corrupt`."""
        end = data.find(b"\n") + 1
        version, body = decode_any(data[:end], kind="marker", where=where, versions=_VERSIONS)
        form = _form(version)
        lines = MarkerLines(data, end, where)
        _expect_digest(body, where)
        if body.rows("record_columns", read_text) != RECORD_COLUMNS:
            raise Corrupt(f"{where}: unknown record columns. Read it with the release that wrote it.")
        marker = cls(
            run_id=body.text("run_id"),
            rank=body.integer("rank"),
            world_size=body.integer("world_size"),
            generation=read_generation(body.plain("generation"), where),
            plan_hash=body.text("plan_hash"),
            segments=body.rows("segments", lambda value, at: read_segment(value, at, lines)),
            referenced=()
            if form == VERSION
            else body.rows("referenced", lambda value, at: read_reference(value, at, lines)),
            spares=() if form != SPARING else body.rows("spares", lambda value, at: read_reference(value, at, lines)),
            policy=_read_policy(body, where),
            module=body.optional("module", lambda value, at: ModuleLine(lines.take(value, at), where)),
            unix_time=body.integer("unix_time"),
            rounded=body.has("rounded") and body.flag("rounded"),
        )
        marker = replace(marker, lineage=Lineage.read(body, marker.generation, where))
        body.end()
        lines.end()
        _expect_version(version, marker.generation, marker.referenced, marker.spares, where)
        _expect_own_keys(marker, where)
        _expect_older_files(marker, marker.referenced, where)
        _expect_older_files(marker, marker.spares, where)
        return marker


@dataclass(frozen=True, slots=True)
class StoredMarker:
    """A marker and the digest of the file it was read from."""

    marker: RankMarker
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """The manifest of a whole generation; the generation exists once its manifest is stored."""

    run_id: str
    generation: GenerationId
    plan_hash: str
    world_size: int
    steps: tuple[int, ...]
    """Steps of each rank's segments, equal on all ranks."""
    markers: tuple[str, ...]
    """Digest of each rank's marker file, by rank."""
    nbytes: int
    """Size of all segments together."""
    policy: Mapping[str, object] = field(default_factory=dict)
    unix_time: int = 0
    """When rank 0 wrote its marker, in seconds since 1970 by that rank's clock."""
    needs: tuple[GenerationId, ...] = ()
    """Older generations whose files hold part of this one, in order."""
    spares: tuple[GenerationId, ...] = ()
    """Older generations whose files hold the second newest copy of some operator, in order."""
    lineage: Lineage | None = None
    """Ancestors of the incarnation that wrote it; `None` where rank 0's marker has none."""

    @classmethod
    def of(cls, stored: Sequence[StoredMarker]) -> Commit:
        """Build the commit that these markers, in rank order, determine.

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
            needs=tuple(sorted({need for marker in markers for need in marker.needs})),
            spares=tuple(sorted({each.generation for marker in markers for each in marker.spares})),
            lineage=first.lineage,
        )

    def to_bytes(self) -> bytes:
        """Encode as a JSON document."""
        version = _version(self.generation, self.needs, self.spares)
        body = {name.name: getattr(self, name.name) for name in fields(self) if name.name not in _SOMETIMES}
        body |= {"generation": generation_body(self.generation), "digests": DIGEST_NAME} | _lineage_body(self.lineage)
        if _form(version) != VERSION:
            body["needs"] = [generation_body(need) for need in self.needs]
        if _form(version) == SPARING:
            body["spares"] = [generation_body(each) for each in self.spares]
        return encode("commit", body, version=version)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Commit:
        """Read a stored commit. Raises `Corrupt`."""
        version, body = decode_any(data, kind="commit", where=where, versions=_VERSIONS)
        form = _form(version)
        _expect_digest(body, where)
        commit = cls(
            run_id=body.text("run_id"),
            generation=read_generation(body.plain("generation"), where),
            plan_hash=body.text("plan_hash"),
            world_size=body.integer("world_size"),
            steps=body.rows("steps", read_integer),
            markers=body.rows("markers", read_text),
            nbytes=body.integer("nbytes"),
            policy=_read_policy(body, where),
            unix_time=body.integer("unix_time"),
            needs=() if form == VERSION else body.rows("needs", read_generation),
            spares=body.rows("spares", read_generation) if form == SPARING else (),
        )
        commit = replace(commit, lineage=Lineage.read(body, commit.generation, where))
        body.end()
        _expect_version(version, commit.generation, commit.needs, commit.spares, where)
        if not commit.steps:
            raise Corrupt(f"{where}: names no step. The generation is skipped.")
        if len(commit.markers) != commit.world_size:
            raise Corrupt(f"{where}: {len(commit.markers)} markers for a world of {commit.world_size}.")
        return commit


def stored_sizes(marker: RankMarker) -> dict[str, int]:
    """Return key and size of every segment file that the marker says is durable."""
    return {each.key: each.nbytes for each in marker.segments}


def _common(marker: RankMarker) -> tuple[object, ...]:
    """Return the fields that must be equal on all ranks."""
    return (
        marker.run_id, marker.world_size, marker.generation, marker.plan_hash, marker.steps, marker.policy,
    )  # fmt: skip


_FORMS = (VERSION, BORROWING, SPARING)
_VERSIONS = (*_FORMS, *(form + OF_A_LIFE for form in _FORMS))


_SOMETIMES = frozenset({"needs", "spares", "lineage"})
"""Optional keys of a manifest."""


def _form(version: int) -> int:
    """Return the version without `OF_A_LIFE`: it says which keys the document has."""
    return version - OF_A_LIFE if version > OF_A_LIFE else version


def _version(generation: GenerationId, referenced: Sequence[object], spares: Sequence[object]) -> int:
    """Return a document's version, so that a release without references refuses a generation that references."""
    of_a_life = OF_A_LIFE if generation.nonce else 0
    if spares:
        return of_a_life + SPARING
    return of_a_life + (BORROWING if referenced else VERSION)


def _expect_version(
    version: int, generation: GenerationId, referenced: Sequence[object], spares: Sequence[object], where: str
) -> None:
    if version != (wanted := _version(generation, referenced, spares)):
        raise Corrupt(f"{where}: is of version {version}, what it says of version {wanted}. Another copy may be good.")


def _marker_body(marker: RankMarker, tables: Sequence[RecordTable]) -> dict[str, object]:
    own, others = tables[: len(marker.segments)], tables[len(marker.segments) :]
    bodies = [reference_body(*each) for each in zip((*marker.referenced, *marker.spares), others, strict=True)]
    referenced, spares = bodies[: len(marker.referenced)], bodies[len(marker.referenced) :]
    return {
        **({"referenced": referenced} if referenced or spares else {}),
        **({"spares": spares} if spares else {}),
        **_lineage_body(marker.lineage),
        **({"rounded": True} if marker.rounded else {}),
        "run_id": marker.run_id,
        "rank": marker.rank,
        "world_size": marker.world_size,
        "generation": generation_body(marker.generation),
        "plan_hash": marker.plan_hash,
        "digests": DIGEST_NAME,
        "record_columns": RECORD_COLUMNS,
        "segments": [segment_body(*each) for each in zip(marker.segments, own, strict=True)],
        "policy": marker.policy,
        "unix_time": marker.unix_time,
        "module": None if marker.module is None else line_body(marker.module.line),
    }


def _lineage_body(lineage: Lineage | None) -> dict[str, object]:
    return {} if lineage is None else {"lineage": lineage.body()}


def _read_policy(body: Fields, where: str) -> dict[str, object]:
    """Read the policy's fields; a plan among them must be the text of a JSON object."""
    policy = body.plain("policy")
    if "plan" in policy:
        plan = policy["plan"]
        defect = _plan_defect(plan) if isinstance(plan, str) else f"must be text, found {type(plan).__name__}"
        if defect is not None:
            raise Corrupt(f"{where}: its plan {defect}. Read it with the release that wrote it.")
    return policy


@lru_cache(_PLANS)
def _plan_defect(plan: str) -> str | None:
    try:
        found = json.loads(plan)
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error})"
    return None if isinstance(found, dict) else f"must be an object, found {type(found).__name__}"


def _expect_digest(body: Fields, where: str) -> None:
    if (name := body.text("digests")) != DIGEST_NAME:
        raise Corrupt(f"{where}: digests are {name!r}, this release reads {DIGEST_NAME!r}.")


def _expect_own_keys(marker: RankMarker, where: str) -> None:
    """Refuse a marker that points at another generation's or rank's files."""
    steps: set[int] = set()
    for segment in marker.segments:
        place = (marker.generation, marker.rank, segment.step)
        key = segment_key(*place, NODE if segment.step in steps else DURABLE)
        if segment.key != key:
            raise Corrupt(f"{where}: refers to {segment.key}, which is not a file of {marker_key(*place[:2])}.")
        steps.add(segment.step)


def _expect_older_files(marker: RankMarker, entries: Sequence[ReferencedEntry], where: str) -> None:
    """Refuse entries that refer to another rank, from this generation or from a later one."""
    for each in entries:
        key = segment_key(each.generation, marker.rank, each.segment.step)
        older = (
            each.generation.step < marker.generation.step
            and each.generation.incarnation <= marker.generation.incarnation
        )
        if each.segment.key != key or not older:
            raise Corrupt(f"{where}: refers to {each.segment.key}, which is not an older file of rank {marker.rank}.")
    names = [(each.generation, each.segment.step) for each in entries]
    if names != sorted(set(names)):
        raise Corrupt(f"{where}: what it references is not listed file by file, oldest first.")
