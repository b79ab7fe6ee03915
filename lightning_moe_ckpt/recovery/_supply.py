"""What one rank can be given of every expert: from which generations, and where each record of it lies.

How an expert is cut among the ranks that hold it may differ between generations, so nothing here assumes that it is cut
alike: a generation supplies an expert if the pieces that all ranks can be given of it add up to the whole expert.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_moe_ckpt.recovery._assembly import Place
from lightning_moe_ckpt.recovery._inventory import STORAGE_TIER, Copy, Inventory, Version
from lightning_moe_ckpt.storage import GenerationId, RankMarker, RecordEntry, SegmentEntry

FULL, PARAM = "full", "param"
"""Kind and state key in markers: of whole states, and of the parameter itself."""

_CHEAPEST = ("host", "peer", "storage")


@dataclass(frozen=True, order=True, slots=True)
class Origin:
    """A generation that an expert may come from."""

    generation: GenerationId
    plan: str
    """Family of a lossy generation, else the hash of its plan."""


@dataclass(slots=True)
class Held:
    """One record, and where it may come from."""

    record: RecordEntry
    places: list[Place] = field(default_factory=list)


Records = dict[str, Held]
"""By name."""


class Supply:
    """What one rank can be given, as far as markers say that were added.

    Args:
        inventory: of all ranks.
        rank: whose part.
        experts: names of the expert operators that it holds.
    """

    def __init__(self, inventory: Inventory, rank: int, experts: Collection[str]) -> None:
        self._inventory, self._rank, self._experts = inventory, rank, frozenset(experts)
        self._lent = {each.generation: each for each in inventory.in_storage}
        self._held: dict[str, dict[Origin, Records]] = {}
        self._others: dict[Origin, Records] = {}
        self._excluded: set[tuple[str, Origin]] = set()

    def origin(self, version: Version) -> Origin:
        """Of a version; equal for the flavours of a lossy generation."""
        return Origin(version.generation, self._inventory.families.get(version) or version.plan_hash)

    def add(self, version: Version, marker: RankMarker) -> None:
        """What a marker of this rank says is there; of what two markers contradict each other in, the first is right.

        A window of several steps supplies nothing: its records are no states of one step.
        """
        if len(marker.segments) == 1:
            (entry,) = marker.segments
            copies = self._inventory.copies(version, self._rank)
            self._add(self.origin(version), entry, copies)
        for each in (*marker.borrowed, *marker.spares):
            lent = self._lent.get(each.generation, Version(each.generation, ""))
            self._add(self.origin(lent), each.segment, [_in_storage(lent, self._rank)])

    def exclude(self, expert: str, origin: Origin) -> None:
        """An expert turned out bad there."""
        self._excluded.add((expert, origin))

    def rest(self, origin: Origin) -> Records:
        """Everything but experts that there is of a generation."""
        return self._others.get(origin, {})

    def of_generation(self, generation: GenerationId, name: str) -> list[Held]:
        """A record of that name, of no expert, in whatever there is of a generation."""
        rows = [records for origin, records in sorted(self._others.items()) if origin.generation == generation]
        return [records[name] for records in rows if name in records]

    def expert(self, expert: str, origin: Origin) -> Records:
        """What there is of an expert in a generation."""
        return self._held.get(expert, {}).get(origin, {})

    def offered(self, expert: str) -> Iterator[tuple[Origin, int]]:
        """Generations in which this rank has something of an expert, with the number of elements."""
        for origin, records in self._held.get(expert, {}).items():
            if (expert, origin) not in self._excluded:
                yield origin, sum(held.record.numel for held in records.values() if held.record.state_key == PARAM)

    def _add(self, origin: Origin, entry: SegmentEntry, copies: Sequence[Copy]) -> None:
        known: dict[int, bool] = {}
        for record in entry.records:
            records = self._records_for(origin, record)
            if known.setdefault(id(records), bool(records)) and record.name not in records:
                continue  # cut otherwise than what is known already
            held = records.setdefault(record.name, Held(record))
            if (held.record.digest, held.record.nbytes) == (record.digest, record.nbytes):
                held.places += [Place(copy, entry, record.offset) for copy in copies]
                held.places.sort(key=lambda place: _CHEAPEST.index(place.copy.source))

    def _records_for(self, origin: Origin, record: RecordEntry) -> Records:
        if record.kind == FULL and record.operator in self._experts:
            return self._held.setdefault(record.operator, {}).setdefault(origin, {})
        return self._others.setdefault(origin, {})


def newest_whole(
    offered: Mapping[str, Mapping[Origin, int]], sizes: Mapping[str, int]
) -> tuple[dict[str, Origin], list[str]]:
    """From which generation every expert comes.

    Args:
        offered: elements that all ranks together can be given, by expert and generation.
        sizes: elements of every expert.

    Returns:
        The newest generation that supplies all of it, by expert; and the experts that none does.
    """
    chosen, missing = {}, []
    for expert, size in sizes.items():
        whole = [origin for origin, numel in offered.get(expert, {}).items() if numel == size]
        if whole:
            chosen[expert] = max(whole)
        else:
            missing.append(expert)
    return chosen, missing


def _in_storage(version: Version, owner: int) -> Copy:
    return Copy("storage", "", STORAGE_TIER, (owner,), version)
