"""Know where every record of one rank is: by operator, by the step that it is of, and by kind, in whatever tier.

How an operator is cut among the ranks that hold it may differ between generations, so nothing here assumes that it is cut
alike: a generation supplies an operator if the shards that all ranks have of it add up to the whole operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from lightning_moe_ckpt.native import Column
from lightning_moe_ckpt.recovery._assembly import FILLER_NBYTES, Place, WantedNeighbours
from lightning_moe_ckpt.recovery._inventory import Replica, Version, stored
from lightning_moe_ckpt.storage import (
    GenerationId,
    RankMarker,
    RecordColumns,
    RecordEntry,
    ReferencedEntry,
    SegmentEntry,
    SegmentLayout,
    dtype_of,
)
from lightning_moe_ckpt.tiers import CHEAPEST

FULL, PARAM = "full", "param"
"""Kind of a whole state in markers, and state key of the parameter itself."""


@dataclass(slots=True)
class Replicas:
    """One record, and where it may come from, cheapest first."""

    record: RecordEntry
    places: list[Place] = field(default_factory=list)


ReplicasByName = dict[str, Replicas]


@dataclass(frozen=True, slots=True)
class LinkSource:
    """A file with what there is of one boundary of a chain, and who has it."""

    entry: SegmentEntry
    copies: Sequence[Replica]
    is_base: bool
    """Whether it has everything; else it has what leads there from the boundary before."""


Links = Mapping[int, Sequence[LinkSource]]
"""Boundaries of a chain by step; cheapest sources first."""


def named_links(marker: RankMarker, own: Sequence[Replica], *, is_base: bool) -> Iterator[LinkSource]:
    """Yield what a marker names of a chain: its own files, and those that it follows on, of which the first is the base.

    Args:
        marker: of a base, or of differences.
        own: copies of its own files.
        is_base: which of the two.
    """
    for entry in marker.segments:
        yield LinkSource(entry, own, is_base)
    for number, each in enumerate(() if is_base else marker.referenced):
        yield LinkSource(each.segment, [stored(Version(each.generation, ""), marker.rank)], number == 0)


class RecordIndex:
    """What one rank can be given. Where two files contradict each other, the one that was added first is right."""

    def __init__(self) -> None:
        self._full: dict[tuple[str, Version], dict[int, ReplicasByName]] = defaultdict(dict)
        """Full states, by operator."""
        self._others: dict[Version, dict[int, ReplicasByName]] = defaultdict(dict)
        """Buffers, journals, and what only forward and backward need."""
        self._excluded: set[tuple[str, Version]] = set()

    def add(self, source: Version, entry: SegmentEntry, copies: Collection[Replica]) -> None:
        """Add the records of a file.

        Args:
            source: that the records are of.
            entry: the file; it may be one of several of its step.
            copies: that have the file.
        """
        known: dict[int, bool] = {}
        for record in entry.records:
            steps = self._full[record.operator, source] if record.kind == FULL else self._others[source]
            records = steps.setdefault(entry.step, {})
            if known.setdefault(id(records), bool(records)) and record.name not in records:
                continue  # cut otherwise than what is known already
            replicas = records.setdefault(record.name, Replicas(record))
            if (replicas.record.digest, replicas.record.nbytes) == (record.digest, record.nbytes):
                replicas.places += [Place(copy, entry, record.offset) for copy in copies]
                replicas.places.sort(key=lambda place: CHEAPEST.index(place.copy.source))

    @property
    def operators(self) -> list[str]:
        """Names of operators of which there is a full state."""
        return list(dict.fromkeys(operator for operator, _ in self._full))

    def exclude(self, operator: str, source: Version) -> None:
        """Drop an operator of that version from what is offered: it turned out bad."""
        self._excluded.add((operator, source))

    def operator(self, operator: str, source: Version) -> ReplicasByName:
        """Return the full state of an operator as of the last step of a generation."""
        return self._full.get((operator, source), {}).get(source.generation.step, {})

    def step(self, source: Version, step: int) -> ReplicasByName:
        """Return all records of one step of a generation, of whatever kind."""
        tables = [self._others.get(source, {}), *(each for (_, of), each in self._full.items() if of == source)]
        return {name: replicas for table in tables for name, replicas in table.get(step, {}).items()}

    def local(self, generation: GenerationId, name: str) -> Replicas | None:
        """Return a record of that name, of no operator, in whatever there is of a generation, where it need not be fetched."""
        for source in sorted(each for each in self._others if each.generation == generation):
            if (replicas := self._others[source].get(generation.step, {}).get(name)) is not None:
                places = [each for each in replicas.places if each.copy.source != "peer"]
                if places:
                    return Replicas(replicas.record, places)
        return None

    def offered(self, operators: Iterable[str]) -> dict[str, list[tuple[Version, int]]]:
        """Return the versions that have something of operators, each with its number of elements."""
        found: dict[str, list[tuple[Version, int]]] = {name: [] for name in operators}
        for operator, source in self._full:
            if operator in found and (operator, source) not in self._excluded:
                held = self.operator(operator, source).values()
                numel = sum(each.record.numel for each in held if each.record.state_key == PARAM)
                found[operator].append((source, numel))
        return found


def stored_index(marker: RankMarker, older: Iterable[ReferencedEntry] | None = None) -> RecordIndex:
    """Return what storage has of a rank's part of a generation.

    Args:
        marker: names its own files.
        older: older files that have something of it; by default all that the marker names.
    """
    named = [*marker.referenced, *marker.spares] if older is None else older
    index = RecordIndex()
    files = [(marker.generation, entry) for entry in marker.segments] + [(e.generation, e.segment) for e in named]
    for generation, entry in files:
        index.add(Version(generation, ""), entry, [stored(Version(generation, ""), marker.rank)])
    return index


_VERIFIED_NBYTES = 4 * 2**20
"""Bytes of neighbours that one thread verifies at once, roughly."""


def neighbours(
    files: Sequence[SegmentEntry], layout: SegmentLayout, copies: Sequence[Replica]
) -> list[WantedNeighbours] | None:
    """Return what fills a layout from the files of one step, of which every copy has all.

    Args:
        files: one behind the other.
        layout: of their records, in the order in which they lie there.
        copies: cheapest first.

    Returns:
        Stretches of neighbours; `None` if the files do not have those records.
    """
    found: list[WantedNeighbours] = []
    first = 0
    for entry in files:
        table = RecordColumns.of(entry.records).by_offset()
        own = slice(first, first + len(table.name))
        first = own.stop
        dtypes = {code: dtype_of(code) for code in set(table.dtype)}
        wanted = [*layout.names[own]], [dtype for dtype, _ in layout.kinds[own]], layout.sizes[own].tolist()
        if wanted != ([*table.name], list(map(dtypes.__getitem__, table.dtype)), [*table.nbytes]):
            return None
        found += _stretches(entry, table, layout.offsets[own], layout.sizes[own], copies)
    return found if first == len(layout.names) else None


def _stretches(
    entry: SegmentEntry, table: RecordColumns, starts: Column, sizes: Column, copies: Sequence[Replica]
) -> Iterator[WantedNeighbours]:
    """Yield the records of a file that are not empty, as stretches that lie there as in the buffer."""
    offsets, names, digests = np.array(table.offset, np.int64), table.name, table.digest
    if not sizes.all():
        (kept,) = np.nonzero(sizes)
        starts, sizes, offsets = starts[kept], sizes[kept], offsets[kept]
        names, digests = ([column[i] for i in kept.tolist()] for column in (names, digests))
    if not sizes.size:
        return
    moved, gaps = np.diff(starts - offsets) != 0, starts[1:] - (starts + sizes)[:-1]
    full = np.diff((np.cumsum(sizes) - sizes) // _VERIFIED_NBYTES) > 0
    cuts = np.flatnonzero(moved | (gaps < 0) | (gaps >= FILLER_NBYTES) | full) + 1
    for begin, end in pairwise([0, *cuts.tolist(), sizes.size]):
        start = int(starts[begin])
        yield WantedNeighbours(
            *(
                names[begin] if end - begin == 1 else f"{names[begin]} to {names[end - 1]}",
                start,
                int(starts[end - 1] + sizes[end - 1]) - start,
                "",
            ),
            [Place(copy, entry, int(offsets[begin])) for copy in copies],
            names=names[begin:end],
            starts=starts[begin:end].tolist(),
            sizes=sizes[begin:end].tolist(),
            digests=digests[begin:end],
        )


def newest_whole(
    offered: Mapping[str, Mapping[Version, int]], sizes: Mapping[str, int]
) -> tuple[dict[str, Version], list[str]]:
    """Choose the generation from which every operator comes.

    Args:
        offered: elements that all ranks together can be given, by operator and generation.
        sizes: elements of every operator.

    Returns:
        The newest generation that supplies all of it, by operator; and the operators that none does.
    """
    chosen, missing = {}, []
    for name, size in sizes.items():
        whole = [source for source, numel in offered.get(name, {}).items() if numel == size]
        if whole:
            chosen[name] = max(whole)
        else:
            missing.append(name)
    return chosen, missing
