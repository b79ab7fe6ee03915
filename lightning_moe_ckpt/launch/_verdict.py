"""Decide what follows from a failure: a new process for the dead rank, new processes for all, or the end of the job.

A process that was killed is replaced. One that leaves by itself, with an exception, while others recover cannot recover,
or was not made to: then all are started anew. One that leaves by itself at any other time may have met a broken device or
a bug; a bug comes again. So it is replaced once; if no new step was passed when somebody leaves like that again, all are
started anew, in case it was the replacing that failed; after that the job ends.
"""

from __future__ import annotations

import re
import signal
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

from lightning_moe_ckpt.errors import ConfigurationError

Sequel = Literal["replace", "restart", "over"]

_RATE = re.compile(r"(\d+)(?: per ([1-9]\d*)?\s*(s|min|h|d))?")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class FailureRate:
    """How many failures are too many: `10 per 1h`, or `10` for the whole job."""

    most: int
    seconds: float = float("inf")
    text: str = ""

    @classmethod
    def parse(cls, text: str) -> FailureRate:
        """Return the rate that a user has written.

        Raises:
            ConfigurationError: it is not written as above.
        """
        found = _RATE.fullmatch(text.strip())
        if found is None:
            raise ConfigurationError(
                f"`--max-failures {text!r}` must be a number, or as in '10 per 1h', '3 per 10min'."
            )
        most, count, unit = found.groups()
        seconds = int(count or 1) * _SECONDS[unit] if unit else float("inf")
        return cls(int(most), seconds, text.strip())


class Judge:
    """Decides about the failures of one job, as one supervisor sees them."""

    def __init__(self, rate: FailureRate) -> None:
        self._rate = rate
        self._failures = deque[float]()
        self._step: int | None = None
        """Furthest step when somebody last left by itself."""
        self._restarted = False
        """Whether all processes were started anew, and no step was passed since."""

    def count(self, now: float | None = None) -> bool:
        """Count a failure, and return whether there are too many."""
        now = time.monotonic() if now is None else now
        self._failures.append(now)
        while self._failures[0] < now - self._rate.seconds:
            self._failures.popleft()
        return len(self._failures) > self._rate.most

    def judge(self, exit_code: int, *, formed: bool, recovering: bool, step: int) -> Sequel:
        """Return what follows from the end of one process.

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
    """Return what happened to a process, for a sentence about it."""
    if exit_code >= 0:
        return f"left with status {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"was killed by {name}"
