"""Faults of storage: calls that take longer, fail now and then, or find the disk full.

They stand below the retries of `open_backend`, where failures of a real medium come from, and act on whatever is stored
or read meanwhile, restores included.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lightning_moe_ckpt.errors import StorageError, StorageRefused
from lightning_moe_ckpt.storage._names import COMMITTED, parse_marker_name, parse_snap_key
from lightning_moe_ckpt.testing._fault import Fault, FaultPhase
from lightning_moe_ckpt.testing._watched_backend import StorageCall

T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class LastingFault:
    """A fault that goes on for a while."""

    name: str
    fault: Fault
    step: int
    """Where it began."""
    since: float
    """When it began, seconds since 1970, so that it can outlast a process."""
    calls: int = 0
    """Calls of storage that it delayed or failed in this life."""
    draws: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draws = random.Random(self.name)

    def over(self, step: int) -> bool:
        """Whether it has ended when training is at `step`."""
        late = self.fault.seconds is not None and time.time() >= self.since + self.fault.seconds
        return late or (self.fault.steps is not None and step >= self.step + self.fault.steps)

    @property
    def outlasts_process(self) -> bool:
        """Whether the next life meets it too."""
        return self.fault.seconds is not None


class StorageFaults:
    """What stands around every call of this process's storage."""

    def __init__(
        self, active: Callable[[], Sequence[LastingFault]], reached: Callable[[FaultPhase, int], None]
    ) -> None:
        """Wrap nothing yet; see `around`.

        Args:
            active: faults of storage that go on now.
            reached: told of every call that is a phase, with the step of its generation, before the call.
        """
        self._active, self._reached = active, reached
        self._lock = threading.Lock()

    def around(self, call: StorageCall, operation: Callable[[], T]) -> T:
        """Run one call as the faults that go on let it."""
        place = phase_of(call)
        if place is not None:
            self._reached(*place)
        for lasting in self._active():
            self._fail(lasting, call)
        result = operation()
        nbytes = call.nbytes or (len(result) if isinstance(result, bytes) else 0)
        for lasting in self._active():
            self._delay(lasting, nbytes)
        return result

    def _fail(self, lasting: LastingFault, call: StorageCall) -> None:
        kind = lasting.fault.kind
        if kind == "full_disk" and call.writes:
            self._count(lasting)
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise StorageRefused(f"{call}: {full.strerror} (injected).") from full
        if kind == "storage_errors" and self._drawn(lasting):
            self._count(lasting)
            raise StorageError(f"{call}: input/output error (injected).") from OSError(
                errno.EIO, os.strerror(errno.EIO)
            )

    def _drawn(self, lasting: LastingFault) -> bool:
        with self._lock:
            return lasting.draws.random() < (lasting.fault.probability or 0.0)

    def _delay(self, lasting: LastingFault, nbytes: int) -> None:
        fault = lasting.fault
        if fault.kind == "slow_storage":
            self._count(lasting)
            time.sleep(fault.latency + (nbytes / fault.bandwidth if fault.bandwidth else 0.0))

    def _count(self, lasting: LastingFault) -> None:
        with self._lock:
            lasting.calls += 1


def phase_of(call: StorageCall) -> tuple[FaultPhase, int] | None:
    """The phase that a call is, and the step of the generation that it is about."""
    parsed = parse_snap_key(call.key)
    if parsed is None or not (call.writes or call.verb == "delete"):
        return None
    generation, name = parsed
    if call.verb == "delete":
        return "reclaim", generation.step
    if name == COMMITTED:
        return "commit", generation.step
    return ("persist" if parse_marker_name(name) is None else "marker"), generation.step
