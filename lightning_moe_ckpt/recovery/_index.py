"""Index of one rank's records: by operator, step and kind, in all tiers.

Generations may cut an operator differently among its ranks, so nothing here assumes equal cuts: a generation supplies
an operator if all ranks' shards add up to the whole operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

import numpy as np

from lightning_moe_ckpt.native import Column
from lightning_moe_ckpt.recovery._assembly import FILLER_NBYTES, Place, WantedNeighbours
from lightning_moe_ckpt.recovery._inventory import Replica, Version, stored
from lightning_moe_ckpt.storage import (
    GenerationId,
    Numbered,
    RankMarker,
    RecordColumns,
    RecordEntry,
    ReferencedEntry,
    SegmentEntry,
    SegmentLayout,
    dtype_of,
    spelled,
)
from lightning_moe_ckpt.tiers import CHEAPEST, is_differential

FULL, PARAM = "full", "param"
"""Kind of a whole state in markers, and state key of the parameter itself."""


@dataclass(slots=True)
class Replicas:
    """A record, and its places, cheapest first."""

    record: RecordEntry
    places: list[Place] = field(default_factory=list)


ReplicasByName = dict[str, Replicas]


@dataclass(frozen=True, slots=True)
class LinkSource:
    """A file with one boundary of a chain, and its copies."""

    entry: SegmentEntry
    copies: Sequence[Replica]
    is_base: bool
    """Whether the file holds the full state; else a difference to the boundary before."""


Links = Mapping[int, Sequence[LinkSource]]
"""Links of a chain by step; cheapest sources first."""


def add_links(links: dict[int, list[LinkSource]], marker: RankMarker, own: Sequence[Replica], rank: int) -> None:
    """Add the links that a marker names, unless links added before contradict them; arguments as of `named_links`."""
    for link in named_links(marker, own, is_base=not is_differential(marker.policy), rank=rank):
        known = links.setdefault(link.entry.step, [])
        if not known or (known[0].entry.digest, known[0].is_base) == (link.entry.digest, link.is_base):
            known.append(link)


def named_links(
    marker: RankMarker, own: Sequence[Replica], *, is_base: bool, rank: int | None = None
) -> Iterator[LinkSource]:
    """Yield the links of a chain that a marker, of a base or of differences, names: its own files, then the files it follows on,
    the base first.
    """
    for entry in marker.segments:
        yield LinkSource(entry, own, is_base)
    for number, each in enumerate(() if is_base else marker.referenced):
        yield LinkSource(each.segment, [stored(Version(each.generation, ""), marker.rank, rank)], number == 0)


class RecordIndex:
    """Records that one rank can be given. If two files contradict each other, the file added first is right."""

    def __init__(self) -> None:
        self._full: dict[tuple[str, Version], dict[int, ReplicasByName]] = defaultdict(dict)
        """Full states, by operator."""
        self._others: dict[Version, dict[int, ReplicasByName]] = defaultdict(dict)
        """Buffers, journals, and compute weights."""
        self._excluded: set[tuple[str, Version]] = set()

    def add(self, source: Version, entry: SegmentEntry, copies: Collection[Replica]) -> None:
        """Add a file's records; a step may have several files."""
        known: dict[int, bool] = {}
        for record in entry.records:
            steps = self._full[record.operator, source] if record.kind == FULL else self._others[source]
            records = steps.setdefault(entry.step, {})
            if known.setdefault(id(records), bool(records)) and record.name not in records:
                continue  # cut otherwise than the known records
            replicas = records.setdefault(record.name, Replicas(record))
            if (replicas.record.digest, replicas.record.nbytes) == (record.digest, record.nbytes):
                replicas.places += [Place(copy, entry, record.offset) for copy in copies]
                replicas.places.sort(key=lambda place: CHEAPEST.index(place.copy.source))

    @property
    def operators(self) -> list[str]:
        """Names of operators with a full state."""
        return list(dict.fromkeys(operator for operator, _ in self._full))

    def exclude(self, operator: str, source: Version) -> None:
        """Stop offering a version's copy of an operator, since it is bad."""
        self._excluded.add((operator, source))

    def operator(self, operator: str, source: Version) -> ReplicasByName:
        """Return an operator's full state as of a generation's last step."""
        return self._full.get((operator, source), {}).get(source.generation.step, {})

    def step(self, source: Version, step: int) -> ReplicasByName:
        """Return a generation's records at one step, of any kind."""
        tables = [self._others.get(source, {}), *(each for (_, of), each in self._full.items() if of == source)]
        return {name: replicas for table in tables for name, replicas in table.get(step, {}).items()}

    def local(self, generation: GenerationId, name: str) -> Replicas | None:
        """Return a generation's record `name`, of no operator, with its places that need no fetch; `None` without."""
        for source in sorted(each for each in self._others if each.generation == generation):
            replicas = self._others[source].get(generation.step, {}).get(name)
            if replicas is not None and (places := [each for each in replicas.places if each.copy.source != "peer"]):
                return Replicas(replicas.record, places)
        return None

    def offered(self, operators: Iterable[str]) -> dict[str, list[tuple[Version, int]]]:
        """Return, by operator, the versions with a part of its full state, each with the elements of that part."""
        found: dict[str, list[tuple[Version, int]]] = {name: [] for name in operators}
        for operator, source in self._full:
            if operator in found and (operator, source) not in self._excluded:
                held = self.operator(operator, source).values()
                numel = sum(each.record.numel for each in held if each.record.state_key == PARAM)
                found[operator].append((source, numel))
        return found


