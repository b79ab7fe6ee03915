"""Bringing every rank its part of a lossy generation: the dense part as of it, each expert from where it is newest.

A lossy generation holds some experts only. Every other expert comes from the newest older generation that ranks can
put it together from, whatever tiers and nodes that takes. Ranks agree on it expert by expert; an expert that turns out
bad everywhere comes from the next older generation, and the generation is given up when one has no copy left at all,
unless it may come back without.

Markers are read as far back as needed: those of every generation in memory, and in storage that of the newest
commit, which says where older files hold what it lacks, and a second copy of it; then those of older commits, at last
of those that are only there for what others borrow.

Source: PEC/MoC (2024), Sec. 3.2 (two-level recovery); we differ in agreeing per expert, on what every rank verified.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lightning_moe_ckpt.recovery._agreement import Offer
from lightning_moe_ckpt.recovery._assembly import Assembly, Place, Wanted
from lightning_moe_ckpt.recovery._carriage import Carriage, read_local
from lightning_moe_ckpt.recovery._inventory import Copy, Inventory, Version, level_of, plain_version, version_of
from lightning_moe_ckpt.recovery._markers import MarkerSearch
from lightning_moe_ckpt.recovery._reader import UNREADABLE, Reader
from lightning_moe_ckpt.recovery._rounds import Rounds
from lightning_moe_ckpt.recovery._schedule import CHUNK_NBYTES
from lightning_moe_ckpt.recovery._supply import PARAM, Held, Origin, Supply, newest_whole
from lightning_moe_ckpt.recovery._transport import Transport
from lightning_moe_ckpt.storage import GenerationId, RankMarker, SegmentLayout

log = logging.getLogger(__name__)

MEMORY, STORAGE, PEER = "memory", "storage", "peer"
"""Levels at which copies are held; `peer`: on other nodes, under plans that send them what storage gets."""

_LEVELS = (MEMORY, STORAGE, PEER)

_NAMED = 16
"""Experts without a copy of which a message says where the last ones were."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A piece of one parameter of an expert, and the rank that brings it."""

    fqn: str
    global_start: int
    numel: int
    writer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What ranks agreed on, equal on all; experts by name."""

    generations: Mapping[str, GenerationId]
    """From which generation each expert comes."""
    tiles: Mapping[str, Sequence[Tile]]
    """Pieces of each expert over all ranks, in the order of ranks."""
    levels: Mapping[str, frozenset[str]]
    """Levels that hold all of that copy."""
    bad: Mapping[str, Mapping[GenerationId, bool]] = field(default_factory=dict)
    """Generations whose copy of an expert turned out bad, newest first, and whether storage had that."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Experts of which there is no good copy, and where those were that turned out bad."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patchwork:
    """One rank's part of a lossy generation, put together and verified record by record."""

    marker: RankMarker
    """Of the generation itself."""
    segment: torch.Tensor
    """uint8, laid out as was asked for."""
    layout: SegmentLayout
    nbytes: dict[Copy, int]
    """Bytes read, by copy."""
    chosen: Chosen


