"""Checkpointing systems: ours by policy, and those of the papers.

Each adds seconds and places to a run. Windows come from this package's planner, and K from its rule for partial generations.

Sources: CheckFreq (2021); Gemini (2023); PEC (2024), the system MoC; MoEvement (2026), whose Sec. 5 has the settings of the first three;
TierCheck (2026), Sec. 5.1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, get_args

from typing_extensions import override

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.policies import PlannerName, next_k
from lightning_moe_ckpt.simulation._behaviour import (
    STORED,
    Behaviour,
    PlannedWindow,
    SimulatedTier,
    full_nbytes,
    mean_cycle,
    memory_of,
    places_of,
    plan_of,
    stall,
)
from lightning_moe_ckpt.simulation._profile import Profile

OurPolicy = Literal["sparse", "dense", "differential", "partial"]
_CHOICES = {"policy": get_args(OurPolicy), "planner": get_args(PlannerName), "localized": (True, False)}
_LEAST = {**dict.fromkeys(("window", "every_n_steps", "interval", "batch", "k"), 1), "replicas": 0, "storage_every": 0}
_MOST = {"portion": 1.0, "plt_budget": 1.0, "saved": 1.0, "target": 1e3, "overhead": 1e3, "nbytes_delta": 1e3}
"""Limits of settings by name: choices, least counts, and largest factors."""


def _wrong(name: str, value: object) -> str:
    """Return what a setting must be, or nothing if it is that."""
    if name in _CHOICES:
        return "" if value in _CHOICES[name] else f"one of {', '.join(map(str, _CHOICES[name]))}"
    if name in _LEAST:
        good = isinstance(value, int) and not isinstance(value, bool) and _LEAST[name] <= value <= 10**9
        return "" if good else f"a whole number of {_LEAST[name]} or more"
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST[name]
    zero = name in {"plt_budget", "saved", "overhead"}
    good = good and (zero or value != 0)
    return "" if good else f"a number {'of 0 or more' if zero else 'above 0'}, at most {_MOST[name]:g}"


class System(ABC):
    """A checkpointing system with its settings."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, each.name)
            if (wanted := _wrong(each.name, value)) and not (value is None and each.default is None):
                raise ConfigurationError(f"`{type(self).__name__}({each.name}={value!r})` must be {wanted}.")

    @abstractmethod
    def behaviour(self, profile: Profile, mtbf: float) -> Behaviour:
        """Return the additions to a starting run, with failures `mtbf` seconds apart on average."""

    def grown(self, profile: Profile, now: Behaviour, plt: float, last_loss: float) -> Behaviour:
        """Return the behaviour after a failure: `plt` of the tokens are lost so far, `last_loss` of them by this failure."""
        return now


@dataclass(frozen=True, kw_only=True)
class _Tiered(System):
    replicas: int = 2
    """Copies on other nodes, or on all of them where there are fewer."""
    storage_every: int | None = None
    """Least steps between generations in storage; `None` for storage's best, 0 for no storage."""


@dataclass(frozen=True, kw_only=True)
class NoCheckpoints(System):
    """Training begun anew after every failure."""

    @override
    def behaviour(self, profile: Profile, mtbf: float) -> Behaviour:
        return _behaviour(profile, (), 0.0, all_start=True)


@dataclass(frozen=True, kw_only=True)
class CheckFreq(System):
    """Everything to storage, as often as a limit on overhead allows."""

    target: float = 0.03
    """Largest overhead, as a part of a step."""
    interval: int | None = None
    """Steps between generations; `None` for the shortest within the limit and storage's speed."""

    @override
    def behaviour(self, profile: Profile, mtbf: float) -> Behaviour:
        nbytes = full_nbytes(profile)
        cost = _waits(profile) + nbytes * profile.costs.slowed_per_nbyte
        put = nbytes * profile.ranks / profile.speeds.storage
        least = max(cost / self.target, put, profile.step_seconds) / profile.step_seconds
        every = self.interval or math.ceil(least)
        places = [place for place in places_of(profile, [nbytes], every) if place.name == STORED]
        return _everything(profile, places, every, replicas=0)


