"""Describe faults to inject, as values that a YAML file can hold, and select those still to come in this process.

Faults at random have exponential times between them: failures of many independent parts of a machine come like that,
however long it has run. Fault `i` follows from the seed and `i` alone, not from earlier events, so a restart changes nothing.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.testing._kill import StepPhase, TrainingPhase

FaultKind = Literal[
    "sigkill", "sigstop", "node_loss", "rack_loss",
    "slow_storage", "storage_errors", "full_disk", "full_shared_memory", "bit_flip",
    "flip_parameter", "flip_moment", "flip_gradient", "flip_activation", "wrong_products",
]  # fmt: skip
FaultPhase = Literal[TrainingPhase, "capture", "seal", "persist", "marker", "commit", "reclaim"]
CopyAtRest = Literal["storage", "ring", "replica"]

STORAGE_PHASES = frozenset({"persist", "marker", "commit", "reclaim"})
"""Phases that storing threads reach, at a call of the backend."""
NODE_LOSSES = frozenset({"node_loss", "rack_loss"})
"""Kinds that every rank waits for, since one rank on each node ends it."""
FATAL = NODE_LOSSES | {"sigkill"}
"""Kinds that make the job start again."""
OF_STORAGE = frozenset({"slow_storage", "storage_errors", "full_disk"})
"""Kinds that last for a time and act on storage."""
LASTING = OF_STORAGE | {"full_shared_memory", "wrong_products"}
FLIPS = frozenset({"flip_parameter", "flip_moment", "flip_gradient", "flip_activation"})
SILENT = FLIPS | {"wrong_products"}
"""Kinds that change numbers in training, and raise nothing."""
_COORDINATOR_ONLY = frozenset({"commit", "reclaim"})
_OPTIONS = {
    "sigstop": {"seconds"},
    "slow_storage": {"latency", "bandwidth", "steps", "seconds"},
    "storage_errors": {"probability", "steps", "seconds"},
    "full_disk": {"steps", "seconds"},
    "full_shared_memory": {"nbytes", "steps", "seconds"},
    "bit_flip": {"at_rest"},
    "wrong_products": {"bit", "steps", "seconds"},
    **{kind: {"bit", "fqn"} for kind in ("flip_parameter", "flip_moment")},
    **{kind: {"bit", "fqn", "skip"} for kind in ("flip_gradient", "flip_activation")},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Fault that strikes once, at the first matching place at or after `step`.

    Args:
        kind: `sigkill`: the process dies. `sigstop`: it stands still. `node_loss`, `rack_loss`: all processes of the
            rank's node or rack die, and the run's files in their shared memory are removed. `slow_storage`,
            `storage_errors`, `full_disk`: this rank's storage is impaired. `full_shared_memory`: its free part is filled.
            `bit_flip`: one bit of a stored copy flips. Silent, in the training of this rank alone: `flip_parameter`,
            `flip_moment`: one bit of a parameter or of the optimizer's state of it flips; `flip_gradient`: of the next gradient that
            backward finds of a parameter, before reduction; `flip_activation`: of the next output of a module in training, seen also by
            its backward; `wrong_products`: one bit in each product of matrices, forward and backward, while it lasts.
        rank: rank that it strikes; `all`: every rank, each when it reaches the place.
        step: least value of `trainer.global_step` for it to strike. The value counts before the optimizer step in phases up to
            `before_optimizer_step`, after it in the later ones. In the phases of storage, the step of the generation.
        phase: hooks: `batch_start`, `forward` (before backward), `after_backward`, `before_optimizer_step`, `batch_end`
            and `after_batch_end` (before and after other callbacks), `validation`, `epoch_start`, `epoch_end`. Inside
            checkpoints: `capture` (copies of a step are under way), `seal` (the segment is about to be complete).
            Before calls of storage: `persist` (a segment), `marker` (a rank is done), `commit` (rank 0 makes a
            generation visible), `reclaim` (rank 0 deletes).
        settle: most seconds to wait, before it strikes, until checkpoints under way are stored.
        seconds: seconds that it lasts, also over restarts; `None`: until `steps` are over. For `sigstop`: seconds until the
            process continues; `None`: never.
        steps: optimizer steps that it lasts, within this process, since a job that cannot start makes none; `None`: until
            `seconds` are over. With neither it lasts until this process's end.
        latency: for `slow_storage`: seconds added to each call.
        bandwidth: for `slow_storage`: bytes per second of each call that writes or reads; `None` for no limit.
        probability: for `storage_errors`: share of the calls that fail; the same ones in every run that makes the same
            calls.
        nbytes: for `full_shared_memory`: most bytes to take, whatever is free.
        at_rest: for `bit_flip`: where the bit is: the newest generation in storage, the rank's own ring, or a replica that
            its node keeps for another rank.
        bit: for silent kinds: number of the bit, from 0, the lowest; `None`: drawn from all bits, of a product from those
            of the mantissa.
        skip: for `flip_gradient` and `flip_activation`: how often it is computed right before; a step that is audited computes everything twice,
            first in another rank's place.
        fqn: for silent flips: beginning of the parameter's name, of the module's for `flip_activation`; `None`: any. Parameters without a gradient
            and modules without an output in that step are passed over.
    """

    kind: FaultKind = "sigkill"
    rank: int | Literal["all"] = 0
    step: int = 0
    phase: FaultPhase = "batch_start"
    settle: float = 0.0
    seconds: float | None = None
    steps: int | None = None
    latency: float = 0.0
    bandwidth: float | None = None
    probability: float | None = None
    nbytes: int | None = None
    at_rest: CopyAtRest = "storage"
    bit: int | None = None
    skip: int = 0
    fqn: str | None = None

    def __post_init__(self) -> None:
        self._require(self.kind in get_args(FaultKind), "kind", f"one of {', '.join(get_args(FaultKind))}")
        self._require(self.phase in get_args(FaultPhase), "phase", f"one of {', '.join(get_args(FaultPhase))}")
        self._require(self.rank == "all" or _is_count(self.rank), "rank", "a rank from 0 on, or 'all'")
        self._require(_is_count(self.step), "step", "a step from 0 on")
        self._require(self.settle >= 0, "settle", "seconds from 0 on")
        self._require(self.seconds is None or self.seconds > 0, "seconds", "above 0, or None")
        self._require(self.steps is None or self.steps > 0, "steps", "above 0, or None")
        self._require(self.latency >= 0, "latency", "seconds from 0 on")
        self._require(self.bandwidth is None or self.bandwidth > 0, "bandwidth", "bytes per second, or None")
        self._require(self.probability is None or 0 <= self.probability <= 1, "probability", "from 0 to 1")
        self._require(self.nbytes is None or self.nbytes > 0, "nbytes", "bytes above 0")
        self._require(self.at_rest in get_args(CopyAtRest), "at_rest", f"one of {', '.join(get_args(CopyAtRest))}")
        self._require(self.bit is None or (_is_count(self.bit) and self.bit < 64), "bit", "a bit from 0 to 63, or None")
        self._require(_is_count(self.skip), "skip", "a number from 0 on")
        self._require_what_the_kind_takes()
        if self.kind in SILENT and self.phase in STORAGE_PHASES:
            raise ConfigurationError(f"{self}: {self.kind} strikes in training, not in {self.phase!r}. Give a hook.")
        if self.settle and self.phase in STORAGE_PHASES:
            raise ConfigurationError(
                f"{self} would wait for itself: {self.phase!r} is part of storing. Leave out `settle`."
            )
        if self.phase in _COORDINATOR_ONLY and self.rank != 0:
            raise ConfigurationError(f"{self}: only rank 0 gets to {self.phase!r}. Give `rank=0`.")

    def _require(self, valid: bool, name: str, wanted: str) -> None:
        if not valid:
            raise ConfigurationError(f"`Fault({name}={getattr(self, name)!r})` must be {wanted}.")

    def _require_what_the_kind_takes(self) -> None:
        known = set[str]().union(*_OPTIONS.values())
        given = {name for name, value in self.given().items() if name in known}
        own = _OPTIONS.get(self.kind, set())
        if surplus := given - own:
            takes = ", ".join(sorted(own)) or "none of them"
            raise ConfigurationError(f"{self}: {self.kind} has no {', '.join(sorted(surplus))}. It takes {takes}.")
        if self.kind == "slow_storage" and not given & {"latency", "bandwidth"}:
            raise ConfigurationError(f"{self} slows nothing down. Give `latency` or `bandwidth`.")
        if self.kind == "storage_errors" and self.probability is None:
            raise ConfigurationError(f"{self} needs `probability`.")
        if self.kind == "full_shared_memory" and self.nbytes is None:
            raise ConfigurationError(f"{self} needs `nbytes`: the most it may take from everybody on this machine.")

    def given(self) -> dict[str, Any]:
        """Return the fields with other values than their defaults."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}

    def __str__(self) -> str:
        return f"`Fault({', '.join(f'{name}={value!r}' for name, value in self.given().items())})`"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def fail_at(
    rank: int | Literal["all"],
    step: int,
    phase: FaultPhase = "batch_start",
    *,
    kind: FaultKind = "sigkill",
    **options: Any,
) -> Fault:
    """Return a fault at one place in training.

    Args:
        rank: rank that it strikes.
        step: least value of `trainer.global_step` for it to strike.
        phase: the hook or moment, see `Fault.phase`.
        kind: kind of the fault, see `Fault.kind`.
        options: other fields of `Fault`.

    Raises:
        ConfigurationError: a value is out of range, or the kind does not take it.
    """
    return Fault(kind=kind, rank=rank, step=step, phase=phase, **options)


@dataclass(frozen=True, kw_only=True)
class RandomFaults:
    """Faults with a mean time between them, on random ranks.

    Args:
        mtbf: mean time between failures of the whole job, in `unit`.
        unit: `seconds`: of training, added up over all starts; a fault strikes at that moment, whatever the process does. `steps`:
            optimizer steps of the run; a fault strikes in one of `phases`, at exactly the same place in every run.
        seed: decides about times, ranks, kinds and phases.
        kinds: possible kinds, all equally likely; name one twice to have it twice as often. `rank` other than `all`, `step` and
            `phase` are drawn.
        phases: places of faults if `unit` is `steps`.
        most: number of faults in all; `None` for no end.
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
        """Yield all faults in the order of their times, each on a rank below `world_size`, without end unless there is a `most`."""
        time, index = 0.0, 0
        while self.most is None or index < self.most:
            number = random.Random(f"{self.seed}:{index}")
            time += number.expovariate(1 / self.mtbf)
            yield self._scheduled(index, time, number, world_size)
            index += 1

    def _scheduled(self, index: int, time: float, number: random.Random, world_size: int) -> ScheduledFault:
        kind, drawn = number.choice(list(self.kinds)), number.randrange(world_size)
        phase = number.choice(list(self.phases))
        rank = kind.rank if kind.rank == "all" else 0 if phase in _COORDINATOR_ONLY else drawn
        name = f"random {self.seed}:{index}"
        if self.unit == "seconds":
            fault = replace(kind, rank=rank, step=0, phase="batch_start")
            return ScheduledFault(name=name, fault=fault, seconds=time)
        return ScheduledFault(name=name, fault=replace(kind, rank=rank, step=int(time), phase=phase))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledFault:
    """A fault with its name, known over restarts."""

    name: str
    fault: Fault
    seconds: float | None = None
    """Training time until it strikes; `None`: at the place that the fault names."""


class Schedule:
    """Faults from a script and a random campaign for one rank, without those that have struck already, named in `fired`."""

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
        """Return the faults to strike now, as training, or a generation, is at `phase` of `step`. From any thread."""
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
        """Yield the faults due at a time, in order; for one thread."""
        return (each for each in self._timed if self._concerns(each))

    def wait_for_hook(self, scheduled: ScheduledFault) -> None:
        """Let a fault strike at the place that it names instead of now. From any thread."""
        with self._lock:
            self.waiting.append(scheduled)

    def _concerns(self, scheduled: ScheduledFault) -> bool:
        if scheduled.name in self._fired:
            return False
        return scheduled.fault.rank in {"all", self._rank} or scheduled.fault.kind in NODE_LOSSES