def stored_index(marker: RankMarker, older: Iterable[ReferencedEntry] | None = None) -> RecordIndex:
    """Return the index of a rank's part of a generation in storage, with `older` files or all that the marker references."""
    named = [*marker.referenced, *marker.spares] if older is None else older
    index = RecordIndex()
    files = [(marker.generation, entry) for entry in marker.segments] + [(e.generation, e.segment) for e in named]
    for generation, entry in files:
        index.add(Version(generation, ""), entry, [stored(Version(generation, ""), marker.rank)])
    return index


VERIFIED_NBYTES = 4 * 2**20
"""Approximate bytes of records that one thread verifies at once."""


def neighbours(
    files: Sequence[SegmentEntry], layout: SegmentLayout, copies: Sequence[Replica]
) -> list[WantedNeighbours] | None:
    """Return the stretches of neighbours that fill a layout from the files of one step, in its order; `None` if these
    do not have the layout's records. Every copy, cheapest first, has all the files.
    """
    tables = [RecordColumns.of(entry.records).by_offset() for entry in files]
    dtypes = dict(zip(dict.fromkeys(dtype for dtype, _ in layout.kinds.distinct), count(), strict=False))
    found: list[WantedNeighbours] = []
    first = 0
    for entry, table in zip(files, tables, strict=True):
        own, codes = slice(first, first := first + len(table.name)), Numbered.of(table.dtype)
        known = np.array([dtypes.get(dtype_of(code), -1) for code in codes.distinct], np.int64)[codes.number]
        wanted = np.array([dtypes[dtype] for dtype, _ in layout.kinds.distinct], np.int64)[layout.kinds.number[own]]
        if not (np.array_equal(known, wanted) and np.array_equal(np.asarray(table.nbytes), layout.sizes[own])):
            return None
        found += _stretches(entry, table, layout.offsets[own], layout.sizes[own], copies)
    return found if first == len(layout.sizes) and layout.spelled_names == spelled_names(tables) else None


def spelled_names(tables: Iterable[RecordColumns]) -> bytes:
    """Return the names of records in JSON, with commas between them."""
    return b",".join([spelled(table.name, 0, len(table.name)) for table in tables if table.name])


def _stretches(
    entry: SegmentEntry, table: RecordColumns, starts: Column, sizes: Column, copies: Sequence[Replica]
) -> Iterator[WantedNeighbours]:
    """Yield a file's non-empty records, as stretches of the same order and distances as in the buffer."""
    offsets, names, digests = np.asarray(table.offset, np.int64), table.name, table.digest
    if not sizes.all():
        (kept,) = np.nonzero(sizes)
        starts, sizes, offsets = starts[kept], sizes[kept], offsets[kept]
        names, digests = ([column[i] for i in kept.tolist()] for column in (names, digests))
    if not sizes.size:
        return
    moved, gaps = np.diff(starts - offsets) != 0, starts[1:] - (starts + sizes)[:-1]
    full = np.diff((np.cumsum(sizes) - sizes) // VERIFIED_NBYTES) > 0
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
            names=lambda begin=begin, end=end: names[begin:end],  # type: ignore[misc]
            starts=starts[begin:end],
            sizes=sizes[begin:end],
            digests=spelled(digests, begin, end),
        )


def newest_whole(
    offered: Mapping[str, Mapping[Version, int]], sizes: Mapping[str, int]
) -> tuple[dict[str, Version], list[str]]:
    """Return the newest generation that supplies the whole operator, by operator; and the operators without any.

    Elements available to all ranks together are `offered`, by operator and generation.
    """
    chosen, missing = {}, []
    for name, size in sizes.items():
        if whole := [source for source, numel in offered.get(name, {}).items() if numel == size]:
            chosen[name] = max(whole)
        else:
            missing.append(name)
    return chosen, missing
