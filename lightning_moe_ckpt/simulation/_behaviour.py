"""A checkpointing system's additions to a run: seconds of each step, and places with generations for a restart.

Systems differ in nothing else, so the simulation knows no system (`_systems.py` has them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from lightning_moe_ckpt._units import time_text
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.goodput import PARTS, Goodput
from lightning_moe_ckpt.policies import PlanItem, PlannerName, plan_for_window, plan_window, split_nbytes
from lightning_moe_ckpt.simulation._profile import SCOPES, Profile, Scope

MEMORY_OF_NODE, OTHER_NODES, STORED = "memory", "other nodes", "storage"
"""Names of places."""


@dataclass(frozen=True, kw_only=True)
class SimulatedTier:
    """A place with generations, each complete some time after its last step."""

    name: str
    """Memory of the node, other nodes, or storage."""
    survives: Scope
    """Largest failure survived by its generations."""
    every: int
    """Steps between generations."""
    lag: float
    """Seconds from a generation's last step until the place has all of it."""
    restore: float
    """Seconds to bring and load a generation."""
    nbytes: float
    """Bytes per step, all ranks together."""
    copies: int = 0
    """Copies on other nodes; losses beyond their number at once may take the state."""


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """A system's additions to a run with a certain profile, until a failure changes them."""

    places: tuple[SimulatedTier, ...] = ()
    """Places to restore from, fastest first. Without any a failure leads back to the run's start."""
    hooks: float = 0.0
    """Mean seconds per step for which training waits."""
    slowed: float = 0.0
    """Mean seconds per step by which training is slower."""
    startup: float
    """Seconds from acting on a failure until restoring begins."""
    replayed: int = 0
    """Steps repeated to make a restored generation dense."""
    replay: float = 0.0
    """Seconds of such a step."""
    again: float
    """Seconds of a lost step taken again, without hooks."""
    host_memory: float = 0.0
    """Bytes of generations on a node."""
    taken: float = 1.0
    """Part of each layer's experts in a generation."""
    unsaved: float = 0.0
    """Steps lost for good by a failure, as a mean over all parameters."""
    notes: dict[str, float] = field(default_factory=dict)
    """Settings chosen by the system, such as its interval, for tables."""

    @property
    def extra(self) -> float:
        """Seconds per step beyond training."""
        return self.hooks + self.slowed


@dataclass(frozen=True, kw_only=True)
class PlannedWindow:
    """A rank's sparse window, as planned."""

    nbytes: tuple[int, ...]
    """Bytes of each step."""
    frozen: float
    """Mean part of the parameters without full state in the steps of a replay."""

    @property
    def total(self) -> int:
        """Bytes of a generation of one rank."""
        return sum(self.nbytes)