@dataclass(frozen=True, kw_only=True)
class Gemini(_Tiered):
    """Everything to memory of the node and of others, at the interval with the best expected goodput: an oracle."""

    interval: int | None = None
    """Steps between generations; `None` asks the oracle."""

    @override
    def behaviour(self, profile: Profile, mtbf: float) -> Behaviour:
        if self.interval is not None or mtbf == float("inf"):
            return self.every(profile, self.interval or 1000)
        return _best(self, profile, mtbf)

    def every(self, profile: Profile, every: int) -> Behaviour:
        """Return the behaviour with an interval."""
        tiers: dict[str, Any] = {"replicas": self.replicas, "storage_every": self.storage_every}
        places = places_of(profile, [full_nbytes(profile)], every, **tiers)
        return _everything(profile, places, every, replicas=self.replicas)


@dataclass(frozen=True, kw_only=True)
class MoC(_Tiered):
    """Some experts in every step, twice as many after each failure once too many tokens are lost."""

    portion: float = 1 / 8
    """Part of a layer's experts in a step, at first (MoEvement, Fig. 10c)."""
    plt_budget: float = 0.05
    """Largest portion of lost tokens (PEC, Sec. 3.1)."""
    overhead: float = 0.0
    """Overhead at first beyond the bytes', as a part of a step."""

    @override
    def behaviour(self, profile: Profile, mtbf: float) -> Behaviour:
        return self._taking(profile, self.portion)

    def _taking(self, profile: Profile, portion: float) -> Behaviour:
        grown = (portion - self.portion) / (1 - self.portion) if portion < 1 else 1.0
        more = self.overhead * profile.step_seconds + grown * profile.costs.stall_whole
        return _partial(profile, portion, 1, more, replicas=self.replicas, storage_every=self.storage_every)

    @override
    def grown(self, profile: Profile, now: Behaviour, plt: float, last_loss: float) -> Behaviour:
        # PEC doubles once the limit is exceeded, and not when the next failure would: so nothing comes on top of what is lost.
        whole = round(1 / self.portion)
        taken = next_k(
            1, last_k=round(now.taken * whole), plt=plt, last_loss=0.0, plt_budget=self.plt_budget, num_experts=whole
        )
        return self._taking(profile, taken / whole)


