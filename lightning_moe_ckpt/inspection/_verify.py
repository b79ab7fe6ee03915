"""Verify a stored run: read every byte and compare its digest with the written one.

Each digest is in the document above it: records and files in a rank's marker, markers in the manifest; markers,
manifests and log entries carry their own. A flipped bit or a missing end anywhere is therefore found, and named. The
documents must also fit together: all digests can be right, and still no state result.

Files that a generation refers to are read too, whether or not their own generation could be restored, and each once.
So are files with the second copy of an operator, as long as the log keeps them. Operators without a good copy are named.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from math import prod

from lightning_moe_ckpt.errors import CheckpointError, Corrupt
from lightning_moe_ckpt.inspection._assemble import BUFFER, constants_of, identity_of, shared_element
from lightning_moe_ckpt.recovery import Replicas, Version, stored_index
from lightning_moe_ckpt.snapshot import PACKED, PARAM
from lightning_moe_ckpt.storage import (
    Backend,
    Commit,
    RankMarker,
    RecordEntry,
    ReferencedEntry,
    RunView,
    SegmentEntry,
    StoredGeneration,
    check_header,
    scrub_record,
    scrub_segment,
)
from lightning_moe_ckpt.tiers import is_differential

_SHOWN = 5
"""Most disagreements of a kind to name singly."""

_Key = tuple[str, str, str]
"""Kind, parameter, and part of the parameter."""
_Piece = tuple[int, RecordEntry]
"""Rank, and its record."""

Show = Callable[[int], None]
"""Called with the bytes of each file that was read."""


@dataclass(frozen=True, slots=True)
class FileProblem:
    """Damage of one file."""

    generation: str
    """Name of the generation; empty for the log."""
    reason: str


@dataclass(kw_only=True, slots=True)
class Verdict:
    """Result of `verify`."""

    generations: list[str] = field(default_factory=list)
    """Generations that were read, newest first."""
    skipped: int = 0
    """Number of generations that were not read: not committed, or not restored any more."""
    num_files: int = 0
    """Number of segments that were read whole."""
    nbytes: int = 0
    """Bytes of these segments."""
    seconds: float = 0.0
    problems: list[FileProblem] = field(default_factory=list)
    num_single: int = 0
    """Number of operators in older files named by the newest generation that have one good copy only."""

    @property
    def sound(self) -> bool:
        """Whether there is at least one generation and no damage."""
        return bool(self.generations) and not self.problems

    @property
    def nbytes_per_second(self) -> float:
        """Speed of reading and digesting."""
        return self.nbytes / max(self.seconds, 1e-9)


def verify(backend: Backend, *, step: int | None = None, everything: bool = False, show: Show | None = None) -> Verdict:
    """Read all files of committed generations, and the log.

    Args:
        backend: backend that `open_backend` returned.
        step: only generations of this step.
        everything: whether to read committed generations that the log rules out too (of earlier runs or lineages).
        show: called with the bytes of each file that was read.

    Raises:
        NoUsableGeneration: there is no run.
        StorageError: the medium failed, which says nothing about the bytes.
    """
    view, verdict, started = RunView.open(backend), Verdict(), time.perf_counter()
    verdict.problems = [FileProblem("", reason) for reason in view.log_damage()]
    stored = view.generations()
    readings = [_Reading(each) for each in stored if step in {None, each.generation.step}]
    dead_too = everything or view.history is None
    chosen = [each for each in readings if each.stored.committed and (dead_too or each.stored.dead is None)]
    sizes = {key: size for each in stored for key, size in each.sizes.items()}
    sizes |= {each.key: each.nbytes for each in backend.list("const/")}
    files = _Files(backend, sizes, verdict, show)
    for reading in chosen:
        reading.own_files(view, files)
    alive = [each for each in chosen if each.stored.dead is None]
    _read_referenced(alive, files, view)
    for reading in reversed(alive):  # the newest comes last
        verdict.num_single = reading.count_copies(files, view)
    retired = [each for each in chosen if each.reasons and _was_retired(view, each.stored)]
    for reading in [each for each in chosen if each not in retired]:
        verdict.generations.append(str(reading.stored.generation))
        verdict.problems += [FileProblem(str(reading.stored.generation), reason) for reason in reading.reasons]
    verdict.skipped = len(readings) - len(verdict.generations)
    verdict.seconds = time.perf_counter() - started
    return verdict


@dataclass(slots=True, eq=False)
class _Reading:
    """State of one generation while it is read."""

    stored: StoredGeneration
    markers: list[RankMarker] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """Faults of the generation."""

    def own_files(self, view: RunView, files: _Files) -> None:
        """Read the generation's markers and its own files."""
        if self.stored.damage is not None:
            self.reasons.append(self.stored.damage)
        if (commit := self.stored.commit) is None:
            return
        for rank in range(commit.world_size):
            try:
                self.markers.append(_read_marker(view, commit, rank))
            except CheckpointError as error:
                self.reasons.append(str(error))
                continue
            self.reasons += [reason for entry in self.markers[-1].segments if (reason := files.read(entry))]
        try:
            constants = constants_of(files.backend, commit.policy)
        except CheckpointError as error:
            self.reasons.append(str(error))
            return
        self.reasons += [reason for entry in constants if (reason := files.read_again(entry))]
        if self.markers and not self.reasons:
            try:
                self.reasons += disagreements(self.markers, constants)
            except CheckpointError as error:  # the description of the module is none
                self.reasons.append(str(error))

    def count_copies(self, files: _Files, view: RunView) -> int:
        """Note operators without a good copy; return the number of those with copies in older files that have only one."""
        if self.stored.commit is not None and is_differential(self.stored.commit.policy):
            return 0  # there is one copy of what differences follow on, and what is bad of it was said
        older = [[each for _, each in _named(marker, view)] for marker in self.markers]
        names = {record.operator for entries in older for entry in entries for record in entry.segment.records}
        copies: dict[str, dict[Version, bool]] = {name: {} for name in names}
        for index in map(stored_index, self.markers, older):
            for name, sources in index.offered(names).items():
                for source, _ in sources:
                    good = all(files.has_good(each) for each in index.operator(name, source).values())
                    copies[name][source] = copies[name].get(source, True) and good
        numbers = {name: sum(found.values()) for name, found in copies.items()}
        if lost := sorted(name for name, number in numbers.items() if number == 0):
            self.reasons.append(f"no good copy is left of {len(lost)} operators, first {lost[0]}")
        return sum(number == 1 for number in numbers.values())


