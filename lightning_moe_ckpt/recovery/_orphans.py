"""Which memory stays for the next start of a run: generations that it may restore, and that storage does not have.

A generation of some operators is put together from the newest copy of each. Storage that has it may still have older
copies of some than memory: then memory is needed, although storage has something as new.

What a rank knows by itself is often too little: that a generation was committed only the coordinator sees at once, and
that a later start has taken over only who writes. So an incarnation that ends asks storage, for a moment.
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
"""Storage that does not answer within it is taken not to have what memory has."""

_INTERRUPTED_SECONDS = 2.0
"""For a call that was interrupted to fail; the thread is a daemon."""


def is_superseded(
    memory: RankMemory,
    known: Iterable[GenerationId | None],
    store: RunStore | None = None,
    *,
    stored: Callable[[GenerationId], RankMarker | None] | None = None,
) -> bool:
    """Return whether no later start would restore what memory holds.

    Args:
        memory: of this rank.
        known: what is durable, as far as is known without asking.
        store: asked if that is not as new; else what memory holds is taken to be needed.
        stored: where generations may have only some operators: this rank's marker of one that is known; without it the
            generation counts as one that has less than memory.
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
    """Return whether memory has a newer copy of some operator than this rank's part of a generation, own or referenced."""
    if marker is None:
        return True
    if not PlanRecord.from_json(str(marker.policy["plan"])).plan.partial:
        return False
    newest = {record.operator: each.generation for each in marker.referenced for record in each.segment.records}
    newest |= {record.operator: marker.generation for each in marker.segments for record in each.records}
    return any(operator not in newest or newest[operator] < generation for operator, generation in copies.items())


def _nobody_needs(held: Sequence[GenerationId], store: RunStore, has_more: Callable[[Commit], bool]) -> bool:
    """Return whether storage, which is closed if it does not answer, says in time that no start would restore memory."""
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
