"""Which memory stays for the next start of a run: generations that it may restore, and that storage does not have.

What a rank knows by itself is often too little: that a generation was committed only the coordinator sees at once, and
that a later start has taken over only who writes. So a life that ends asks storage, for a moment.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from queue import Empty, SimpleQueue

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.storage import GenerationId, RunStore
from lightning_moe_ckpt.tiers import RankMemory

log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 1.0
"""Storage that does not answer within it is taken not to have what memory has."""

_INTERRUPTED_SECONDS = 2.0
"""For a call that was interrupted to fail; the thread is a daemon."""


def is_superseded(memory: RankMemory, known: Iterable[GenerationId | None], store: RunStore | None = None) -> bool:
    """Whether no later start would restore what memory holds.

    Args:
        memory: of this rank.
        known: what is durable, as far as is known without asking.
        store: asked if that is not as new; else what memory holds is taken to be needed.
    """
    held = memory.published
    if not held or any(durable is not None and durable >= max(held) for durable in known):
        return True
    return store is not None and nobody_needs(held, store)


def nobody_needs(held: Sequence[GenerationId], store: RunStore) -> bool:
    """Whether storage says in time that no later start would restore what memory holds.

    Args:
        held: generations in memory.
        store: of the run, on any rank; it is closed if it does not answer.
    """
    answers: SimpleQueue[bool] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put(any(store.may_need(generation) for generation in held))
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