def _read_referenced(readings: Sequence[_Reading], files: _Files, view: RunView) -> None:
    """Read the older files that generations name, each with all records that any of them names."""
    wanted: dict[tuple[str, int, str], tuple[SegmentEntry, set[RecordEntry], dict[tuple[_Reading, str], None]]] = {}
    for reading in readings:
        for why, each in (named for marker in reading.markers for named in _named(marker, view)):
            file = each.segment
            entry = wanted.setdefault((file.key, file.nbytes, file.digest), (file, set(), {}))
            entry[1].update(file.records)
            entry[2][reading, f"{why} {each.generation}"] = None
    for file, records, referrers in wanted.values():
        reason = files.read_again(replace(file, records=tuple(records)))
        for reading, why in referrers if reason is not None else ():
            reading.reasons.append(f"{why}: {reason}")


def _named(marker: RankMarker, view: RunView) -> list[tuple[str, ReferencedEntry]]:
    """Return a marker's entries in older files that must exist, each with the reason."""
    spares = [each for each in marker.spares if view.history is None or view.history.why_dead(each.generation) is None]
    return [*(("needs", entry) for entry in marker.referenced), *(("has older copies in", spare) for spare in spares)]


@dataclass(slots=True)
class _Files:
    """Read files, and remember which of their records are good."""

    backend: Backend
    sizes: Mapping[str, int]
    """Bytes by key, as listed."""
    verdict: Verdict
    show: Show | None
    good: dict[str, SegmentEntry] = field(default_factory=dict)
    bad: dict[str, set[str]] = field(default_factory=dict)
    """Operators with a bad record, by key of a damaged file."""

    def read(self, entry: SegmentEntry) -> str | None:
        """Read a file whole; return its defect, or `None`."""
        self.verdict.num_files += 1
        self.verdict.nbytes += entry.nbytes
        if self.show is not None:
            self.show(entry.nbytes)
        try:
            _verify_file(self.backend, self.sizes, entry)
        except CheckpointError as error:
            self.bad.setdefault(entry.key, set()).update(self._bad_operators(entry))
            return str(error)
        self.good[entry.key] = entry
        return None

    def has_good(self, replicas: Replicas) -> bool:
        """Return whether a record has a good copy."""
        name = replicas.record.operator
        return any(name not in self.bad.get(place.entry.key, ()) for place in replicas.places)

    def _bad_operators(self, entry: SegmentEntry) -> Iterator[str]:
        """Yield the operators that a restore, which checks single records, could not take from a file.

        If the file's header contradicts its entry, all operators are bad: the sizes of records are not trusted then.
        """
        try:
            check_header(self.backend, entry)
        except CheckpointError:
            yield from (record.operator for record in entry.records)
            return
        for record in entry.records:
            try:
                scrub_record(self.backend, entry.key, record)
            except CheckpointError:  # noqa: PERF203  # each record is judged by itself
                yield record.operator

    def read_again(self, entry: SegmentEntry) -> str | None:
        """Read a file unless all its requested records were read and found good; return its defect, or `None`."""
        known = self.good.get(entry.key)
        if known is not None and known.digest == entry.digest and set(entry.records) <= set(known.records):
            return None
        return self.read(entry)


def _was_retired(view: RunView, stored: StoredGeneration) -> bool:
    """Return whether the run, which may go on meanwhile, deleted the generation; it deletes the manifest first."""
    return not any(each.committed for each in view.generations() if each.generation == stored.generation)


