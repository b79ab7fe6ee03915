"""Who holds which rank's part of which generation: what every process finds in memory it can reach, and the commits.

Processes of one node find the same copies. A copy counts once, however many of them could read it: it is lost, or bad,
for all of them at once.

Source: TierCheck (2025), Fig. 5, for what ranks resume from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from lightning_moe_ckpt.storage import GenerationId
from lightning_moe_ckpt.tiers import STORAGE, TierName

T = TypeVar("T")


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """A generation under one plan. Copies in different tiers may hold more or fewer of its files. Ordered by age."""

    generation: GenerationId
    plan_hash: str

    def __str__(self) -> str:
        return f"{self.generation}, plan {self.plan_hash[:8]}"


@dataclass(frozen=True, slots=True)
class Item:
    """One rank's part of a version in a tier."""

    version: Version
    owner: int
    tier: str
    """Name of the tier among those of the process that lists it."""


@dataclass(frozen=True, slots=True)
class Stock:
    """What one process can read from memory."""

    memory: str
    """Names the memory: equal for processes that find the same copies, see `memory_of`."""
    items: tuple[Item, ...]
    seen: Mapping[Version, GenerationId] = field(default_factory=dict)
    """The newest commit that was known when a version was taken."""

    def plain(self) -> list[object]:
        """As plain values, for an exchange."""
        rows = [
            [
                *plain_version(each.version),
                *(each.owner, each.tier),
                [] if each.version not in self.seen else plain_version(Version(self.seen[each.version], "")),
            ]
            for each in self.items
        ]
        return [self.memory, *rows]

    @classmethod
    def from_plain(cls, value: object) -> Stock:
        """The inverse of `plain`."""
        assert isinstance(value, list)
        items = tuple(Item(version_of(row[:4]), row[4], row[5]) for row in value[1:])
        seen = {version_of(row[:4]): version_of(row[6]).generation for row in value[1:] if row[6]}
        return cls(value[0], items, seen)


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of one rank's part of a version, as seen by that rank."""

    source: TierName
    memory: str
    """Whose memory, as in `Stock`; empty for storage."""
    tier: str
    """Name of the tier among those of its readers."""
    readers: tuple[int, ...]
    """Ranks that can read it: the owner itself, or ranks on the peer's node."""
    version: Version
    """What it is a copy of."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What all ranks can read."""

    stocks: tuple[Stock, ...]
    """By rank."""
    committed: frozenset[Version]
    """Whole in storage, for every rank."""
    sources: frozenset[Version] = frozenset()
    """In storage only for what others refer to them: their own files are there, what they referenced may not be."""

    @classmethod
    def of(
        cls,
        stocks: Iterable[object],
        committed: Iterable[Version],
        sources: Iterable[Version] = (),
    ) -> Inventory:
        """From what every rank said of its memory in plain values, and the commits."""
        return cls(tuple(Stock.from_plain(stock) for stock in stocks), frozenset(committed), frozenset(sources))

    @property
    def world_size(self) -> int:
        """Ranks that take part."""
        return len(self.stocks)

    @property
    def seen(self) -> dict[Version, GenerationId]:
        """Of versions in memory, the newest commit that any rank knew of when it took its part."""
        found: dict[Version, GenerationId] = {}
        for stock in self.stocks:
            for version, commit in stock.seen.items():
                found[version] = max(commit, found.get(version, commit))
        return found

    @property
    def in_memory(self) -> frozenset[Version]:
        """What some rank has a part of in memory, whether or not others have theirs."""
        return frozenset(item.version for stock in self.stocks for item in stock.items)

    @property
    def all_versions(self) -> frozenset[Version]:
        """What there is, of whatever rank, wherever."""
        return self.in_storage | self.in_memory

    @property
    def in_storage(self) -> frozenset[Version]:
        """What storage has files of."""
        return self.committed | self.sources

    def versions(self, owner: int) -> frozenset[Version]:
        """What of one rank is somewhere."""
        held = (item.version for stock in self.stocks for item in stock.items if item.owner == owner)
        return self.committed.union(held)

    def usable(self, alive: Collection[Version]) -> list[Version]:
        """Versions that every rank can be given its part of, newest first.

        The smallest of the newest that each rank has would not do: it may be one that another rank lacks. Two incarnations
        can hold the same step with different bits, so versions name theirs, and the plan.

        Args:
            alive: versions that the run's log allows.
        """
        everywhere = frozenset.intersection(*(self.versions(owner) for owner in range(self.world_size)))
        return sorted(everywhere.intersection(alive), reverse=True)

    def copies(self, version: Version, owner: int) -> list[Replica]:
        """Copies of one rank's part of a version, cheapest first; peers in an order of the owner's own."""
        found = self._in_memory(version, owner)
        own = self.stocks[owner].memory
        host = [Replica("host", own, tier, (owner,), version) for memory, tier in found if memory == own]
        peers = [
            Replica("peer", memory, tier, tuple(_rotated(ranks, owner)), version)
            for (memory, tier), ranks in found.items()
            if memory != own
        ]
        storage = [Replica("storage", "", STORAGE, (owner,), version)] if version in self.in_storage else []
        return [*host, *_rotated(peers, owner), *storage]

    def _in_memory(self, version: Version, owner: int) -> dict[tuple[str, str], list[int]]:
        """Readers by memory and tier, ascending."""
        found: dict[tuple[str, str], list[int]] = {}
        for rank, stock in enumerate(self.stocks):
            for item in stock.items:
                if (item.version, item.owner) == (version, owner):
                    found.setdefault((stock.memory, item.tier), []).append(rank)
        return found


def memory_of(directory: Path) -> str:
    """A name for the memory behind a directory, equal for all processes that find the same files there.

    Containers on one machine may each mount a tmpfs of their own under the same path, so the path does not decide.
    """
    place = directory.stat()
    boot = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else os.uname().nodename
    return f"{boot}:{place.st_dev}:{place.st_ino}"


def is_partial(policy: Mapping[str, object]) -> bool:
    """Whether a generation holds some experts only, by what its markers say of the policy."""
    plan = _record(policy).get("plan")
    return isinstance(plan, dict) and plan.get("partial") is True


def _record(policy: Mapping[str, object]) -> dict[str, object]:
    text = policy.get("plan")
    record = json.loads(text) if isinstance(text, str) else None
    return record if isinstance(record, dict) else {}


def plain_versions(versions: Iterable[Version]) -> list[object]:
    """Versions as plain values, for an exchange."""
    return [plain_version(version) for version in versions]


def version_of(row: Sequence[object]) -> Version:
    """One of `plain_versions`."""
    step, incarnation, nonce, plan_hash = row
    assert isinstance(step, int)
    assert isinstance(incarnation, int)
    return Version(GenerationId(step=step, incarnation=incarnation, nonce=str(nonce)), str(plan_hash))


def plain_version(version: Version) -> list[object]:
    """A version as plain values."""
    generation = version.generation
    return [generation.step, generation.incarnation, generation.nonce, version.plan_hash]


def _rotated(items: Sequence[T], by: int) -> list[T]:
    start = by % len(items) if items else 0
    return [*items[start:], *items[:start]]
