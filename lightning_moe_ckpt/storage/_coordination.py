"""What the coordinator of a life knows of the log, and what it appends there."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass, replace

from lightning_moe_ckpt.errors import Fenced
from lightning_moe_ckpt.storage._catalog import RunsOfGenerations
from lightning_moe_ckpt.storage._lineage import Lineage
from lightning_moe_ckpt.storage._log import History, Log, open_event, watermark_event
from lightning_moe_ckpt.storage._names import GenerationId, new_life
from lightning_moe_ckpt.storage._opening import next_epoch


@dataclass(slots=True)
class Coordination:
    """What the coordinator knows: where the log stands, and which epoch is its own."""

    log: Log
    history: History
    runs: RunsOfGenerations
    epoch: int | None = None
    offered: frozenset[GenerationId] = frozenset()
    lineage: Lineage | None = None
    """Of our life, as of its beginning."""
    committed: frozenset[GenerationId] = frozenset()
    """What has a manifest, readable or not, as of the last listing."""

    def refresh(self) -> None:
        """See what others wrote; once we have an epoch of our own, that can only be a fence."""
        if self.epoch is not None:
            self.catch_up()
            return
        history = self.log.read()
        if history is None or history.run_id != self.history.run_id:
            raise Fenced(f"another run replaced run {self.history.run_id} while this one was starting. Start again.")
        self.history = history

    def open(self, resumed: GenerationId | None, known: Collection[GenerationId]) -> bool:
        epoch = next_epoch(self.history, self.log, known)
        # A run of an older release has no key yet.
        keyed = replace(
            self.history,
            key=self.history.key or uuid.uuid4().hex,
            has_commits=self.history.has_commits or bool(self.offered),
        )
        if resumed is not None and keyed.why_dead(resumed) is not None:
            keyed = keyed.adopted(resumed)
        history = keyed.opened(epoch, resumed, new_life())
        volatile = resumed is not None and resumed not in self.offered
        if not self.log.append(open_event(epoch, resumed, volatile=volatile), history):
            return False
        self.history, self.epoch, self.lineage = history, epoch, history.lineage(time.time_ns())
        return True

    def catch_up(self) -> bool:
        """Take over what `moe-ckpt gc` has said since; whether it said anything. Raises `Fenced` for any other entry."""
        news = self.log.news(self.history)
        self.history = news or self.history
        return news is not None

    def advance(self, history: History | None) -> bool:
        """Append a watermark, if there is a new one, or a first commit is about to be made; `False` if `moe-ckpt gc` was faster.

        A life that is killed between the two leaves the markers of all ranks, of which the next one makes the commit.
        """
        epoch = self.opened_epoch()
        if history is None and self.history.has_commits:
            return True
        history = replace(history or self.history, has_commits=True)
        if not self.log.append(watermark_event(epoch, history.watermark), history):
            if not self.catch_up():
                raise Fenced("the log entry after ours was written by somebody else, and is not listed. Start again.")
            return False
        self.history = history
        return True

    def opened_epoch(self) -> int:
        if self.epoch is None:
            raise ValueError("`open_epoch` comes before anything that deletes.")
        return self.epoch
