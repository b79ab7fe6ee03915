"""Describe faults to inject: kind, place and extent, as values that a YAML file can hold."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, get_args

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.testing._kill import TrainingPhase

FaultKind = Literal[
    "sigkill", "sigstop", "node_loss", "rack_loss",
    "slow_storage", "storage_errors", "full_disk", "full_shared_memory", "bit_flip",
]  # fmt: skip
FaultPhase = Literal[TrainingPhase, "capture", "seal", "persist", "marker", "commit", "reclaim"]
CopyAtRest = Literal["storage", "ring", "replica"]

STORAGE_PHASES = frozenset({"persist", "marker", "commit", "reclaim"})
"""Phases that storing threads reach, at a call of the backend."""
NODE_LOSSES = frozenset({"node_loss", "rack_loss"})
"""Kinds that every rank waits for, since one rank of each node ends it."""
FATAL = NODE_LOSSES | {"sigkill"}
"""Kinds after which the job has to start again."""
OF_STORAGE = frozenset({"slow_storage", "storage_errors", "full_disk"})
"""Kinds that last for a time and act on calls of the backend."""
LASTING = OF_STORAGE | {"full_shared_memory"}
_COORDINATOR_ONLY = frozenset({"commit", "reclaim"})
_OPTIONS = {
    "sigkill": set[str](),
    "sigstop": {"seconds"},
    "node_loss": set[str](),
    "rack_loss": set[str](),
    "slow_storage": {"latency", "bandwidth", "steps", "seconds"},
    "storage_errors": {"probability", "steps", "seconds"},
    "full_disk": {"steps", "seconds"},
    "full_shared_memory": {"nbytes", "steps", "seconds"},
    "bit_flip": {"at_rest"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Fault that strikes once, at the first matching place at or after `step`.

    Args:
        kind: `sigkill`: the process dies. `sigstop`: it stands still. `node_loss`, `rack_loss`: all processes of the
            rank's node or rack die, and the run's files in their shared memory are removed. `slow_storage`,
            `storage_errors`, `full_disk`: this rank's storage is impaired. `full_shared_memory`: its free part is filled.
            `bit_flip`: one bit of a stored copy flips.
        rank: rank on which it strikes; `all`: every rank, each when it reaches the place.
        step: value of `trainer.global_step` from which on it strikes. The value counts before the optimizer step in phases up to
            `before_optimizer_step`, after it in the later ones. In the phases of storage, the step of the generation.
        phase: hooks: `batch_start`, `forward` (before backward), `after_backward`, `before_optimizer_step`, `batch_end`
            and `after_batch_end` (before and after other callbacks), `validation`, `epoch_start`, `epoch_end`. Inside
            checkpoints: `capture` (copies of a step are under way), `seal` (the segment is about to be complete).
            Before calls of storage: `persist` (a segment), `marker` (a rank is done), `commit` (rank 0 makes a
            generation visible), `reclaim` (rank 0 deletes).
        settle: most seconds to wait, before it strikes, until checkpoints under way are stored.
        seconds: seconds that it lasts, also over restarts; `None`: until `steps` are over. For `sigstop`: seconds after which the
            process continues; `None`: never.
        steps: optimizer steps that it lasts, within this process, since a job that cannot start makes none; `None`: until
            `seconds` are over. With neither it lasts until the end of this process.
        latency: for `slow_storage`: seconds added to each call.
        bandwidth: for `slow_storage`: bytes per second of each call that writes or reads; `None` for no limit.
        probability: for `storage_errors`: share of the calls that fail; the same ones in every run that makes the same
            calls.
        nbytes: for `full_shared_memory`: most bytes to take, whatever is free.
        at_rest: for `bit_flip`: where the bit is: the newest generation in storage, the rank's own ring, or a replica that
            its node keeps for another rank.
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
        self._require_what_the_kind_takes()
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
        if surplus := given - _OPTIONS[self.kind]:
            takes = ", ".join(sorted(_OPTIONS[self.kind])) or "none of them"
            raise ConfigurationError(f"{self}: {self.kind} has no {', '.join(sorted(surplus))}. It takes {takes}.")
        if self.kind == "slow_storage" and not given & {"latency", "bandwidth"}:
            raise ConfigurationError(f"{self} slows nothing down. Give `latency` or `bandwidth`.")
        if self.kind == "storage_errors" and self.probability is None:
            raise ConfigurationError(f"{self} needs `probability`.")
        if self.kind == "full_shared_memory" and self.nbytes is None:
            raise ConfigurationError(f"{self} needs `nbytes`: the most it may take from everybody on this machine.")

    def given(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        defaults = {each.name: each.default for each in fields(self) if each.default is not MISSING}
        return {name: getattr(self, name) for name, default in defaults.items() if getattr(self, name) != default}

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
    """Return a fault at one place of training.

    Args:
        rank: rank on which it strikes.
        step: value of `trainer.global_step` from which on it strikes.
        phase: the hook or moment, see `Fault.phase`.
        kind: kind of the fault, see `Fault.kind`.
        options: other fields of `Fault`.

    Raises:
        ConfigurationError: a value is out of range, or the kind does not take it.
    """
    return Fault(kind=kind, rank=rank, step=step, phase=phase, **options)
