"""Inventory of copies: holders of each rank's part of each generation, and reads of copies that this process reaches.

Every process lists its reachable copies in memory, the coordinator the commits. Processes of one node find the same
copies. A copy counts once, however many processes could read it: it is lost, or bad, for all at once.

An incarnation that ends keeps the memory that the next start may restore (`is_superseded`): generations missing in
storage, and partial ones of which storage has older copies of some operators than memory. A rank by itself often knows
too little: only the coordinator sees a commit at once, and only a writer sees that a later start has taken over. So an
ending incarnation asks storage, for a moment.

Source: TierCheck (2026), Fig. 5, for a resume's sources.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.errors import CheckpointError, Corrupt, KeyMissing
from lightning_moe_ckpt.snapshot import PlanRecord
from lightning_moe_ckpt.storage import Commit, GenerationId, RankMarker, RunStore, SegmentEntry
from lightning_moe_ckpt.tiers import STORAGE, Holding, RankMemory, Tier, TierName, machine_name

log = rank_logger(__name__)

T = TypeVar("T")

UNREADABLE = (CheckpointError, OSError)
"""Errors that reading a copy may raise; another copy, or an older version, may still be good."""


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """A generation under one plan. Copies in different tiers may hold more or fewer of its files. Ordered by age."""

    generation: GenerationId
    plan_hash: str

    def __str__(self) -> str:
        return f"{self.generation}, plan {self.plan_hash[:8]}"

    def plain(self) -> list[object]:
        """Return plain values, for an exchange."""
        generation = self.generation
        return [generation.step, generation.incarnation, generation.nonce, self.plan_hash]

    @classmethod
    def from_plain(cls, row: Sequence[object]) -> Version:
        """Invert `plain`."""
        step, incarnation, nonce, plan_hash = row
        assert isinstance(step, int)
        assert isinstance(incarnation, int)
        return cls(GenerationId(step=step, incarnation=incarnation, nonce=str(nonce)), str(plan_hash))


@dataclass(frozen=True, slots=True)
class Item:
    """A rank's part of a version, as one process finds it."""

    version: Version
    owner: int
    file: str
    """Name of the file in memory; empty for storage."""
    whole: bool = field(default=True, compare=False)
    """Whether the whole part is there, not some experts only."""
    world_size: int = field(default=0, compare=False)
    """Number of ranks that wrote the version."""


@dataclass(frozen=True, slots=True)
class Stock:
    """Copies in memory that one process can read."""

    memory: str
    """Name of the memory, equal for processes that find the same copies, see `memory_of`."""
    items: tuple[Item, ...]
    seen: Mapping[Version, GenerationId] = field(default_factory=dict)
    """Newest commit known when each version was taken."""

    def plain(self) -> list[object]:
        """Return plain values, for an exchange."""
        commits = {version: Version(commit, "").plain() for version, commit in self.seen.items()}
        rows = [
            [*each.version.plain(), each.owner, each.file, each.whole, each.world_size, commits.get(each.version, [])]
            for each in self.items
        ]
        return [self.memory, *rows]

    @classmethod
    def from_plain(cls, value: object) -> Stock:
        """Invert `plain`."""
        assert isinstance(value, list)
        memory, *rows = value
        items = tuple(Item(Version.from_plain(row[:4]), *row[4:8]) for row in rows)
        seen = {Version.from_plain(row[:4]): Version.from_plain(row[8]).generation for row in rows if row[8]}
        return cls(memory, items, seen)


@dataclass(frozen=True, slots=True)
class Replica:
    """A copy of one rank's part of a version, from the rank's view."""

    source: TierName
    memory: str
    """Name of the memory as in `Stock`; empty for storage."""
    file: str
    """Name of the file in that memory; empty for storage."""
    readers: tuple[int, ...]
    """Ranks that can read the copy: the owner itself, or ranks on the peer's node."""
    version: Version
    """The copied version."""
    owner: int
    """Rank that wrote the part."""
    whole: bool = True
    """Whether the copy has the whole part, not some experts only."""

    def __str__(self) -> str:
        if self.source != "peer":
            return self.source
        return f"peer (rank{'s' if len(self.readers) > 1 else ''} {', '.join(map(str, sorted(self.readers)))})"


