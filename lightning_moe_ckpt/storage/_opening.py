"""What a start finds of a run: its log, or signs that there was one.

A start that finds nothing begins a run. So what is lost must not look like nothing: generations without a log, a log
that knows of generations of which none is there. (Links in place of folders the backend refuses by name.)
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Sequence

from lightning_moe_ckpt.errors import Corrupt, NoUsableGeneration
from lightning_moe_ckpt.storage._backend import Backend
from lightning_moe_ckpt.storage._catalog import Catalog, read_catalog
from lightning_moe_ckpt.storage._log import History, Log
from lightning_moe_ckpt.storage._names import GenerationId

log = logging.getLogger(__name__)


WAYS_ON = (
    "Put back what is missing (`moe-ckpt repair URL` rebuilds a lost log from the generations), begin anew beside what is "
    "there with resume='never', which deletes none of it, or give another URL."
)


def expect_nothing_lost(backend: Backend) -> None:
    """Before the first run under a URL begins.

    Raises:
        NoUsableGeneration: there are generations, but no log.
    """
    committed = sorted(each for each, contents in read_catalog(backend).items() if contents.committed)
    if committed:
        raise NoUsableGeneration(
            f"{backend.url} holds {len(committed)} committed generations, the newest {committed[-1]}, but no log that says "
            f"of which run they are. {WAYS_ON}"
        )


def losses(backend: Backend, history: History, offered: Sequence[object]) -> list[tuple[str, str]]:
    """What should be there and is not, where that can be told: place and reason."""
    if not offered and (history.has_commits or history.watermark):
        return [(backend.url, "its log says that generations were committed, and none of them is there")]
    return []


def read_history(run_log: Log, *, forgiving: bool) -> History | None:
    """The state of the log; `None` if there is none, or, for the `forgiving`, none that can be read. Raises `Corrupt`."""
    try:
        return run_log.read()
    except Corrupt as error:
        if not forgiving:
            raise
        log.warning("a new run begins over an unreadable log: %s", error)
        return None


def begin_run(history: History | None, run_log: Log, catalog: Catalog) -> History:
    """A new run; its epochs follow those of the runs before, so that names never meet."""
    epoch = next_epoch(history, run_log, catalog)
    replaced = (*history.replaced, history.run_id) if history is not None else ()
    key = uuid.uuid4().hex
    return History(run_id=uuid.uuid4().hex, first_epoch=epoch, last_epoch=epoch - 1, replaced=replaced, key=key)


def next_epoch(history: History | None, run_log: Log, known: Collection[GenerationId]) -> int:
    """One that no life has had, even if its `open` entry was lost."""
    logged = run_log.num_lost + (history.last_epoch if history is not None else 0)
    return 1 + max([logged, *(generation.epoch for generation in known)])
