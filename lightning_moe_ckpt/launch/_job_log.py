"""A job's log: what happened to its ranks, in one order for all nodes' supervisors, and what follows from a failure.

The log lies in the store that the agent of the first node serves, so it survives every rank. An event is appended under the
next number of a counter, and a thread of every supervisor waits for the next number and hands events over. Decisions
follow from the log alone; so two failures at once, on two nodes, are the same two incarnations for everybody.

A failure leads to a new process for the dead rank, to new processes for all, or to the job's end. A process that was
killed is replaced. One that leaves by itself, with an exception, while others recover cannot recover, or was not made to:
then all are started anew. One that leaves by itself at any other time may have met a broken device or a bug; a bug comes
again. So it is replaced once; if no new step was passed when somebody leaves like that again, all are started anew, in case
it was the replacing that failed; after that the job ends.
"""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from torch.distributed import DistError, DistStoreError, PrefixStore, Store  # type: ignore[attr-defined]  # exported at run time only

from lightning_moe_ckpt.errors import ConfigurationError

JobEvent = dict[str, Any]

LAST_EVENTS = ("restart", "over", "lost")
"""Kinds of events that end a log."""

_WAIT = timedelta(minutes=5)
_LOOKS = 5
"""Looks at another node within `NodeWatch`'s patience."""
_ENDED = 2**40


class EventLog:
    """A log, from the start of all ranks to their end.

    Args:
        connect: makes a connection to the store: one for appending, one for the waiting thread.
        prefix: prefix of the log's keys.
        take: called with each event by a thread of its own. The thread ends after an event of `LAST_EVENTS`; the event `lost`
            means that the store is gone.
    """

    def __init__(self, connect: Callable[[], Store], prefix: str, take: Callable[[JobEvent], None]) -> None:
        self.prefix = prefix
        self._store, self._waiting = PrefixStore(prefix, connect()), PrefixStore(prefix, connect())
        self._take = take
        self._thread = threading.Thread(target=self._follow, name="moe-ckpt-log", daemon=True)
        self._thread.start()

    def append(self, kind: str, **facts: object) -> None:
        """Add an event for all supervisors; without a store nothing happens."""
        with suppress(DistError):
            number = self._store.add("events", 1)
            self._store.set(f"event/{number}", json.dumps({"kind": kind, **facts}))

    def count(self, name: str, by: int = 1) -> int:
        """Add `by` to the counter `name`, and return its value; 0 without a store."""
        try:
            return int(self._store.add(name, by))
        except DistError:
            return 0

    def note(self, name: str, text: str) -> None:
        """Keep a text under a name."""
        with suppress(DistError):
            self._store.set(name, text)

    def noted(self, name: str) -> str:
        """Return the text under a name that exists; empty without a store."""
        try:
            return str(self._store.get(name).decode())
        except DistError:
            return ""

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
        """Wait for a key, and return whether it exists after `_WAIT`."""
        try:
            self._waiting.wait([key], _WAIT)
        except DistStoreError:
            return False
        return True


class NodeWatch:
    """Watch over the next node's supervisor: each supervisor counts up, and looks at the next count for `patience` seconds at most.

    Ranks of a killed supervisor are not replaced: nobody starts processes there. Torch's rendezvous finds out too, but nodes ask it
    only when they meet.
    """

    def __init__(self, log: EventLog, node: int, num_nodes: int, name: str, patience: float) -> None:
        self._log, self._node, self._next, self._patience = log, node, (node + 1) % num_nodes, patience
        self._seen, self._quiet, self._since = 0, 0.0, patience
        self.name = f"node {node} ({name})"
        log.note(f"node/{node}", name)

    def look(self, seconds: float) -> str | None:
        """Return the next node's number and name if its supervisor is gone, else None; without `seconds` in which this process
        stood still.
        """
        self._since += seconds
        if self._next == self._node or self._since < self._patience / _LOOKS:
            return None
        self._log.count(f"lives/{self._node}")
        seen = self._log.count(f"lives/{self._next}", 0)
        # Before its first look it starts ranks, and behind its end nobody needs it.
        lives = seen != self._seen or not 0 < seen < _ENDED
        self._quiet, self._seen, self._since = 0.0 if lives else self._quiet + self._since, seen, 0.0
        if self._quiet <= self._patience:
            return None
        self._quiet = 0.0
        return f"node {self._next} ({self._log.noted(f'node/{self._next}')})"

    def end(self) -> None:
        """Note that all ranks of this node have ended well, so that no supervisor waits for it."""
        self._log.count(f"lives/{self._node}", _ENDED)


