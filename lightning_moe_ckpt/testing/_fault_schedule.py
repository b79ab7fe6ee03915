"""Which faults are still to come in this process."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence

from lightning_moe_ckpt.testing._fault import Fault, FaultPhase
from lightning_moe_ckpt.testing._fault_random import RandomFaults, ScheduledFault, scripted

_GROUPED = frozenset({"node_loss", "rack_loss"})
"""Kinds that every rank waits for, since one rank of each node ends it."""


class Schedule:
    """The faults of a script and of a random campaign, less those that have struck."""

    def __init__(
        self,
        script: Sequence[Fault],
        at_random: RandomFaults | None,
        *,
        rank: int,
        world_size: int,
        fired: Collection[str],
    ) -> None:
        """Nothing is drawn yet.

        Args:
            script: faults at places.
            at_random: faults at random.
            rank: of this process.
            world_size: number of ranks.
            fired: names of faults that are over.
        """
        self._rank, self._fired = rank, set(fired)
        self._lock = threading.Lock()
        drawn = at_random.draw(world_size) if at_random is not None else iter(())
        timed = at_random is not None and at_random.unit == "seconds"
        self._timed = drawn if timed else iter(())
        self._drawn = iter(()) if timed else drawn
        self._next = next(self._drawn, None)
        self.waiting = [each for each in scripted(script) if self._concerns(each)]
        """Those whose place may come, or was not reached."""

    def take(self, phase: FaultPhase, step: int) -> list[ScheduledFault]:
        """Faults that strike now that training, or a generation, is at `phase` of `step`. From any thread."""
        with self._lock:
            self._advance(step)
            due = [each for each in self.waiting if each.fault.phase == phase and each.fault.step <= step]
            for each in due:
                self.waiting.remove(each)
            return due

    def timed(self) -> Iterator[ScheduledFault]:
        """Faults that strike at a time, in order; for one thread."""
        return (each for each in self._timed if self._concerns(each))

    def wait_for_hook(self, scheduled: ScheduledFault) -> None:
        """Let a fault strike at the place that it names instead of now. From any thread."""
        with self._lock:
            self.waiting.append(scheduled)

    def _advance(self, step: int) -> None:
        while self._next is not None and self._next.fault.step <= step:
            if self._concerns(self._next):
                self.waiting.append(self._next)
            self._next = next(self._drawn, None)

    def _concerns(self, scheduled: ScheduledFault) -> bool:
        if scheduled.name in self._fired:
            return False
        return scheduled.fault.rank in {"all", self._rank} or scheduled.fault.kind in _GROUPED
