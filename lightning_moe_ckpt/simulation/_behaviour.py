"""What a checkpointing system adds to a run: seconds of each step, and places that a restart finds generations in.

Systems differ in nothing else, so the simulation knows no system (`_systems.py` has them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from lightning_moe_ckpt.policies import PlanItem, PlannerName, plan_for_window, plan_window, split_nbytes
from lightning_moe_ckpt.simulation._failures import Scope
from lightning_moe_ckpt.simulation._profile import Profile

MEMORY_OF_NODE, OTHER_NODES, STORED = "memory", "other nodes", "storage"
"""Names of places."""


@dataclass(frozen=True, kw_only=True)
class SimulatedTier:
    """A place with generations, each complete some time after its last step."""

    name: str
    """Memory of the node, other nodes, or storage."""
    survives: Scope
    """Largest failure after which its generations are still there."""
    every: int
    """Steps from one generation to the next."""
    lag: float
    """Seconds from a generation's last step until the place has all of it."""
    restore: float
    """Seconds to bring and load one."""
    nbytes: float
    """Bytes that it takes per step, of all ranks."""
    copies: int = 0
    """Copies on other nodes; one node more lost at once may be one too many."""


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """What a system adds to a run with a certain profile, until a failure changes it."""

    places: tuple[SimulatedTier, ...] = ()
    """Places to restore from, those that are restored fastest first. Without any a failure leads back to the run's start."""
    hooks: float = 0.0
    """Seconds that training waits in a step, on average."""
    slowed: float = 0.0
    """Seconds by which a step is longer, on average."""
    startup: float
    """Seconds from acting on a failure until restoring begins."""
    replayed: int = 0
    """Steps that a restored generation covers and that are repeated to make it dense."""
    replay: float = 0.0
    """Seconds of such a step."""
    again: float
    """Seconds of a step that was lost and is taken again, without hooks."""
    host_memory: float = 0.0
    """Bytes of generations on a node."""
    taken: float = 1.0
    """Part of each layer's experts that a generation takes."""
    unsaved: float = 0.0
    """Steps of training that a failure loses for good, as a mean over all parameters."""
    notes: dict[str, float] = field(default_factory=dict)
    """Settings that the system has chosen, such as its interval, for tables."""

    @property
    def extra(self) -> float:
        """Seconds that a step takes beyond training."""
        return self.hooks + self.slowed


@dataclass(frozen=True, kw_only=True)
class PlannedWindow:
    """A sparse window of one rank, as the planner has it."""

    nbytes: tuple[int, ...]
    """Bytes of each step."""
    frozen: float
    """Parameters that wait for their full state, as a part of all, on average over the steps of a replay."""

    @property
    def total(self) -> int:
        """Bytes of a generation of one rank."""
        return sum(self.nbytes)


@lru_cache
def rank_items(profile: Profile) -> tuple[PlanItem, ...]:
    """Return what a rank of the largest pipeline stage writes: each byte has one writer, and all ranks write alike."""
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
    """Return the bytes of everything that a rank writes."""
    return sum(item.full_nbytes for item in rank_items(profile))


@lru_cache
def plan_of(profile: Profile, window: int | None, planner: PlannerName) -> PlannedWindow:
    """Return the window of a length, or else the shortest whose steps' copies take no longer than a step."""
    items, budget = rank_items(profile), int(profile.speeds.device_host * profile.step_seconds)
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
    profile: Profile,
    steps: Sequence[float],
    every: int,
    *,
    replicas: int = 0,
    storage_every: int | None = None,
    restored: float | None = None,
) -> tuple[SimulatedTier, ...]:
    """Return memory, other nodes and storage, which take every generation that they are fast enough for.

    Args:
        profile: of the run.
        steps: bytes of one rank in each step of a generation.
        every: steps from one generation to the next.
        replicas: copies on other nodes.
        storage_every: least steps between generations in storage; 0 for no storage.
        restored: bytes of one rank that a restore brings; by default a generation.
    """
    speeds, cluster, costs, step = profile.speeds, profile.cluster, profile.costs, profile.step_seconds
    # Ranks of smaller pipeline stages write less than the largest stage's, of which `steps` are.
    nbytes, ranks = sum(steps), profile.ranks * _evenness(profile)
    whole = nbytes if restored is None else restored
    here = costs.restore_fixed + whole * costs.restore_per_nbyte
    taken = steps[-1] / speeds.device_host
    found = [
        SimulatedTier(
            name=MEMORY_OF_NODE, survives="process", every=every, lag=taken, restore=here, nbytes=nbytes * ranks / every
        )
    ]
    if replicas and cluster.nodes > 1:
        second = cluster.ranks_per_node * replicas / speeds.host_host
        kept = every * max(1, math.ceil(nbytes * second / (every * step)))
        way = whole * cluster.ranks_per_node / speeds.host_host
        place = SimulatedTier(name=OTHER_NODES, survives="node", every=kept, lag=taken + steps[-1] * second, restore=here + way,
                      nbytes=nbytes * ranks * replicas / kept, copies=replicas)  # fmt: skip
        found.append(place)
    if storage_every != 0:
        put = nbytes * ranks / speeds.storage
        kept = every * math.ceil(max(storage_every or 1, put / step) / every)
        way = whole * ranks / speeds.storage
        place = SimulatedTier(
            name=STORED,
            survives="cluster",
            every=kept,
            lag=taken + put,
            restore=here + way,
            nbytes=nbytes * ranks / kept,
        )
        found.append(place)
    return tuple(found)


def _evenness(profile: Profile) -> float:
    """Return the mean bytes that a rank writes, as a part of what a rank of the largest stage does."""
    if profile.model.operators:
        return 1.0
    return profile.model.params * profile.model.nbytes_state / profile.ranks / full_nbytes(profile)


def stall(profile: Profile, nbytes: float) -> float:
    """Return the seconds that training waits for a step's copies, which the next optimizer step must not overtake."""
    return max(0.0, nbytes / profile.speeds.device_host - profile.step_seconds)


def memory_of(profile: Profile, nbytes: float, replicas: int) -> float:
    """Return the bytes on a node of two generations, one whole and one under way, its own and those kept for others."""
    return 2 * nbytes * profile.cluster.ranks_per_node * (1 + (replicas if profile.cluster.nodes > 1 else 0))


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
    ]