Sequel = Literal["replace", "restart", "over"]

_RATE = re.compile(r"(\d+)(?: per ([1-9]\d*)?\s*(s|min|h|d))?")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class FailureRate:
    """Most failures within a time: `10 per 1h`, or `10` for the whole job."""

    most: int
    seconds: float = float("inf")
    text: str = ""

    @classmethod
    def parse(cls, text: str) -> FailureRate:
        """Return the rate of a user's text. Raises `ConfigurationError` if the text is neither a number nor like `10 per 1h`."""
        found = _RATE.fullmatch(text.strip())
        if found is None:
            raise ConfigurationError(
                f"`--max-failures {text!r}` must be a number, or as in '10 per 1h', '3 per 10min'."
            )
        most, count, unit = found.groups()
        seconds = int(count or 1) * _SECONDS[unit] if unit else float("inf")
        return cls(int(most), seconds, text.strip())


class Judge:
    """Decisions about one job's failures, as one supervisor sees them."""

    def __init__(self, rate: FailureRate) -> None:
        self._rate = rate
        self._failures = deque[float]()
        self._gave_way: dict[int, int] = {}
        """Steps of the last clean audit before ranks of this node gave way, by rank."""
        self._step: int | None = None
        """Furthest step when a process last left by itself."""
        self.noticed = 0.0
        """Time at which this supervisor has acted on the newest failure, in seconds since 1970; 0 before the first."""
        self._restarted = False
        """Whether all processes were started anew, and no step was passed since."""

    def count(self, now: float | None = None) -> bool:
        """Count a failure, and return whether there are too many."""
        now = time.monotonic() if now is None else now
        self._failures.append(now)
        while self._failures[0] < now - self._rate.seconds:
            self._failures.popleft()
        return len(self._failures) > self._rate.most

    def gives_way_again(self, rank: int, since: int) -> bool:
        """Note that a rank gives way, and return whether the process before it had, since the same clean audit."""
        before, self._gave_way[rank] = self._gave_way.get(rank), since
        return before == since

    def judge(self, exit_code: int, *, formed: bool, recovering: bool, step: int) -> Sequel:
        """Return the consequence of one process's end.

        Args:
            exit_code: negative for a signal.
            formed: whether all ranks had come together before.
            recovering: whether another failure was just before, and training has not gone on since.
            step: furthest step of any rank, -1 without any.
        """
        if exit_code in {128 + signal.SIGTERM, -signal.SIGTERM}:
            return "restart"  # asked to stop: all ranks agree on that, save, and leave
        if exit_code < 0:
            return "replace"
        if not (formed or recovering):
            return "over"
        unknown = recovering and step < 0  # a script that does not tell, and cannot recover
        passed = unknown or self._step is None or step > self._step
        self._step = max(step, -1 if self._step is None else self._step)
        if passed and not recovering:
            self._restarted = False
            return "replace"
        again, self._restarted = self._restarted and not passed, True
        return "over" if again else "restart"


def describe_exit(exit_code: int) -> str:
    """Return how a process ended, as the predicate of a sentence."""
    if exit_code >= 0:
        return f"left with status {exit_code}{', as after SIGTERM' if exit_code == 128 + signal.SIGTERM else ''}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"was killed by {name}"
