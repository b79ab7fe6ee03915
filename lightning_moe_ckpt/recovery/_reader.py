"""Reading copies that this process can reach without any other, for itself and on behalf of ranks that lost theirs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from lightning_moe_ckpt.errors import Corrupt, KeyMissing
from lightning_moe_ckpt.recovery._assembly import UNREADABLE
from lightning_moe_ckpt.recovery._inventory import Item, Stock, Version
from lightning_moe_ckpt.storage import GenerationId, RankMarker, SegmentEntry
from lightning_moe_ckpt.tiers import Holding, Tier

log = logging.getLogger(__name__)


class Reader:
    """Copies in memory and in storage, as they were when this process looked.

    Args:
        run_id: copies of other runs are refused.
        memory: tiers in memory, with names of their own.
        storage: the tier over commits.
    """

    def __init__(self, run_id: str, memory: Sequence[Tier], storage: Tier) -> None:
        self._run_id = run_id
        self._tiers = {tier.name: tier for tier in (*memory, storage)}
        self._storage = storage.name
        self._holdings: dict[Item, Holding] = {}
        for tier in self._tiers.values():
            for each in _holdings(tier):
                self._holdings.setdefault(Item(Version(each.generation, each.plan_hash), each.owner, tier.name), each)
        self._markers: dict[Item, RankMarker] = {}
        self._lock = threading.Lock()

    @property
    def committed(self) -> frozenset[Version]:
        """Versions in storage."""
        return frozenset(item.version for item in self._holdings if item.tier == self._storage)

    def stock(self, memory: str) -> Stock:
        """What there is in memory, which `memory` names."""
        items = tuple(item for item in self._holdings if item.tier != self._storage)
        seen: dict[Version, GenerationId] = {}
        for item in items:
            if (commit := self._holdings[item].seen) is not None:
                seen[item.version] = max(commit, seen.get(item.version, commit))
        return Stock(memory, items, seen)

    def marker(self, item: Item) -> RankMarker:
        """The marker of a copy.

        Raises:
            Corrupt: it is not what was written, or says that it is of something else.
            KeyMissing: the copy is not here.
        """
        with self._lock:
            if item not in self._markers:
                self._markers[item] = self._read_marker(item)
            return self._markers[item]

    def read_into(self, item: Item, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` with bytes of the file `key`, unverified.

        Raises:
            Corrupt: the marker is bad, or the copy is of another size.
            StorageError: it cannot be read, or is gone.
        """
        entry = next((entry for entry in self.marker(item).segments if entry.key == key), None)
        if entry is None or offset + out.nbytes > entry.nbytes:
            raise Corrupt(f"{item}: has no {out.nbytes} bytes at {offset} of {key}. Another copy may be good.")
        self._tiers[item.tier].read_into(self._holdings[item], entry, offset, out)

    def read_stored(self, version: Version, owner: int, entry: SegmentEntry, offset: int, out: memoryview) -> None:
        """Fill `out` with bytes of a segment in storage, unverified; its key says where it is.

        Raises:
            StorageError: it cannot be read, or is gone.
        """
        holding = Holding(generation=version.generation, plan_hash=version.plan_hash, owner=owner, nbytes=entry.nbytes)
        self._tiers[self._storage].read_into(holding, entry, offset, out)

    def _read_marker(self, item: Item) -> RankMarker:
        if item not in self._holdings:
            raise KeyMissing(f"{item}: not here.")
        marker = self._tiers[item.tier].read_marker(self._holdings[item])
        found = (marker.run_id, marker.generation, marker.plan_hash, marker.rank)
        if found != (self._run_id, item.version.generation, item.version.plan_hash, item.owner):
            raise Corrupt(f"{item}: its marker is of rank {found[3]}, {found[1]} of run {found[0]}. It is skipped.")
        return marker


def _holdings(tier: Tier) -> list[Holding]:
    try:
        return tier.holdings()
    except UNREADABLE as error:
        log.error("the %s tier cannot be read and is left out: %s", tier.name, error)
        return []
