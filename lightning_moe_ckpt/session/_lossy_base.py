"""What the first lossy generations of a life are built on: the newest one that storage has of the run."""

from __future__ import annotations

from lightning_moe_ckpt.session._exchange import Exchange
from lightning_moe_ckpt.session._persist import STORAGE, PersistWorker
from lightning_moe_ckpt.session._tiers import Tiers
from lightning_moe_ckpt.storage import Commit, RankMarker, RunStore


def build_on_stored(store: RunStore, exchange: Exchange, tiers: Tiers, worker: PersistWorker) -> None:
    """Generations of this life may take what they lack from the newest that is committed. Collective.

    Args:
        store: of the run, its epoch open.
        exchange: between ranks.
        tiers: told that storage has it.
        worker: of storage on this rank.

    Raises:
        CheckpointError: on every rank, if one cannot read its marker.
    """
    stored = exchange.told(lambda: [commit.to_bytes() for commit in store.candidates()[:1]])
    assert isinstance(stored, list)
    for each in stored:
        commit = Commit.from_bytes(each, "commit of the coordinator")
        markers: list[RankMarker] = []
        with exchange.together():
            markers.append(store.read_marker(commit, exchange.rank))
        if len(commit.steps) == 1:  # a window of several steps holds no states of one step
            worker.build_on(markers[0])
            tiers.everywhere[STORAGE] = commit.generation