@dataclass(frozen=True, kw_only=True)
class MoEvement(_Tiered):
    """Sparse windows back to back, by Algorithm 1."""

    window: int | None = None
    """Steps; `None` asks Algorithm 1."""
    localized: bool = True
    """Whether only the failed pipeline stage takes steps again."""
    saved: float = 1 / 3
    """Part of a step saved by parameters without full state: weight gradients and optimizer (Sec. 3.5)."""

    @override
    def behaviour(self, profile: Profile, mtbf: float) -> Behaviour:
        window = plan_of(profile, self.window, "algorithm1")
        # Sec. 3.6 counts as many repeated steps as the window has, one more than this package's replay.
        return _sparse(
            profile, window, replayed=len(window.nbytes), factor=1 - self.saved * window.frozen, localized=self.localized,
            replicas=self.replicas, storage_every=self.storage_every,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TierCheck(System):
    """Everything now and then to all tiers, and compressed gradients of every step between."""

    every_n_steps: int = 50
    """Steps between bases."""
    batch: int = 5
    """Differences per write to storage."""
    nbytes_delta: float = 0.06
    """Bytes of a difference per parameter: of a hundredth of the elements a value of 2 bytes and an index of 4."""

    @override
    def behaviour(self, profile: Profile, mtbf: float) -> Behaviour:
        delta = self.nbytes_delta / profile.model.nbytes_state
        return _differential(profile, self.every_n_steps, self.batch, delta, replicas=1, stored=True, all_start=True)


@dataclass(frozen=True, kw_only=True)
class Ours(System):
    """This package's callbacks."""

    policy: OurPolicy = "sparse"
    """Kind of callback."""
    window: int | None = None
    """Steps of a sparse window; `None` for the shortest whose copies are hidden."""
    planner: PlannerName = "packed"
    """Planner of sparse windows."""
    every_n_steps: int | None = None
    """Steps between generations or bases; `None` for the callback's default: windows are back to back."""
    batch: int = 8
    """Differences per write to storage."""
    k: int = 1
    """A layer's experts in partial generations."""
    plt_budget: float | None = None
    """Largest portion of lost tokens, before K grows; `None` for no limit."""
    replicas: int = 1
    """Copies on other nodes, where there are any."""
    storage_every: int | None = None
    """Least steps between generations in storage; `None` for as often as it keeps up, 0 for no storage."""
    localized: bool = False
    """Whether only the failed pipeline stage takes steps again."""

    @override
    def behaviour(self, profile: Profile, mtbf: float) -> Behaviour:
        if self.replicas >= (nodes := profile.cluster.nodes) and (nodes > 1 or self.replicas > 1):
            raise ConfigurationError(
                f"`replicas={self.replicas}` needs {self.replicas + 1} nodes, and there are {nodes}."
            )
        tiers: dict[str, Any] = {"replicas": self.replicas, "storage_every": self.storage_every}
        if self.policy == "sparse":
            window, factor = plan_of(profile, self.window, self.planner), profile.costs.replay_factor
            tiers |= {"every": self.every_n_steps, "localized": self.localized}
            return _sparse(profile, window, replayed=len(window.nbytes) - 1, factor=factor, **tiers)
        if self.policy == "differential":
            every, stored = self.every_n_steps or 64, self.storage_every != 0
            delta = 4 / profile.model.nbytes_state
            return _differential(profile, every, self.batch, delta, replicas=self.replicas, stored=stored)
        if self.policy == "partial":
            return self._taking(profile, self.k)
        every, nbytes = self.every_n_steps or 100, full_nbytes(profile)
        places, memory = places_of(profile, [nbytes], every, **tiers), memory_of(profile, nbytes, self.replicas)
        hooks = _hooks(profile, 1 / every) + stall(profile, nbytes) / every
        return _behaviour(profile, places, hooks, host_memory=memory, notes={"interval": every})

    @override
    def grown(self, profile: Profile, now: Behaviour, plt: float, last_loss: float) -> Behaviour:
        if self.plt_budget is None:
            return now
        k, experts = round(now.taken * profile.model.experts), profile.model.experts
        k = next_k(self.k, last_k=k, plt=plt, last_loss=last_loss, plt_budget=self.plt_budget, num_experts=experts)
        return self._taking(profile, k)

    def _taking(self, profile: Profile, k: int) -> Behaviour:
        portion, every = min(1.0, k / max(1, profile.model.experts)), self.every_n_steps or 1
        return _partial(profile, portion, every, 0.0, replicas=self.replicas, storage_every=self.storage_every)


@lru_cache
def _best(system: Gemini, profile: Profile, mtbf: float) -> Behaviour:
    longest = max(1.0, 4 * mtbf / profile.step_seconds)
    found = [system.every(profile, every) for every in sorted({round(longest ** (i / 96)) for i in range(97)})]
    return max(found, key=lambda each: mean_cycle(profile, each, mtbf).share)


def _behaviour(
    profile: Profile, places: Sequence[SimulatedTier], hooks: float, *, all_start: bool = False, **more: Any
) -> Behaviour:
    """Return a behaviour whose steps are slowed by all bytes of its places; failures start lost ranks only, or all of them."""
    costs = profile.costs
    startup = costs.startup if not all_start or costs.startup_all is None else costs.startup_all
    slowed = costs.slowed_per_nbyte * sum(place.nbytes for place in places) / profile.ranks
    more.setdefault("again", profile.step_seconds)
    return Behaviour(places=tuple(places), hooks=hooks, slowed=slowed, startup=startup, **more)


def _waits(profile: Profile) -> float:
    """Return the seconds that training waits for a generation of everything."""
    return profile.costs.stall_whole + stall(profile, full_nbytes(profile))


def _everything(profile: Profile, places: Sequence[SimulatedTier], every: int, *, replicas: int) -> Behaviour:
    """Return the behaviour of systems that take everything in one step, and start all ranks anew."""
    memory, hooks = memory_of(profile, full_nbytes(profile), replicas), _waits(profile) / every
    return _behaviour(profile, places, hooks, all_start=True, host_memory=memory, notes={"interval": every})


def _hooks(profile: Profile, captured: float) -> float:
    """Return the hooks of a step on average, if something is taken in a part `captured` of the steps."""
    return profile.costs.hooks_per_step * (1 - captured) + profile.costs.hooks_per_capture * captured


def _sparse(
    profile: Profile, window: PlannedWindow, *, replayed: int, factor: float, localized: bool, replicas: int,
    storage_every: int | None, every: int | None = None,
) -> Behaviour:  # fmt: skip
    steps = len(window.nbytes)
    every = max(every or 0, steps)
    places = places_of(profile, window.nbytes, every, replicas=replicas, storage_every=storage_every)
    hooks = _hooks(profile, steps / every) + sum(stall(profile, nbytes) for nbytes in window.nbytes) / every
    again = profile.step_seconds * (profile.alone_share if localized else 1.0)
    memory, notes = memory_of(profile, window.total, replicas), {"window": steps, "interval": every}
    return _behaviour(
        profile, places, hooks, replayed=replayed, replay=factor * again, again=again, host_memory=memory, notes=notes
    )


def _differential(
    profile: Profile, every: int, batch: int, delta: float, *, replicas: int, stored: bool, all_start: bool = False
) -> Behaviour:
    """Return the behaviour of bases, and differences `delta` times as large."""
    full = full_nbytes(profile)
    nbytes, chain = delta * full, delta * full * every / 2
    tiers: dict[str, Any] = {"replicas": replicas, "storage_every": None if stored else 0, "restored": full + chain}
    # A place takes differences if it keeps up with them, storage in batches; else it has bases only.
    kinds = ((full, every), (nbytes, 1), (nbytes * batch, batch))
    tried = (places_of(profile, [each], steps, **tiers) for each, steps in kinds)
    places = []
    for base, single, batched in zip(*tried, strict=True):
        own, steps = (batched, batch) if base.name == STORED else (single, 1)
        taken = replace(base, every=own.every, lag=own.lag, nbytes=base.nbytes + own.nbytes)
        places.append(taken if own.every == steps else base)
    waits = profile.costs.stall_whole * all_start + stall(profile, full)
    hooks = _hooks(profile, 1.0) + waits / every + stall(profile, nbytes)
    # As in a run, memory keeps a batch and the newest two, and receivers of copies have room for two more.
    kept, copies = min(every - 1, batch) + 2, min(replicas, profile.cluster.nodes - 1)
    memory = memory_of(profile, full, replicas)
    memory += profile.cluster.ranks_per_node * nbytes * (kept + copies * (kept + 2))
    return _behaviour(profile, places, hooks, all_start=all_start, host_memory=memory, notes={"interval": every})


def _partial(
    profile: Profile, portion: float, every: int, more: float, *, replicas: int, storage_every: int | None
) -> Behaviour:
    """Return the behaviour of generations with the dense part and a portion of every layer's experts."""
    full, dense = full_nbytes(profile), profile.dense_params / profile.model.params
    nbytes = full * (dense + (1 - dense) * portion)
    places = places_of(profile, [nbytes], every, replicas=replicas, storage_every=storage_every, restored=full)
    hooks = _hooks(profile, 1 / every) + stall(profile, nbytes) / every + more
    # Experts take turns, so their newest copies are of all ages up to a round.
    unsaved, notes = every * (1 / portion - 1) / 2, {"k": portion * profile.model.experts, "interval": every}
    memory = memory_of(profile, full, replicas)
    return _behaviour(profile, places, hooks, host_memory=memory, taken=portion, unsaved=unsaved, notes=notes)


SYSTEMS: dict[str, System] = {
    "none": NoCheckpoints(),
    "checkfreq": CheckFreq(),
    "gemini": Gemini(),
    "moc": MoC(),
    "tiercheck": TierCheck(),
    "moevement-global": MoEvement(localized=False),
    "moevement": MoEvement(),
    "ours-dense": Ours(policy="dense"),
    "ours-differential": Ours(policy="differential"),
    "ours-partial": Ours(policy="partial"),
    "ours-sparse": Ours(),
    "ours-localized": Ours(localized=True),
}
"""Systems by their names on the command line, with their settings there."""