@lru_cache
def rank_items(profile: Profile) -> tuple[PlanItem, ...]:
    """Return the items of a rank in the largest pipeline stage: each byte has one writer, and all ranks write alike."""
    model, cluster = profile.model, profile.cluster
    if model.operators:
        return tuple(PlanItem(f"operator.{i}", full, compute, i) for i, (full, compute) in enumerate(model.operators))
    layers, per_stage = -(-model.layers // cluster.pipeline), profile.ranks // cluster.pipeline
    parts = max(1, min(cluster.expert_parallel, model.experts))
    each, holders = -(-model.experts // parts), per_stage // parts
    shares = [(f"{i}.expert.{e}", model.expert_params / holders) for i in range(layers) for e in range(each)]
    shares += [(f"{i}.dense", profile.dense_params / model.layers / per_stage) for i in range(layers)]
    full, compute = model.nbytes_state, min(model.nbytes_compute, model.nbytes_state)
    # What every token uses comes last, as in the planner.
    return tuple(
        PlanItem(name, math.ceil(n * full), math.ceil(n * compute), name.endswith("dense")) for name, n in shares if n
    )


@lru_cache
def full_nbytes(profile: Profile) -> int:
    """Return a rank's bytes of everything."""
    return sum(item.full_nbytes for item in rank_items(profile))


@lru_cache
def plan_of(profile: Profile, window: int | None, planner: PlannerName) -> PlannedWindow:
    """Return the window of a length, or else the shortest whose steps' copies take no longer than a step."""
    items, budget = rank_items(profile), int(min(1e18, profile.speeds.device_host * profile.step_seconds))
    if window is None and planner == "packed":
        items = _cut(items, split_nbytes(items, budget))
    if window is None:
        least = max(budget, *(item.full_nbytes for item in items))
        plan = plan_window(items, budget_nbytes=least, planner=planner, max_window=64)
    elif planner == "packed":
        plan = plan_for_window(items, window)
    else:
        plan = plan_window(items, budget_nbytes=1, planner=planner, max_window=window)
    of = {item.name: item for item in items}
    full = [sum(of[name].full_nbytes for name in plan.full(i)) for i in range(plan.window)]
    waits = [
        sum(of[name].compute_nbytes for j in range(i + 1, plan.window) for name in plan.full(j))
        for i in range(plan.window)
    ]
    # In the step that is repeated with the i-th step's state, what comes later is still frozen.
    frozen = [1 - sum(full[: i + 1]) / sum(full) for i in range(plan.window)]
    return PlannedWindow(nbytes=tuple(map(sum, zip(full, waits, strict=True))), frozen=sum(frozen) / plan.window)


def _cut(items: Sequence[PlanItem], nbytes: int) -> tuple[PlanItem, ...]:
    pieces = []
    for item in items:
        parts = -(-item.full_nbytes // nbytes)
        sizes = item.full_nbytes // parts, item.compute_nbytes // parts
        pieces += [PlanItem(f"{item.name}#{i}", *sizes, item.order_key) for i in range(parts)]
    return tuple(pieces)


def places_of(
    profile: Profile, steps: Sequence[float], every: int, *, replicas: int = 0, storage_every: int | None = None,
    restored: float | None = None,
) -> tuple[SimulatedTier, ...]:  # fmt: skip
    """Return memory, other nodes and storage, each with as many generations as its speed allows.

    `steps` are a rank's bytes in each step of a generation, taken `every` so many steps, and `restored` its bytes in a restore, by default the same.
    `storage_every` is the least number of steps between generations in storage, 0 for no storage.
    """
    speeds, cluster, costs, step = profile.speeds, profile.cluster, profile.costs, profile.step_seconds
    # Ranks of smaller pipeline stages write less than the largest stage's, of which `steps` are.
    nbytes, ranks = sum(steps), profile.ranks * _evenness(profile)
    whole = nbytes if restored is None else restored
    here = costs.restore_fixed + whole * costs.restore_per_nbyte
    taken = steps[-1] / speeds.device_host
    tiers: list[tuple[str, Scope, int, float, float, int]] = [(MEMORY_OF_NODE, "process", every, taken, 0.0, 0)]
    if replicas := min(replicas, cluster.nodes - 1):
        second = cluster.ranks_per_node * replicas / speeds.host_host
        kept = every * max(1, math.ceil(nbytes * second / (every * step)))
        way = whole * cluster.ranks_per_node / speeds.host_host
        tiers.append((OTHER_NODES, "node", kept, taken + steps[-1] * second, way, replicas))
    if storage_every != 0:
        put = nbytes * ranks / speeds.storage
        kept = every * math.ceil(max(storage_every or 1, put / step) / every)
        tiers.append((STORED, "cluster", kept, taken + put, whole * ranks / speeds.storage, 0))
    return tuple(
        SimulatedTier(name=name, survives=survives, every=kept, lag=lag, restore=here + way, copies=copies,
                      nbytes=nbytes * ranks * max(1, copies) / kept)
        for name, survives, kept, lag, way, copies in tiers
    )  # fmt: skip


def _evenness(profile: Profile) -> float:
    """Return a rank's mean bytes, as a part of a rank's in the largest stage."""
    if profile.model.operators:
        return 1.0
    return profile.model.params * profile.model.nbytes_state / profile.ranks / full_nbytes(profile)


def stall(profile: Profile, nbytes: float) -> float:
    """Return the seconds for which training waits for a step's copies: the next optimizer step must not overtake them."""
    return max(0.0, nbytes / profile.speeds.device_host - profile.step_seconds)


def memory_of(profile: Profile, nbytes: float, replicas: int) -> float:
    """Return a node's bytes for two generations, the newest whole and the next, copies for other nodes included."""
    return 2 * nbytes * profile.cluster.ranks_per_node * (1 + min(replicas, profile.cluster.nodes - 1))


def recovery(
    profile: Profile, behaviour: Behaviour, place: SimulatedTier | None, idle: float
) -> list[tuple[str, float]]:
    """Return the phases of a recovery in their order, with their seconds; `place` has the generation, `None` begins anew."""
    return [
        ("detection", profile.costs.detection),
        ("idle", idle),
        ("startup", behaviour.startup),
        ("restore", place.restore if place else 0.0),
        ("repeated", behaviour.replayed * behaviour.replay if place else 0.0),
        ("startup", profile.costs.warm_up),
    ]


_HOPELESS = 100.0
"""Shortest hopeless recovery, in mean times between failures."""


def mean_cycle(profile: Profile, behaviour: Behaviour, mtbf: float, scope: Scope = "node") -> Goodput:
    """Return the mean seconds of a cycle by part under a Poisson process of failures; of a step without failures. The run's first start
    is left out.

    A cycle is a recovery, begun anew by each failure within, and the training until the next failure. In training of random
    length X a run completes generations of E steps: one for each k with k E steps and the place's lag within X, so
    E sum(exp(-(k E c + lag) / MTBF)) steps of c seconds stay. All steps beyond are taken again in the next cycle. Differs from
    MoEvement (2026), Sec. 2.4, in counting failures during recovery, steps in flight, and the time before restoring.
    """
    step, extra = profile.step_seconds, behaviour.extra
    if mtbf == math.inf:
        return Goodput(productive=step, hooks=behaviour.hooks, slowed=behaviour.slowed)
    usable = [place for place in behaviour.places if SCOPES.index(place.survives) >= SCOPES.index(scope)]
    kept, place = 0.0, None
    for each in usable:
        if (steps := _kept(each, step + extra, mtbf)) > kept:
            kept, place = steps, each
    waits = profile.costs.repair if scope == "cluster" else 0.0
    if scope == "node":  # machines that are away block a part of all time: this wait has that part
        waits = -mtbf * log_enough(profile.costs.repair / mtbf, profile.cluster.spares)
    phases = recovery(profile, behaviour, place, waits)
    if (left := sum(seconds for _, seconds in phases) / mtbf) > _HOPELESS:
        return sum((Goodput(**{name: seconds}) for name, seconds in phases), Goodput())
    parts = dict.fromkeys(PARTS, 0.0)
    for name, seconds in phases:
        parts[name] += mtbf * (math.exp(left) - math.exp(left - seconds / mtbf))
        left -= seconds / mtbf
    again = mtbf / (step + extra) - kept
    first = max(0.0, (mtbf - again * (behaviour.again + extra)) / (step + extra))
    steps, trained = first + again, {"productive": first * step, "lost": again * behaviour.again}
    return Goodput(**parts) + Goodput(**trained, hooks=steps * behaviour.hooks, slowed=steps * behaviour.slowed)


def refuse_hopeless(profile: Profile, mtbf: float) -> None:
    """Raise `ConfigurationError` if failures are closer than a step takes."""
    if mtbf <= (step := profile.step_seconds):
        raise ConfigurationError(
            f"`mtbf={time_text(float(mtbf))}` must be longer than a step, {time_text(float(step))}: failures would end most steps before they "
            "are done, and no checkpoint can keep a step that was not taken. Take shorter steps (fewer micro-batches), or find out what fails."
        )


def log_enough(away: float, spares: int) -> float:
    """Return the logarithm of the probability that no more machines than spares are away: a Poisson number, whose mean is `away`."""
    if not away:
        return 0.0
    upwards = spares >= away  # the smaller tail is summed, from its largest term on
    number = spares + upwards
    first = number * math.log(away) - away - math.lgamma(number + 1)
    total = term = 1.0
    while term > 1e-16 * total:
        number += upwards
        term *= away / number if upwards else number / away
        number -= not upwards
        total += term
    return math.log1p(-total * math.exp(first)) if upwards else first + math.log(total)


def _kept(place: SimulatedTier, step: float, mtbf: float) -> float:
    """Return a cycle's mean steps kept by a place, where a step takes `step` seconds."""
    generation = place.every * step / mtbf
    return place.every * math.exp(-place.lag / mtbf - generation) / -math.expm1(-generation)