class Mosaic:
    """One attempt at one lossy generation; all ranks make it together, and every method is collective.

    Args:
        transport: to the other ranks.
        reader: of what this rank reaches.
        inventory: of all ranks.
        offer: what to bring.
        alive: versions that the run's log allows; experts may come from those.
        digests: what manifests say of this rank's markers, by version in storage.
        allow_missing: go on without the experts of which there is no good copy.
        chunk_nbytes: most bytes per message.
    """

    def __init__(
        self,
        transport: Transport,
        reader: Reader,
        inventory: Inventory,
        offer: Offer,
        alive: Collection[Version],
        *,
        digests: Mapping[Version, str],
        allow_missing: bool = False,
        chunk_nbytes: int = CHUNK_NBYTES,
    ) -> None:
        self._transport, self._reader, self._inventory, self.offer = transport, reader, inventory, offer
        self._digests, self._allow_missing = digests, allow_missing
        self.missing: dict[str, str] = {}
        """Experts of which no good copy was found, and where the bad ones were; the same on all ranks."""
        self._bad: dict[str, dict[GenerationId, bool]] = {}
        self._reasons: dict[str, list[str]] = {}
        self._rounds = Rounds(transport)
        self._carriage = Carriage(self._rounds, reader, f"{offer.generation}, family {offer.family[:8]}", chunk_nbytes)
        self._reachable = sorted((each for each in alive if each.generation <= offer.generation), reverse=True)
        in_storage = [each for each in self._reachable if each in inventory.committed]
        lenders = [each for each in self._reachable if each in inventory.lenders]
        self._deeper = [*in_storage[1:], *lenders]
        """Commits whose markers were not needed yet, newest first; behind them those that are only there for others."""
        self._first = [*in_storage[:1], *(each for each in self._reachable if each in inventory.in_memory)]
        self._markers: dict[Version, RankMarker] = {}
        self._supply = Supply(inventory, transport.rank, ())

    @property
    def reasons(self) -> list[str]:
        """Why the generation was given up, the same on all ranks."""
        return self._rounds.reasons

    def marker(self) -> RankMarker | None:
        """This rank's marker of the generation; `None`, on all ranks, if one of them has none."""
        wanted = [*self.offer.versions, *self._first]
        if not self._read_markers(wanted, required=self.offer.versions):
            return None
        preferred = sorted((v for v in self.offer.versions if v in self._markers), key=self._cost)
        return self._markers[preferred[0]]

    def bring(
        self, marker: RankMarker, experts: Mapping[str, int], lay_out: Callable[[Chosen], SegmentLayout]
    ) -> Patchwork | None:
        """Everything of this rank; `None`, on all ranks, if something has no good copy left.

        Args:
            marker: what `marker` returned.
            experts: elements of every expert operator that this rank holds.
            lay_out: where this rank wants its records: by their names in markers, for tiles of experts that it brings.
        """
        self._supply = Supply(self._inventory, self._transport.rank, experts)
        for version in sorted(self._markers, key=self._doubt):
            self._supply.add(version, self._markers[version])
        while (origins := self._agree(experts)) is not None:
            chosen = self._describe(origins, experts)
            layout = lay_out(chosen)
            buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
            layout.write_header(buffer)
            parts, broken = self._assemblies(layout, buffer, {e: origins[e] for e in experts if e in origins})
            if not self._carriage.carry(list(parts.values()), broken):
                return None
            if not self._exclude_lost(parts, origins):
                supplied = sum((part.supplied for part in parts.values()), Counter[Copy]())
                return Patchwork(marker=marker, segment=buffer, layout=layout, nbytes=dict(supplied), chosen=chosen)
        return None

    def tell(
        self, generations: Collection[GenerationId], name: str, extract: Callable[[memoryview], object]
    ) -> dict[GenerationId, object]:
        """What generations say in a record that every rank has of its own, and that says the same on all.

        Args:
            generations: that were chosen; the same on all ranks.
            name: of the record.
            extract: makes a plain value of its bytes, or raises `Corrupt`.

        Returns:
            By generation, from the first rank that can read its record; nothing of those that nobody can.
        """
        missing, told = sorted(generations), dict[GenerationId, object]()
        self._add_markers([each for each in self._reachable if each.generation in generations])
        given_up: set[GenerationId] = set()
        while True:
            able = [each for each in missing if each not in given_up and self._local(each, name)]
            rows = self._transport.gather_values([missing.index(each) for each in able])
            readers = {missing[i]: rank for rank, row in reversed(list(enumerate(rows))) for i in _integers(row)}
            if not readers:
                return told
            own = [each for each, rank in readers.items() if rank == self._transport.rank]
            values = {each: self._extracted(each, name, extract) for each in own}
            given_up.update(each for each, value in values.items() if value is None)
            said = self._transport.gather_values([[missing.index(each), value] for each, value in values.items()])
            found = {missing[i]: value for row in said for i, value in _pairs(row) if value is not None}
            told |= found
            given_up |= found.keys()

    # -- markers

    def _doubt(self, version: Version) -> tuple[bool, bool]:
        """Manifests vouch for what is committed; copies under a plan of their own may be less exact than what they copy."""
        return version not in self._inventory.in_storage, self._level(version) == PEER

    def _level(self, version: Version) -> str:
        marker = self._markers.get(version)
        return "" if marker is None else level_of(marker.policy)

    def _place_level(self, place: Place) -> str:
        if place.copy.source == STORAGE:
            return STORAGE
        return PEER if self._level(place.copy.version) == PEER else MEMORY

    def _cost(self, version: Version) -> int:
        """Flavours in memory are preferred: they are read faster, and may hold more."""
        copies = self._inventory.copies(version, self._transport.rank)
        return ("host", "peer", "storage").index(copies[0].source) if copies else 3

    def _read_markers(self, versions: Sequence[Version], *, required: Sequence[Version] = ()) -> bool:
        rank = self._transport.rank
        copies = {v: self._inventory.copies(v, rank) for v in dict.fromkeys(versions) if v not in self._markers}
        found = MarkerSearch(self._rounds, self._reader, copies, self._digests).run(required=required)
        if found is None:
            return False
        self._markers |= found
        return True

    def _read_deeper(self) -> bool:
        """The markers of one more commit; whether there was one."""
        if not self._deeper:
            return False
        self._add_markers([self._deeper.pop(0)])
        return True

    def _add_markers(self, versions: Sequence[Version]) -> None:
        new = [each for each in versions if each not in self._markers]
        self._read_markers(new)
        for version in new:
            if version in self._markers:
                self._supply.add(version, self._markers[version])

    # -- agreement

    def _agree(self, experts: Mapping[str, int]) -> dict[str, Origin] | None:
        """The newest whole copy of every expert of the model; `None` if one has none, and must."""
        while True:
            offered, sizes = self._offered(experts)
            chosen, missing = newest_whole(offered, sizes)
            if not missing:
                return chosen
            if self._read_deeper():
                continue
            self.missing = {name: ", ".join(self._reasons.get(name, ["nothing has one"])) for name in missing}
            if self._allow_missing:
                return chosen
            told = "; ".join(f"{name} ({why})" for name, why in list(self.missing.items())[:_NAMED])
            more = f"; and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            self._rounds.reasons.append(f"no whole copy is left of {len(missing)} experts: {told}{more}")
            return None

    def _offered(self, experts: Mapping[str, int]) -> tuple[dict[str, Counter[Origin]], dict[str, int]]:
        """Elements that all ranks together have of each expert, by generation, and the size of each; in one order."""
        own = {name: list(self._supply.offered(name)) for name in experts}
        origins = sorted({origin for rows in own.values() for origin, _ in rows})
        table = [plain_version(Version(each.generation, each.plan)) for each in origins]
        rows = [[name, size, [[origins.index(o), n] for o, n in own[name]]] for name, size in experts.items()]
        offered: dict[str, Counter[Origin]] = {}
        sizes: dict[str, int] = {}
        for said in self._transport.gather_values([table, rows]):
            assert isinstance(said, list)
            theirs = [Origin(each.generation, each.plan_hash) for each in map(version_of, said[0])]
            for name, size, pairs in said[1]:
                sizes[name] = size
                counts = offered.setdefault(name, Counter())
                for index, numel in pairs:
                    counts[theirs[index]] += numel
        return offered, dict(sorted(sizes.items()))

    def _describe(self, origins: Mapping[str, Origin], experts: Collection[str]) -> Chosen:
        """What all ranks have of the copies that were chosen."""
        own: list[object] = []
        for name in (each for each in experts if each in origins):
            records = self._supply.expert(name, origins[name])
            tiles = [held.record for held in records.values() if held.record.state_key == PARAM]
            rows = [[each.fqn, each.global_start, each.numel] for each in tiles]
            own.append([name, rows, [int(self._all_at(records.values(), level)) for level in _LEVELS]])
        tiles_of: dict[str, list[Tile]] = {name: [] for name in origins}
        levels = {name: set(_LEVELS) for name in origins}
        for writer, said in enumerate(self._transport.gather_values(own)):
            assert isinstance(said, list)
            for name, rows, there in said:
                tiles_of[name] += [Tile(fqn, start, numel, writer) for fqn, start, numel in rows]
                levels[name] -= {level for level, held in zip(_LEVELS, there, strict=True) if not held}
        generations = {name: origin.generation for name, origin in origins.items()}
        held = {name: frozenset(each) for name, each in levels.items()}
        bad = {name: dict(each) for name, each in self._bad.items()}
        return Chosen(generations=generations, tiles=tiles_of, levels=held, bad=bad, missing=dict(self.missing))

    def _all_at(self, records: Collection[Held], level: str) -> bool:
        return all(any(self._place_level(place) == level for place in each.places) for each in records)

    # -- bytes

    def _local(self, generation: GenerationId, name: str) -> tuple[Held, Place] | None:
        """A record of this rank's part of a generation, but for experts, and a copy that it reads itself."""
        for held in self._supply.of_generation(generation, name):
            for place in held.places:
                if place.copy.source != "peer":
                    return held, place
        return None

    def _extracted(self, generation: GenerationId, name: str, extract: Callable[[memoryview], object]) -> object:
        found = self._local(generation, name)
        assert found is not None
        held, place = found
        buffer = torch.empty(held.record.nbytes, dtype=torch.uint8)
        wanted = Wanted(name, 0, held.record.nbytes, held.record.digest, [place])
        part = Assembly(f"{name} of {generation}", buffer, [wanted], may_be_lost=True)
        try:
            for request in part.requests():
                read_local(self._reader, self._transport.rank, request, part.view)
            wanted.verify(part.view)
            part.settle()
            return extract(part.view) if part.done else None
        except UNREADABLE as error:
            log.error("%s of %s: %s; another rank's is read", name, generation, error)
            return None

    def _assemblies(
        self, layout: SegmentLayout, buffer: torch.Tensor, origins: Mapping[str, Origin]
    ) -> tuple[dict[str, Assembly], str]:
        """What is to be brought, by expert, and everything else; and why it cannot fit, if it cannot."""
        base = self._supply.origin(self.offer.versions[0])
        held = {name: ("", each) for name, each in self._supply.rest(base).items()}
        for expert, origin in origins.items():
            held |= {name: (expert, each) for name, each in self._supply.expert(expert, origin).items()}
        wanted: dict[str, list[Wanted]] = {"": [], **{expert: [] for expert in origins}}
        for name, span in layout.spans.items():
            expert, record = held.get(name, ("", None))
            if record is None or record.record.nbytes != span.nbytes:
                return {}, f"its records are not those of this model, optimizer and world, first {name}"
            wanted[expert].append(Wanted(name, span.offset, span.nbytes, record.record.digest, record.places))
        generation = self.offer.generation
        return {
            expert: Assembly(
                f"{expert or 'the dense part'} of {origins[expert].generation if expert else generation}",
                buffer,
                records,
                may_be_lost=bool(expert),
            )
            for expert, records in wanted.items()
        }, ""

    def _exclude_lost(self, parts: Mapping[str, Assembly], origins: Mapping[str, Origin]) -> bool:
        """Note what turned out bad; whether anything did on any rank."""
        lost = {expert: part.lost for expert, part in parts.items() if part.lost}
        for expert, reason in lost.items():
            self._supply.exclude(expert, origins[expert])
            log.error("%s; an older copy of the expert is used", reason)
        own = [
            [e, reason, self._all_at(self._supply.expert(e, origins[e]).values(), STORAGE)]
            for e, reason in lost.items()
        ]
        told = self._transport.gather_values(own)
        for rank, rows in enumerate(told):
            for expert, reason, stored in _losses(rows):
                self._reasons.setdefault(expert, []).append(f"rank {rank}: {reason}")
                bad, generation = self._bad.setdefault(expert, {}), origins[expert].generation
                bad[generation] = stored or bad.get(generation, False)  # ranks know of different copies
        return any(told)


def _losses(rows: object) -> list[tuple[str, str, bool]]:
    assert isinstance(rows, list)
    return [(expert, reason, stored) for expert, reason, stored in rows]


def _integers(row: object) -> list[int]:
    assert isinstance(row, list)
    return row


def _pairs(row: object) -> list[tuple[int, object]]:
    assert isinstance(row, list)
    return [(index, value) for index, value in row]
