"""What the first partial generations of an incarnation are built on: the newest one that storage has of the run.

If there is none, or it cannot be read, the first one that this life stores is a whole one.
"""

from __future__ import annotations

import logging

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.session._exchange import Exchange
from lightning_moe_ckpt.session._found import Found
from lightning_moe_ckpt.session._persist import STORAGE, PersistWorker
from lightning_moe_ckpt.session._tiers import Tiers
from lightning_moe_ckpt.storage import Commit, RankMarker, RunStore

log = logging.getLogger(__name__)


def build_on_stored(
    store: RunStore, exchange: Exchange, tiers: Tiers, worker: PersistWorker, found: Found | None
) -> None:
    """Generations of this life may take what they lack from the newest that is committed, if all can read it. Collective.

    Args:
        store: of the run, its epoch open.
        exchange: between ranks.
        tiers: told that storage has it.
        worker: of storage on this rank.
        found: what this life resumes from.
    """
    chosen = None if found is None else found.chosen
    # Of what was bad twice, or is nowhere, the newest commit names no copy that the next one could borrow.
    completes = chosen is None or not (chosen.missing or any(sum(each.values()) > 1 for each in chosen.bad.values()))
    try:
        stored = exchange.told(lambda: [commit.to_bytes() for commit in store.candidates()[:1]])
        assert isinstance(stored, list)
        for each in stored:
            marker = _build_on(Commit.from_bytes(each, "commit of the coordinator"), store, exchange, worker)
            if completes and marker is not None:
                tiers.build_on(STORAGE, marker.generation)
    except CheckpointError as error:  # on every rank
        log.warning("nothing is built on what storage has, the next generation is stored whole: %s", error)


def _build_on(commit: Commit, store: RunStore, exchange: Exchange, worker: PersistWorker) -> RankMarker | None:
    markers: list[RankMarker] = []
    with exchange.together():
        markers.append(store.read_marker(commit, exchange.rank))
    if len(commit.steps) != 1:
        return None  # a window of several steps holds no states of one step
    worker.build_on(markers[0])
    return markers[0]
