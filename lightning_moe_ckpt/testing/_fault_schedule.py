"""Decide which faults are still to come in this process: those of a script, and those drawn at random.

Times between failures are exponential: failures of many independent parts of a machine come like that, however long it
has run. Fault `i` follows from the seed and `i` alone, not from what happened before, so a restart changes nothing.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.testing._fault import NODE_LOSSES, Fault, FaultPhase
from lightning_moe_ckpt.testing._kill import StepPhase


@dataclass(frozen=True, kw_only=True)
class RandomFaults:
    """Faults that come with a mean time between them, on random ranks.

    Args:
        mtbf: mean time between failures of the whole job, in `unit`.
        unit: `seconds`: of training, added up over all starts; a fault strikes at that moment, whatever the process
            does. `steps`: optimizer steps of the run; a fault strikes in one of `phases`, at exactly the same place in
            every run.
        seed: decides about times, ranks, kinds and phases.
        kinds: what may happen, each as likely; name one twice to have it twice as often. `rank` other than `all`,
            `step` and `phase` are drawn.
        phases: where faults may strike if `unit` is `steps`.
        most: how many faults there are in all; `None`: no end.
    """

    mtbf: float
    unit: Literal["seconds", "steps"] = "seconds"
    seed: int = 0
    kinds: Sequence[Fault] = field(default_factory=lambda: [Fault()])
    phases: Sequence[FaultPhase] = get_args(StepPhase)
    most: int | None = None

    def __post_init__(self) -> None:
        if not self.mtbf > 0:
            raise ConfigurationError(f"`RandomFaults(mtbf={self.mtbf!r})` must be above 0.")
        if self.unit not in {"seconds", "steps"}:
            raise ConfigurationError(f"`RandomFaults(unit={self.unit!r})` must be 'seconds' or 'steps'.")
        if not self.kinds:
            raise ConfigurationError("`RandomFaults(kinds=[])` must name at least one fault. Leave it out for SIGKILL.")
        unknown = [phase for phase in self.phases if phase not in get_args(FaultPhase)]
        if unknown or not self.phases:
            raise ConfigurationError(
                f"`RandomFaults(phases={list(self.phases)!r})` must be of {', '.join(get_args(FaultPhase))}."
            )
        if self.most is not None and self.most < 1:
            raise ConfigurationError(f"`RandomFaults(most={self.most})` must be 1 or more, or None.")

    def draw(self, world_size: int) -> Iterator[ScheduledFault]:
        """Yield all faults in the order of their times, without end unless there is a `most`.

        Args:
            world_size: number of ranks, of which each fault strikes one.
        """
        time, index = 0.0, 0
        while self.most is None or index < self.most:
            number = random.Random(f"{self.seed}:{index}")
            time += number.expovariate(1 / self.mtbf)
            yield self._scheduled(index, time, number, world_size)
            index += 1

    def _scheduled(self, index: int, time: float, number: random.Random, world_size: int) -> ScheduledFault:
        kind = number.choice(list(self.kinds))
        rank = number.randrange(world_size)
        phase = number.choice(list(self.phases))
        if phase in {"commit", "reclaim"}:
            rank = 0
        in_steps = self.unit == "steps"
        fault = replace(
            kind,
            rank=kind.rank if kind.rank == "all" else rank,
            step=int(time) if in_steps else 0,
            phase=phase if in_steps else "batch_start",
        )
        name = f"random {self.seed}:{index}"
        return ScheduledFault(name=name, fault=fault, seconds=None if in_steps else time)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledFault:
    """A fault under the name by which it is known over restarts."""

    name: str
    fault: Fault
    seconds: float | None = None
    """Training time at which it strikes; `None`: at the place that the fault names."""


class Schedule:
    """The faults of a script and of a random campaign, less those that have struck.

    Args:
        script: faults at places.
        at_random: faults at random.
        rank: of this process.
        world_size: number of ranks.
        fired: names of faults that are over.
    """

    def __init__(
        self,
        script: Sequence[Fault],
        at_random: RandomFaults | None,
        *,
        rank: int,
        world_size: int,
        fired: Collection[str],
    ) -> None:
        self._rank, self._fired = rank, set(fired)
        self._lock = threading.Lock()
        drawn = at_random.draw(world_size) if at_random is not None else iter(())
        timed = at_random is not None and at_random.unit == "seconds"
        self._timed = drawn if timed else iter(())
        self._drawn = iter(()) if timed else drawn
        self._next = next(self._drawn, None)
        # A name has the position and the place, so that edits of other lines do not matter.
        scripted = (
            ScheduledFault(name=f"script {index}: {fault.kind} {fault.rank} {fault.step} {fault.phase}", fault=fault)
            for index, fault in enumerate(script)
        )
        self.waiting = [each for each in scripted if self._concerns(each)]
        """Faults whose place may come, or was not reached."""

    def take(self, phase: FaultPhase, step: int) -> list[ScheduledFault]:
        """Return the faults that strike now that training, or a generation, is at `phase` of `step`. From any thread."""
        with self._lock:
            while self._next is not None and self._next.fault.step <= step:
                if self._concerns(self._next):
                    self.waiting.append(self._next)
                self._next = next(self._drawn, None)
            due = [each for each in self.waiting if each.fault.phase == phase and each.fault.step <= step]
            for each in due:
                self.waiting.remove(each)
            return due

    def timed(self) -> Iterator[ScheduledFault]:
        """Return the faults that strike at a time, in order; for one thread."""
        return (each for each in self._timed if self._concerns(each))

    def wait_for_hook(self, scheduled: ScheduledFault) -> None:
        """Let a fault strike at the place that it names instead of now. From any thread."""
        with self._lock:
            self.waiting.append(scheduled)

    def _concerns(self, scheduled: ScheduledFault) -> bool:
        if scheduled.name in self._fired:
            return False
        return scheduled.fault.rank in {"all", self._rank} or scheduled.fault.kind in NODE_LOSSES