@dataclass(frozen=True, slots=True)
class Request:
    """Bytes of a file to be read from a copy by a rank."""

    copy: Replica
    reader: int
    entry: SegmentEntry
    offset: int
    """First byte in the file."""
    nbytes: int
    start: int
    """First byte in the receiver's buffer."""

    @property
    def end(self) -> int:
        """End in the receiver's buffer."""
        return self.start + self.nbytes


class Offers(NamedTuple):
    """Versions in memory, by all ranks' stocks together."""

    writers: Mapping[Version, int]
    """Number of ranks that wrote each version, 0 where nobody says."""
    seen: Mapping[Version, GenerationId]
    """Newest commit known to any rank at the capture, by version."""
    whole: frozenset[Version]
    """Versions with every writer's part whole in some memory."""


@dataclass(frozen=True)
class Inventory:
    """Readable copies of all ranks' parts, or of one rank's part (`agreed_inventory`)."""

    stocks: Mapping[int, Stock]
    """Stocks by rank."""
    committed: frozenset[Version]
    """Versions whole in storage, for every rank."""
    sources: frozenset[Version] = frozenset()
    """Versions kept in storage only for references to their files; files that they reference themselves may be gone."""
    wrote: Mapping[Version, int] = field(default_factory=dict)
    """Number of ranks that wrote each version in storage; by default as many as there are."""
    agreed: Offers | None = field(default=None, compare=False)
    """Versions in memory, where `stocks` has one rank's part only."""

    @classmethod
    def of(
        cls,
        stocks: Iterable[object],
        committed: Iterable[Version],
        sources: Iterable[Version] = (),
        wrote: Mapping[Version, int] = MappingProxyType({}),
    ) -> Inventory:
        """Return the inventory of all ranks' stocks in plain values, and the commits."""
        return cls(dict(enumerate(map(Stock.from_plain, stocks))), frozenset(committed), frozenset(sources), wrote)

    @cached_property
    def offers(self) -> Offers:
        """Versions in memory, on all ranks together."""
        if self.agreed is not None:
            return self.agreed
        writers, seen = dict[Version, int](), dict[Version, GenerationId]()
        for stock in self.stocks.values():
            for version, commit in stock.seen.items():
                seen[version] = max(commit, seen.get(version, commit))
            for item in stock.items:
                writers[item.version] = writers.get(item.version) or item.world_size
        known = Offers(writers, seen, frozenset())
        return known._replace(whole=frozenset(writers).difference(replace(self, agreed=known).lacking(0, 1)))

    def lacking(self, first: int, step: int) -> list[Version]:
        """Return the versions in memory that lack some part in every stock, among parts `first`, `first + step` and so on."""
        owners: dict[Version, set[int]] = {}
        for (version, owner), found in self.parts.items():
            if any(item.whole for _, _, item in found):
                owners.setdefault(version, set()).add(owner)
        return [v for v in self.in_memory if not owners.get(v, set()).issuperset(range(first, self.writers(v), step))]

    @cached_property
    def parts(self) -> Mapping[tuple[Version, int], Sequence[tuple[int, str, Item]]]:
        """Copies in memory by version and owner, each with a rank that reads it, and the name of the memory."""
        found: dict[tuple[Version, int], list[tuple[int, str, Item]]] = {}
        for reader, stock in self.stocks.items():
            for item in stock.items:
                found.setdefault((item.version, item.owner), []).append((reader, stock.memory, item))
        return found

    @property
    def in_memory(self) -> frozenset[Version]:
        """Versions with some rank's part in memory, with or without the other ranks' parts."""
        return frozenset(self.offers.writers)

    @property
    def in_storage(self) -> frozenset[Version]:
        """Versions with files in storage."""
        return self.committed | self.sources

    @property
    def all_versions(self) -> frozenset[Version]:
        """Versions with some rank's part anywhere."""
        return self.in_storage | self.in_memory

    def usable(self, alive: Collection[Version]) -> list[Version]:
        """Return the versions of which every rank can be given its part, and which are `alive` by the run's log, newest first.

        The smallest of the ranks' newest versions would not do, since another rank may lack it. Two incarnations can hold the same
        step with different bits, so versions name their incarnation, and the plan.
        """
        return sorted(self.offers.whole.union(self.committed).intersection(alive), reverse=True)

    def writers(self, version: Version) -> int:
        """Return the number of ranks that wrote a version."""
        return self.wrote.get(version) or self.offers.writers.get(version) or len(self.stocks)

    def files(self, version: Version, owner: int) -> list[tuple[str, str]]:
        """Return memory and file of each copy of one rank's part of a version, the rank's own first; equal on all ranks."""
        found = ((memory, item.file) for _, memory, item in self.parts.get((version, owner), ()))
        return sorted(dict.fromkeys(found), key=lambda each: ".ring" not in each[1])

    def copies(self, version: Version, owner: int, rank: int | None = None) -> list[Replica]:
        """Return copies of one rank's part of a version as `rank` (default: `owner`) reaches them, cheapest first; peers rotated by
        owner, to spread load.
        """
        rank = owner if rank is None else rank
        readers: dict[tuple[str, str, bool], list[int]] = {}
        for reader, memory, item in self.parts.get((version, owner), ()):
            readers.setdefault((memory, item.file, item.whole), []).append(reader)
        own = self.stocks[rank].memory
        host = [Replica("host", own, file, (rank,), version, owner, whole) for of, file, whole in readers if of == own]
        peers = [
            Replica("peer", memory, file, tuple(_rotated(ranks, owner)), version, owner, whole)
            for (memory, file, whole), ranks in readers.items()
            if memory != own
        ]
        return [*host, *_rotated(peers, owner), *([stored(version, owner, rank)] if version in self.in_storage else [])]