def _read_marker(view: RunView, commit: Commit, rank: int) -> RankMarker:
    marker = view.read_marker(commit, rank)
    agreed = (marker.run_id, marker.world_size, marker.plan_hash, marker.steps, marker.policy)
    if agreed != (commit.run_id, commit.world_size, commit.plan_hash, commit.steps, commit.policy):
        raise Corrupt(f"{commit.generation}: the marker of rank {rank} does not agree with the manifest.")
    return marker


def _verify_file(backend: Backend, sizes: Mapping[str, int], entry: SegmentEntry) -> None:
    if (nbytes := sizes.get(entry.key)) != entry.nbytes:
        raise Corrupt(f"{entry.key}: {'is gone' if nbytes is None else f'has {nbytes} bytes'}, {entry.nbytes} written.")
    scrub_segment(backend, entry)


def disagreements(markers: Sequence[RankMarker], constants: Sequence[SegmentEntry] = ()) -> list[str]:
    """Return the disagreements between a generation's markers, by name; empty if there is none.

    Records of one tensor must agree on its shape and type, hold every element, and on one rank no element twice. Names in the
    module's description must be stored. (Readers of files check that a record's place and size agree with the file's
    header.)
    """
    found: dict[_Key, set[tuple[str, tuple[int, ...]]]] = defaultdict(set)
    pieces: dict[tuple[str, str], list[_Piece]] = defaultdict(list)
    stored = {record.fqn for file in constants for record in file.records}
    for marker in markers:
        segments = [*marker.segments, *(entry.segment for entry in marker.referenced)]
        for record in (record for segment in segments for record in segment.records if record.fqn):
            if record.kind == BUFFER:
                stored.add(record.fqn)
            elif record.state_key != PACKED:  # as many bytes as its part needs
                found[record.kind, record.fqn, record.state_key].add((record.dtype, record.global_shape))
            if record.kind == "full" and record.state_key == PARAM:
                stored.add(record.fqn)
            if record.kind == "full" and (record.global_shape or record.state_key == PARAM):
                pieces[record.fqn, record.state_key].append((marker.rank, record))
    numels = {(fqn, key): prod(shape) for (_, fqn, key), each in found.items() for _, shape in each}
    gaps = chain.from_iterable(_gaps(*name, piece, numels[name]) for name, piece in pieces.items())
    return [*_few(_unequal(found)), *_few(gaps), *_few(_not_stored(markers[0], stored))]


def _unequal(found: dict[_Key, set[tuple[str, tuple[int, ...]]]]) -> Iterator[str]:
    for (kind, fqn, key), said in found.items():
        if len(said) > 1:
            words = " and ".join(sorted(f"{list(shape)} {dtype}" for dtype, shape in said))
            yield f"`{fqn}`: its {kind} records of {key} say {words}"


def _gaps(fqn: str, key: str, pieces: Sequence[_Piece], numel: int) -> Iterator[str]:
    """Report elements that no rank wrote, or a rank twice. Ranks that number their own experts write the same names."""
    name, end = fqn if key == PARAM else f"{fqn}/{key}", 0
    if any(record.box for _, record in pieces):
        yield from _gaps_between_boxes(name, [*{identity_of(record): record for _, record in pieces}.values()])
        return
    places = [(record.global_start, record.global_start + record.numel, rank) for rank, record in pieces]
    for start, stop, _ in sorted(places):
        if start > end:
            break
        end = max(end, stop)
    if end != numel:
        yield f"`{name}`: element {end} of {numel} is nowhere stored"
    for (_, stop, rank), (start, _, other) in pairwise(sorted(places, key=lambda place: (place[2], *place))):
        if rank == other and start < stop:
            yield f"`{name}`: element {start} is stored twice by rank {rank}"


def _gaps_between_boxes(name: str, records: Sequence[RecordEntry]) -> Iterator[str]:
    """Report elements that no rank wrote, or two did."""
    shape = records[0].global_shape
    if any(record.global_shape != shape for record in records):
        return  # which is reported
    missing = prod(shape) - sum(record.numel for record in records)
    if (twice := shared_element(box for record in records for box in record.boxes())) is not None:
        yield f"`{name}`: element {list(twice)} is stored twice"
    elif missing:
        yield f"`{name}`: {missing} of {prod(shape)} elements are nowhere stored"


def _not_stored(marker: RankMarker, stored: set[str]) -> Iterator[str]:
    """Report names of the module's description that no record has."""
    if marker.module is None:
        return
    module = marker.module.read()
    grouped = filter(None, chain.from_iterable(module.param_groups))  # pieces of a sharded optimizer have no names
    named = [*grouped, *module.unsaved, *module.aliases.values()]
    yield from (f"`{name}` is named by the module's description and stored by no rank" for name in set(named) - stored)


def _few(reasons: Iterator[str]) -> Iterator[str]:
    every = sorted(reasons)
    yield from every[:_SHOWN]
    if len(every) > _SHOWN:
        yield f"and {len(every) - _SHOWN} more of the kind"
