"""Markers and manifests: one rank's marker with its segments, the commit over all ranks, and the references of both.

A commit is computed from the markers alone. So every writer (the coordinator, its retry, or the next incarnation that
promotes a generation) writes the same bytes. Coordinates are global: another number of ranks can read them.

A generation may lack operators and reference them: its markers name older files, and the records there, with each
operator's newest state. References stay flat: a marker names the files with the bytes, never a generation that references
in turn. So a partial generation needs only the older generations with the newest copy of some operator, however long the
chain is. Markers also name spares: the second newest copy of each operator, used if the newest is damaged. A missing spare
is no defect.

Source: PEC (2024), Sec. 3: a checkpoint of some experts is completed by each other expert's last copy. We differ in the
second copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType

from typing_extensions import override

from lightning_moe_ckpt.errors import Corrupt, StorageRefused
from lightning_moe_ckpt.storage._entries import (
    GENERATION,
    RECORD_COLUMNS,
    MarkerLines,
    RecordEntry,
    ReferencedEntry,
    SegmentEntry,
)
from lightning_moe_ckpt.storage._json import (
    DIGEST_NAME,
    FLAG,
    INTEGER,
    OBJECT,
    TEXT,
    Form,
    decode,
    encode,
    keys,
    many,
    maybe,
)
from lightning_moe_ckpt.storage._log import LINEAGE, Lineage
from lightning_moe_ckpt.storage._names import DURABLE, MAX_MARKER_NBYTES, NODE, GenerationId, marker_key, segment_key

_PLANS = 8
"""Plan texts remembered as valid; all ranks, and most generations, share one plan."""

_FULL = "full"

BadCopies = Mapping[str, Collection[GenerationId]]
"""Generations with a damaged copy of an operator, by operator; includes the newest copy; equal on all ranks."""

_NONE: BadCopies = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceEntry:
    """Hugging Face model inside the trained module."""

    prefix: str
    """Name of the submodule: `model` if its parameters are called `model.*`; empty for the module itself."""
    class_name: str
    config: str
    """Content of its `config.json`."""
    generation_config: str | None
    """Content of its `generation_config.json`."""
    tied: tuple[str, ...]
    """Names of tied parameters in the model, which Hugging Face files leave out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleEntry:
    """Description of a module, with which other programs can load its parameters and buffers.

    Records name parameters and buffers. Only the training process knows which of these names a strict `load_state_dict`
    wants, under which further names, and the other contents of a Hugging Face folder. So that process writes this
    entry.
    """

    class_name: str
    unsaved: tuple[str, ...]
    """Stored names that the `state_dict` leaves out, such as non-persistent buffers."""
    aliases: Mapping[str, str]
    """Further names in the `state_dict` (tied weights), each with the stored name."""
    foreign: tuple[str, ...]
    """Names in the `state_dict` that are neither parameters nor buffers and are not stored."""
    optimizer: str
    """Class of the optimizer."""
    param_groups: tuple[tuple[str, ...], ...]
    """Parameters of each of the optimizer's groups, in its order."""
    hugging_face: tuple[HuggingFaceEntry, ...]
    """Outermost Hugging Face models in the module."""
    extra: str
    """Trainer's additions to its own checkpoints: a value of the journal's codec, in base64."""


