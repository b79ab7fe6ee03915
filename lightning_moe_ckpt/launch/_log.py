"""The log of a job: what happened to its ranks, in one order for the supervisors of all nodes.

It lies in the store that the agent of the first node serves, so it survives every rank. An event is appended under the
next number of a counter, and a thread of every supervisor waits for the next number and hands events over. Decisions
follow from the log alone; so two failures at once, on two nodes, are the same two incarnations for everybody.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]  # exported at run time only
    DistError,
    DistStoreError,
    PrefixStore,
    Store,
)

JobEvent = dict[str, Any]

LAST_EVENTS = ("restart", "over", "lost")
"""Kinds of events after which a log has no more."""

_WAIT = timedelta(minutes=5)


class EventLog:
    """One log, from the start of all ranks to their end.

    Args:
        connect: makes a connection to the store; one is for appending, one for the thread that waits.
        prefix: of the log's keys.
        take: called with each event by a thread of its own. After an event of `LAST_EVENTS` the thread ends; `lost` says
            that the store is gone.
    """

    def __init__(self, connect: Callable[[], Store], prefix: str, take: Callable[[JobEvent], None]) -> None:
        self.prefix = prefix
        self._store, self._waiting = PrefixStore(prefix, connect()), PrefixStore(prefix, connect())
        self._take = take
        self._thread = threading.Thread(target=self._follow, name="moe-ckpt-log", daemon=True)
        self._thread.start()

    def append(self, kind: str, **facts: object) -> None:
        """Add an event for all supervisors. One that cannot be added is no event: then the store is gone."""
        try:
            number = self._store.add("events", 1)
            self._store.set(f"event/{number}", json.dumps({"kind": kind, **facts}))
        except DistError:
            return

    def count(self, name: str, by: int = 1) -> int:
        """Add to the number of this name, and return it."""
        try:
            return int(self._store.add(name, by))
        except DistError:
            return 0

    def close(self, timeout: float) -> None:
        """Wait for the thread to end, after an event of `LAST_EVENTS`."""
        self._thread.join(timeout)

    def _follow(self) -> None:
        number, event = 1, JobEvent(kind="")
        while event["kind"] not in LAST_EVENTS:
            event = self._next(number)
            number += 1
            self._take(event)

    def _next(self, number: int) -> JobEvent:
        key = f"event/{number}"
        try:
            while not self._comes(key):
                pass
            return dict(json.loads(self._waiting.get(key)))
        except DistError:
            return JobEvent(kind="lost")

    def _comes(self, key: str) -> bool:
        """Wait for a key; False if nothing happened for a while."""
        try:
            self._waiting.wait([key], _WAIT)
        except DistStoreError:
            return False
        return True
