"""The coordinator's view of a run: what it finds at start, what it knows of the log, and what it appends.

A start that finds nothing begins a new run. So a loss must not look like an empty place: generations without a log, or
a log whose generations are all gone, are reported. (The backend itself refuses links in place of folders.)
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lightning_moe_ckpt.errors import Corrupt, Fenced, NoUsableGeneration
from lightning_moe_ckpt.storage._backend import Backend
from lightning_moe_ckpt.storage._catalog import Catalog, RunsOfGenerations, read_catalog
from lightning_moe_ckpt.storage._log import History, Lineage, Log, open_event, watermark_event
from lightning_moe_ckpt.storage._names import GenerationId, new_nonce

log = logging.getLogger(__name__)


WAYS_ON = (
    "Put back what is missing (`moe-ckpt repair URL` rebuilds a lost log from the generations), begin anew beside what is "
    "there with resume='never', which deletes none of it, or give another URL."
)


def expect_nothing_lost(backend: Backend) -> None:
    """Check that a URL without a log is empty, before its first run begins.

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
    """Return known losses as (place, reason): the log mentions commits and none can be offered."""
    if not offered and (history.has_commits or history.watermark):
        return [(backend.url, "its log says that generations were committed, and none of them is there")]
    return []


def read_history(run_log: Log, *, forgiving: bool) -> History | None:
    """Read the log; `None` if there is none. Raises `Corrupt` if no entry is readable, unless `forgiving`."""
    try:
        return run_log.read()
    except Corrupt as error:
        if not forgiving:
            raise
        log.warning("a new run begins over an unreadable log: %s", error)
        return None


def begin_run(history: History | None, run_log: Log, catalog: Catalog) -> History:
    """Return the history of a new run; its incarnation numbers follow those of older runs, so names never clash."""
    incarnation = next_incarnation(history, run_log, catalog)
    replaced = (*history.replaced, history.run_id) if history is not None else ()
    key = uuid.uuid4().hex
    return History(
        run_id=uuid.uuid4().hex,
        first_incarnation=incarnation,
        last_incarnation=incarnation - 1,
        replaced=replaced,
        key=key,
    )


def next_incarnation(history: History | None, run_log: Log, known: Collection[GenerationId]) -> int:
    """Return a number that no incarnation has had, even one whose `open` entry was lost."""
    logged = run_log.num_lost + (history.last_incarnation if history is not None else 0)
    return 1 + max([logged, *(generation.incarnation for generation in known)])


@dataclass(slots=True)
class Coordination:
    """The coordinator's state: the log, its history, and the number of its own incarnation."""

    log: Log
    history: History
    runs: RunsOfGenerations
    incarnation: int | None = None
    offered: frozenset[GenerationId] = frozenset()
    lineage: Lineage | None = None
    """Lineage of our incarnation, as it began."""
    committed: frozenset[GenerationId] = frozenset()
    """Generations with a manifest, readable or not, in the last listing."""

    def refresh(self) -> None:
        """Read entries of other processes; after `open` they only mean that this process is fenced."""
        if self.incarnation is not None:
            self.catch_up()
            return
        history = self.log.read()
        if history is None or history.run_id != self.history.run_id:
            raise Fenced(f"another run replaced run {self.history.run_id} while this one was starting. Start again.")
        self.history = history

    def open(self, resumed: GenerationId | None, known: Collection[GenerationId]) -> bool:
        incarnation = next_incarnation(self.history, self.log, known)
        history = replace(self.history, has_commits=self.history.has_commits or bool(self.offered))
        if resumed is not None and history.why_dead(resumed) is not None:
            history = history.adopted(resumed)
        history = history.opened(incarnation, resumed, new_nonce())
        volatile = resumed is not None and resumed not in self.offered
        if not self.log.append(open_event(incarnation, resumed, volatile=volatile), history):
            return False
        self.history, self.incarnation, self.lineage = history, incarnation, history.lineage(time.time_ns())
        return True

    def catch_up(self) -> bool:
        """Adopt entries that `moe-ckpt gc` appended; return whether there were any. Raises `Fenced` for others."""
        news = self.log.news(self.history)
        self.history = news or self.history
        return news is not None

    def advance(self, history: History | None) -> bool:
        """Append a watermark if there is a new one, or before the first commit; false if `moe-ckpt gc` was faster.

        If the process is killed before that commit, the markers of all ranks stay, and the next incarnation commits.
        """
        incarnation = self.opened_incarnation()
        if history is None and self.history.has_commits:
            return True
        history = replace(history or self.history, has_commits=True)
        if not self.log.append(watermark_event(incarnation, history.watermark), history):
            if not self.catch_up():
                raise Fenced("the log entry after ours was written by somebody else, and is not listed. Start again.")
            return False
        self.history = history
        return True

    def opened_incarnation(self) -> int:
        if self.incarnation is None:
            raise ValueError("`open_incarnation` comes before anything that deletes.")
        return self.incarnation