class Reader:
    """Reader of the copies in this node's memory and in storage that existed at its construction; copies of other runs are refused."""

    def __init__(self, run_id: str, memory: Tier, storage: Tier) -> None:
        self._run_id, self._memory, self._storage = run_id, memory, storage
        self._holdings = {
            Item(Version(each.generation, each.plan_hash), each.owner, each.file, each.whole, each.world_size): each
            for each in _holdings(memory)
        }
        self._markers: dict[Item, RankMarker] = {}
        self._lock = threading.Lock()

    def stock(self, memory: str) -> Stock:
        """Return this process's stock of memory; `memory` is the memory's name."""
        items = tuple(item for item in self._holdings if item.file)
        seen: dict[Version, GenerationId] = {}
        for item in items:
            if (commit := self._holdings[item].seen) is not None:
                seen[item.version] = max(commit, seen.get(item.version, commit))
        return Stock(memory, items, seen)

    def marker(self, item: Item) -> RankMarker:
        """Return a copy's marker. Raises `Corrupt` if the marker is damaged or another copy's; `KeyMissing` if the copy is not here."""
        with self._lock:
            if item in self._markers:
                return self._markers[item]
            holding = self._holdings.get(item) if item.file else _stored(item)
            if holding is None:
                raise KeyMissing(f"{item}: not here.")
            marker = (self._memory if item.file else self._storage).read_marker(holding)
            found = (marker.run_id, marker.generation, marker.plan_hash, marker.rank)
            if found != (self._run_id, item.version.generation, item.version.plan_hash, item.owner):
                raise Corrupt(f"{item}: its marker is of rank {found[3]}, {found[1]} of run {found[0]}. It is skipped.")
            self._markers[item] = marker
            return marker

    def read(self, request: Request, out: memoryview) -> None:
        """Fill `out` with bytes from a copy that this rank reaches, unverified. Raises one of `UNREADABLE`."""
        copy, entry = request.copy, request.entry
        if copy.file:
            self.read_into(Item(copy.version, copy.owner, copy.file), entry.key, request.offset, out)
            return
        # The key alone says where a file in storage is, even if another generation's marker references it.
        self._storage.read_into(_stored(Item(copy.version, copy.owner, "")), entry, request.offset, out)

    def read_into(self, item: Item, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` with bytes from file `key` in a copy in memory, unverified. Raises `Corrupt` if the marker is bad,
        or the copy has another size; `StorageError` if the copy cannot be read, or is gone.
        """
        entry = next((entry for entry in self.marker(item).segments if entry.key == key), None)
        if entry is None or offset + out.nbytes > entry.nbytes:
            raise Corrupt(f"{item}: has no {out.nbytes} bytes at {offset} of {key}. Another copy may be good.")
        self._memory.read_into(self._holdings[item], entry, offset, out)


def _stored(item: Item) -> Holding:
    """Return a copy in storage, whether or not the bytes are there."""
    return Holding(generation=item.version.generation, plan_hash=item.version.plan_hash, owner=item.owner, nbytes=0)


def stored(version: Version, owner: int, rank: int | None = None) -> Replica:
    """Return the copy of a rank's part in storage, as `rank` (default: `owner`) reads it."""
    return Replica(STORAGE, "", "", (owner if rank is None else rank,), version, owner)


def places_of(read: Mapping[Replica, int]) -> str:
    """Return bytes read, by their place, in words."""
    places = Counter[str]()
    for copy, nbytes in read.items():
        places[str(copy)] += nbytes
    return ", ".join(f"{size_text(nbytes)} from {place}" for place, nbytes in places.items())


def memory_of(directory: Path) -> str:
    """Return a name for the memory behind a directory, equal for all processes that find the same files there.

    The path does not decide: containers on one machine may each mount their own tmpfs under the same path.
    """
    place = directory.stat()
    return f"{machine_name()}:{place.st_dev}:{place.st_ino}"


def _holdings(tier: Tier) -> list[Holding]:
    try:
        return tier.holdings()
    except UNREADABLE as error:
        log.error("the %s tier cannot be read and is left out: %s", tier.name, error)
        return []


def _rotated(items: Sequence[T], by: int) -> list[T]:
    start = by % len(items) if items else 0
    return [*items[start:], *items[:start]]


# -- whether memory is still needed

_PATIENCE_SECONDS = 1.0
"""Seconds for an answer of storage, after which memory counts as needed."""

_INTERRUPTED_SECONDS = 2.0
"""Seconds for an interrupted call to fail; the thread is a daemon."""


def is_superseded(
    memory: RankMemory,
    known: Iterable[GenerationId | None],
    store: RunStore | None = None,
    *,
    stored: Callable[[GenerationId], RankMarker | None] | None = None,
) -> bool:
    """Return whether no later start would restore this rank's memory. Storage is asked if the durable generations known
    without it are older than memory; with `store=None` memory then counts as needed. `stored` returns this rank's
    marker of a known generation, which may be partial; a generation without a marker counts as having less than memory.
    """
    held = memory.published
    copies = memory.copies if stored is not None else {}
    as_new = [each for each in known if each is not None and each >= max(held, default=each)]
    if not held or any(stored is None or not _has_more(copies, stored(each)) for each in as_new):
        return True
    if store is None:
        return False
    joined, rank = store, memory.rank
    return _nobody_needs(
        held, store, lambda commit: stored is not None and _has_more(copies, joined.read_marker(commit, rank))
    )


def _has_more(copies: Mapping[str, GenerationId], marker: RankMarker | None) -> bool:
    """Return whether memory has a newer copy of some operator than a generation's marker, own or referenced."""
    if marker is None:
        return True
    if not PlanRecord.from_json(str(marker.policy["plan"])).plan.partial:
        return False
    newest = {record.operator: entry.generation for entry in marker.referenced for record in entry.segment.records}
    newest |= {record.operator: marker.generation for segment in marker.segments for record in segment.records}
    return any(operator not in newest or newest[operator] < generation for operator, generation in copies.items())


def _nobody_needs(held: Sequence[GenerationId], store: RunStore, has_more: Callable[[Commit], bool]) -> bool:
    """Return whether storage says, within `_PATIENCE_SECONDS`, that no start would restore generations held in memory.

    False after an error. Without an answer in time, close the store, and return false.
    """
    answers: SimpleQueue[bool] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put(any(store.may_need(generation, has_more) for generation in held))
        except (CheckpointError, OSError) as error:
            log.info("whether memory is still needed cannot be told, it stays: %s", error)
            answers.put(True)

    thread = threading.Thread(target=ask, name="moe-ckpt-leftovers", daemon=True)
    thread.start()
    try:
        return not answers.get(timeout=_PATIENCE_SECONDS)
    except Empty:
        store.close()  # its call fails, and the thread ends
        return False
    finally:
        thread.join(_INTERRUPTED_SECONDS)