class ModuleLine:
    """Last line of rank 0's marker, stored bytes with the newline, parsed on demand; `where` names the marker in messages."""

    def __init__(self, line: bytes, where: str = "module") -> None:
        self.line = line
        self._where = where

    @classmethod
    def of(cls, entry: ModuleEntry) -> ModuleLine:
        return cls(json.dumps(asdict(entry), sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n")

    def read(self) -> ModuleEntry:
        """Parse the line. Raises `Corrupt` if it does not describe a module."""
        try:
            value = json.loads(self.line)
        except (ValueError, RecursionError) as error:
            raise Corrupt(f"{self._where}: the line about the module is not JSON ({error}).") from error
        return _MODULE.read(value, self._where)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleLine) and self.line == other.line

    @override
    def __hash__(self) -> int:
        return hash(self.line)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMarker:
    """A rank's statement that all its segments of a generation are durable."""

    run_id: str
    rank: int
    world_size: int
    generation: GenerationId
    plan_hash: str
    segments: tuple[SegmentEntry, ...]
    """Segments in step order; within a step the durable file comes first."""
    policy: Mapping[str, object] = field(default_factory=dict)
    """Facts for interpreting the generation at a restore: JSON values with string keys, equal on all ranks."""
    module: ModuleLine | None = None
    """Description of the trained module; only rank 0's marker has it."""
    unix_time: int = 0
    """Seconds since 1970 by this rank's clock; used for retention by age only."""
    referenced: tuple[ReferencedEntry, ...] = ()
    """Records of this rank in older generations' files, oldest first; see `carry_forward`."""
    spares: tuple[ReferencedEntry, ...] = ()
    """Second newest copies of operators, oldest first; see `carry_spares`."""
    lineage: Lineage | None = None
    """Ancestors of the incarnation that wrote it; only rank 0's marker has them."""
    rounded: bool = False
    """Whether this is a replica rebuilt from rounded gradients, with other bytes than its owner's."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Distinct steps of the segments, in order."""
        return tuple(dict.fromkeys(segment.step for segment in self.segments))

    def slot_offset(self, entry: SegmentEntry) -> int:
        """Return the first byte of a file in its ring slot; a slot holds all files of a step in a row."""
        files = [segment for segment in self.segments if segment.step == entry.step]
        return sum(file.nbytes for file in files[: [file.key for file in files].index(entry.key)])

    @property
    def needs(self) -> tuple[GenerationId, ...]:
        """Older generations whose files hold part of this generation, in order."""
        return tuple(sorted({entry.generation for entry in self.referenced}))

    def to_bytes(self) -> bytes:
        """Encode as a JSON document, then a line of records for each named file, then the module's line."""
        return b"".join(self.parts())

    def parts(self) -> list[bytes | memoryview]:
        """Return the bytes of `to_bytes` in parts, without copying parts that generations share."""
        lines = MarkerLines()
        parts = [encode("marker", _marker(lines).body(self)), *lines.written]
        if (nbytes := sum(map(len, parts))) > MAX_MARKER_NBYTES:
            raise StorageRefused(
                f"the marker of {self.generation} would have {nbytes} bytes; {MAX_MARKER_NBYTES} are read back. Plan shorter "
                "windows, or spread the model over more ranks."
            )
        return parts

    @classmethod
    def from_bytes(cls, data: bytes, where: str, start: int = 0) -> RankMarker:
        """Read a marker stored from byte `start` on. All digests are checked now, records are parsed on first use. Raises `Corrupt`."""
        end = data.find(b"\n", start) + 1
        lines = MarkerLines(data, end)
        marker = decode(data[start:end], _marker(lines), kind="marker", where=where)
        lines.end(where)
        _expect_own_lineage(marker, where)
        _expect_own_keys(marker, where)
        _expect_older_files(marker, marker.referenced, where)
        _expect_older_files(marker, marker.spares, where)
        return marker


@dataclass(frozen=True, slots=True)
class StoredMarker:
    """Marker with its file's digest."""

    marker: RankMarker
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """Manifest of a whole generation; the generation exists once its manifest is stored."""

    run_id: str
    generation: GenerationId
    plan_hash: str
    world_size: int
    steps: tuple[int, ...]
    """Steps of each rank's segments, equal on all ranks."""
    markers: tuple[str, ...]
    """Digest of each rank's marker file, by rank."""
    nbytes: int
    """Bytes of all segments together."""
    policy: Mapping[str, object] = field(default_factory=dict)
    unix_time: int = 0
    """Time of rank 0's marker, in seconds since 1970 by that rank's clock."""
    needs: tuple[GenerationId, ...] = ()
    """Older generations whose files hold part of this generation, in order."""
    spares: tuple[GenerationId, ...] = ()
    """Older generations whose files hold the second newest copy of some operator, in order."""
    lineage: Lineage | None = None
    """Ancestors of the incarnation that wrote the generation; `None` if rank 0's marker has none."""

    @classmethod
    def of(cls, stored: Sequence[StoredMarker]) -> Commit:
        """Build the commit that follows from these markers, in rank order. Raises `Corrupt` if a rank is missing, or ranks disagree on what
        they wrote.
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
            nbytes=sum(segment.nbytes for marker in markers for segment in marker.segments),
            policy=first.policy,
            unix_time=first.unix_time,
            needs=tuple(sorted({need for marker in markers for need in marker.needs})),
            spares=tuple(sorted({spare.generation for marker in markers for spare in marker.spares})),
            lineage=first.lineage,
        )

    def to_bytes(self) -> bytes:
        return encode("commit", _COMMIT.body(self))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Commit:
        """Read a stored commit. Raises `Corrupt`."""
        commit = decode(data, _COMMIT, kind="commit", where=where)
        _expect_own_lineage(commit, where)
        if not commit.steps:
            raise Corrupt(f"{where}: names no step. The generation is skipped.")
        if len(commit.markers) != commit.world_size:
            raise Corrupt(f"{where}: {len(commit.markers)} markers for a world of {commit.world_size}.")
        return commit


def _common(marker: RankMarker) -> tuple[object, ...]:
    """Return the fields that must be equal on all ranks."""
    return (
        marker.run_id, marker.world_size, marker.generation, marker.plan_hash, marker.steps, marker.policy,
    )  # fmt: skip


def _read_policy(value: object, where: str) -> dict[str, object]:
    """Read the policy's fields; a plan among them must be the text of a JSON object."""
    policy = OBJECT.read(value, where)
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


def _expect_own_lineage(found: RankMarker | Commit, where: str) -> None:
    """Raise `Corrupt` if a lineage is of another incarnation than the writer."""
    own = (found.generation.incarnation, found.generation.nonce)
    if found.lineage is not None and [(cut.incarnation, cut.nonce) for cut in found.lineage.cuts[-1:]] != [own]:
        raise Corrupt(
            f"{where}: its lineage does not end with the incarnation that wrote it. Another copy may be good."
        )


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
    for entry in entries:
        key = segment_key(entry.generation, marker.rank, entry.segment.step)
        of, by = entry.generation, marker.generation
        older = of.step < by.step and of.incarnation <= by.incarnation
        if entry.segment.key != key or not older:
            raise Corrupt(f"{where}: references {entry.segment.key}, which is not an older file of rank {marker.rank}.")
    if (names := [(entry.generation, entry.segment.step) for entry in entries]) != sorted(set(names)):
        raise Corrupt(f"{where}: what it references is not listed file by file, oldest first.")


_HUGGING_FACE = keys(
    HuggingFaceEntry, prefix=TEXT, class_name=TEXT, config=TEXT, generation_config=maybe(TEXT), tied=many(TEXT)
)
_ALIASES: Form[Mapping[str, str]] = Form(
    lambda value, where: {name: TEXT.read(each, where) for name, each in OBJECT.read(value, where).items()}, dict
)
_MODULE = keys(
    ModuleEntry, class_name=TEXT, unsaved=many(TEXT), aliases=_ALIASES, foreign=many(TEXT),
    optimizer=TEXT, param_groups=many(many(TEXT)), hugging_face=many(_HUGGING_FACE), extra=TEXT,
)  # fmt: skip
_POLICY: Form[Mapping[str, object]] = Form(_read_policy, dict)
_COMMIT = keys(
    Commit, {"digests": DIGEST_NAME}, run_id=TEXT, generation=GENERATION, plan_hash=TEXT, world_size=INTEGER,
    steps=many(INTEGER), markers=many(TEXT), nbytes=INTEGER, policy=_POLICY, unix_time=INTEGER,
    needs=many(GENERATION), spares=many(GENERATION), lineage=maybe(LINEAGE),
)  # fmt: skip


def _marker(lines: MarkerLines) -> Form[RankMarker]:
    """Return a marker's form; its lines come in this order: own segments, referenced ones, spares, the module."""
    segments = lines.segment()
    module = lines.form(lambda line, where: ModuleLine(bytes(line), where), lambda module: [module.line])
    references = many(keys(ReferencedEntry, generation=GENERATION, segment=segments))
    return keys(
        RankMarker, {"digests": DIGEST_NAME, "record_columns": RECORD_COLUMNS}, run_id=TEXT, rank=INTEGER,
        world_size=INTEGER, generation=GENERATION, plan_hash=TEXT, segments=many(segments), referenced=references,
        spares=references, policy=_POLICY, module=maybe(module), unix_time=INTEGER, rounded=FLAG,
        lineage=maybe(LINEAGE),
    )  # fmt: skip


def carry_forward(
    previous: RankMarker, lacking: Collection[str], bad: BadCopies = _NONE
) -> tuple[ReferencedEntry, ...]:
    """Return the references of this rank's marker in the generation after `previous`: full records of the operators
    `lacking` a full record on any rank in the new one, that this rank stored or referenced in `previous`. One entry per
    file, oldest first. Of damaged copies, `bad`, the spare is referenced instead.

    Whole operators are referenced, not single records: generations may cut an operator differently among ranks, but
    each generation with the operator has all of it. `previous` is one of the two newest committed generations, the same
    on all ranks: these two, and their references, are never given up during a save. Raises `ValueError` if `previous`
    is a window of several steps, so its records are not the state of one step.
    """
    wanted = set(lacking)
    newest = _only(_newest(previous), lambda name, at: name in wanted and at not in bad.get(name, ()))
    instead = _only(previous.spares, lambda name, at: name in wanted and name in bad and at not in bad[name])
    return _by_file([*newest, *instead])


def carry_spares(
    previous: RankMarker, lacking: Collection[str], stored: Collection[str], bad: BadCopies = _NONE
) -> tuple[ReferencedEntry, ...]:
    """Return the spares in this rank's marker of the generation after `previous`: full records, one entry per file,
    oldest first. Raises `ValueError` if `previous` is a window of several steps; `previous` may be older than in
    `carry_forward` if nothing is referenced.

    Operators `lacking`, as there, keep their spare; of those that the new generation stores, the newest older copy
    becomes the spare.
    """
    waiting, replaced = set(lacking), set(stored)
    kept = _only(
        previous.spares,
        lambda name, at: (
            (name in waiting and name not in bad) or (name in replaced and name in bad and at not in bad[name])
        ),
    )
    newest = _only(_newest(previous), lambda name, at: name in replaced and at not in bad.get(name, ()))
    return _by_file([*kept, *newest])


def full_records(marker: RankMarker) -> Iterator[tuple[SegmentEntry, RecordEntry]]:
    """Yield every full record of a rank with its file: own segments first, then referenced files."""
    files: Sequence[SegmentEntry] = [*marker.segments, *(entry.segment for entry in marker.referenced)]
    return ((file, record) for file in files for record in file.records if record.kind == _FULL)


def _newest(previous: RankMarker) -> list[ReferencedEntry]:
    """Return the files with the newest copies: referenced ones, then the marker's. Refuses several steps."""
    if len(previous.steps) != 1:
        raise ValueError(
            f"`carry_forward({previous.generation})`: it is a window of {len(previous.steps)} steps; only dense and "
            "partial generations can refer to. Store a dense one first."
        )
    return [*previous.referenced, ReferencedEntry(generation=previous.generation, segment=previous.segments[0])]


def _only(entries: Iterable[ReferencedEntry], wanted: Callable[[str, GenerationId], bool]) -> Iterator[ReferencedEntry]:
    """Yield the entries with only those full records whose operator is `wanted` from their generation."""
    for entry in entries:
        names = {record.operator for record in entry.segment.records if record.kind == _FULL}
        chosen = {name for name in names if wanted(name, entry.generation)}
        if records := tuple(r for r in entry.segment.records if r.kind == _FULL and r.operator in chosen):
            yield replace(entry, segment=replace(entry.segment, records=records))


def _by_file(entries: Iterable[ReferencedEntry]) -> tuple[ReferencedEntry, ...]:
    """Merge entries of the same file; oldest first."""
    files: dict[tuple[GenerationId, int], ReferencedEntry] = {}
    for entry in entries:
        if (known := files.setdefault((entry.generation, entry.segment.step), entry)) is not entry:
            records = sorted((*known.segment.records, *entry.segment.records), key=lambda record: record.offset)
            files[entry.generation, entry.segment.step] = replace(
                known, segment=replace(known.segment, records=tuple(records))
            )
    return tuple(files[name] for name in sorted(files))
