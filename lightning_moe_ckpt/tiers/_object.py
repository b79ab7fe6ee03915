"""Read the object tier: committed generations of every rank, whole or by range."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_moe_ckpt.errors import KeyMissing
from lightning_moe_ckpt.storage import Commit, RankMarker, RunStore, SegmentEntry
from lightning_moe_ckpt.tiers._contract import STORAGE, Holding


class ObjectTier:
    """Committed generations of a run.

    Args:
        store: store of the run, on any rank.
        commits: commits that may be restored, as the coordinator found them.
    """

    def __init__(self, store: RunStore, commits: Sequence[Commit]) -> None:
        self._store = store
        self._commits = {commit.generation: commit for commit in commits}

    @property
    def name(self) -> str:
        """Always `storage`."""
        return STORAGE

    def holdings(self) -> list[Holding]:
        """Return one copy per rank and commit, newest first. No bytes are read, and a rank's share of them is not known."""
        newest_first = sorted(self._commits, reverse=True)
        return [holding for generation in newest_first for holding in _holdings(self._commits[generation])]

    def read_marker(self, holding: Holding) -> RankMarker:
        """Return the marker whose digest the manifest has. Raises `Corrupt` if it differs, `KeyMissing` if it is gone."""
        commit = self._commits.get(holding.generation)
        if commit is None:
            raise KeyMissing(f"{self._store.url}: no commit of {holding}.")
        return self._store.read_marker(commit, holding.owner)

    def read_into(self, holding: Holding, entry: SegmentEntry, offset: int, out: memoryview) -> None:
        """Fill `out` with a range of the object."""
        self._store.read_range(entry, offset, out)

    def close(self) -> None:
        """Do nothing: the store belongs to the caller."""


def _holdings(commit: Commit) -> list[Holding]:
    share = commit.nbytes // commit.world_size
    return [
        Holding(generation=commit.generation, plan_hash=commit.plan_hash, owner=owner, nbytes=share)
        for owner in range(commit.world_size)
    ]
