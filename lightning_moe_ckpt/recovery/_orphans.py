"""Memory kept for a run's next start: generations missing in storage that the next start may restore.

A partial generation is put together from each operator's newest copy. Storage may have the generation, but older copies
of some operators than memory: then memory is still needed.

A rank by itself often knows too little: only the coordinator sees a commit at once, and only a writer sees that a later
start has taken over. So an ending incarnation asks storage, for a moment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import Empty, SimpleQueue

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.snapshot import PlanRecord
from lightning_moe_ckpt.storage import Commit, GenerationId, RankMarker, RunStore
from lightning_moe_ckpt.tiers import RankMemory

log = rank_logger(__name__)

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
    """Return whether no later start would restore this rank's memory.

    Args:
        memory: of this rank.
        known: durable generations known without asking storage.
        store: asked if `known` is older than memory; with `None` memory then counts as needed.
        stored: returns this rank's marker of a known generation, which may be partial; a generation without a marker
            counts as having less than memory.
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
    """Return whether storage says in time that no start would restore memory. Without an answer, closes the store."""
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
