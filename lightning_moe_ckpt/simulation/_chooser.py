"""Choose how a run takes checkpoints: the best expected goodput that fits into memory wins.

Candidates are a policy, a window, copies on other nodes and experts taken. For each of them the steps between generations and the time
between generations in storage are searched for, by turns.

Failures are of one scope, and one in twenty is taken to reach every node's memory: without these no storage would be worth its bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_moe_ckpt._units import size_text, time_text
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.goodput import Goodput
from lightning_moe_ckpt.planning._forecast import forecast_run
from lightning_moe_ckpt.policies import DensePolicy, DifferentialPolicy, PartialPolicy, Policy, SparsePolicy
from lightning_moe_ckpt.simulation._behaviour import (
    STORED,
    Behaviour,
    log_enough,
    mean_cycle,
    rank_items,
    refuse_hopeless,
)
from lightning_moe_ckpt.simulation._profile import Profile, Scope
from lightning_moe_ckpt.simulation._systems import Ours

EVERY_MEMORY = 0.05
"""Part of the failures in which every node's memory is lost, where usually less is."""
_WINDOWS = (2, 3, 4, 5, 6, 8, 12, 16)
_BASES = (16, 32, 64, 128, 256)
"""Steps between full states with differences between them."""
_STORAGE_SECONDS = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)
"""Times between generations in storage; more than an hour is no choice, whatever the savings."""
_NEAR = 1.1
"""Least factor between intervals told apart."""
_SPARES_SHORT = 0.01
"""Largest chance for more machines away than spares."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A way to take checkpoints, with expected goodput and costs."""

    system: Ours
    """Policy and settings."""
    goodput: Goodput
    """Parts of a mean cycle between failures, in seconds."""
    window: int
    """Steps of a generation."""
    every: int
    """Steps between generations."""
    storage_seconds: float
    """Seconds between generations in storage."""
    storage_nbytes_per_hour: float
    """Bytes to storage in an hour, all ranks together."""
    host_nbytes: int
    """Bytes of shared memory on a node, with two generations."""
    lost_portion: float
    """Portion of tokens lost for good; 0 for exact policies."""
    spares: int
    """Spare machines, or waiting processes."""
    spares_needed: int
    """Number of spares that is too small in one of a hundred moments at most."""
    plans_storage: bool
    """Whether storage rests between generations."""

    @property
    def label(self) -> str:
        """Policy, with its distinctive setting."""
        more = {"sparse": f", window {self.window}", "partial": f", k {self.system.k}"}.get(self.system.policy, "")
        return f"{self.system.policy}{more}"

    @property
    def overhead(self) -> float:
        """Part of training's time in hooks and by slower steps."""
        parts = self.goodput
        return (parts.hooks + parts.slowed) / (parts.productive + parts.hooks + parts.slowed)

    def callback(self) -> tuple[str, dict[str, Any]]:
        """Return the name of the callback's class, and its arguments without the URL, as values of YAML."""
        system, given = self.system, dict[str, Any]()
        if system.policy == "sparse":
            given |= {"window": self.window} | ({"every_n_steps": self.every} if self.every > self.window else {})
        else:
            given["every_n_steps"] = self.every
        if system.policy == "differential":
            given["batch"] = system.batch
        if system.policy == "partial":
            given |= {"k": system.k, "plt_budget": system.plt_budget}
        given["replicas"] = system.replicas
        if self.plans_storage:
            # Tiers then rest as long as this cost asks for, which is about the time below.
            given |= {
                "overhead_target": max(0.001, round(self.overhead, 3)),
                "storage_at_least": f"{max(1, round(self.storage_seconds))}s",
            }
        elif system.policy != "differential":
            given["overhead_target"] = None
        return f"{system.policy.title()}{'Expert' * (system.policy == 'partial')}Checkpoint", given

    def document(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        name, given = self.callback()
        costs = ("storage_seconds", "storage_nbytes_per_hour", "host_nbytes", "lost_portion", "spares", "spares_needed")
        return {
            "policy": self.system.policy,
            "replicas": self.system.replicas,
            "goodput": self.goodput.share,
            "parts": self.goodput.shares(),
            **{name: getattr(self, name) for name in ("window", "every", *costs)},
            "callback": {"class_path": f"lightning_moe_ckpt.callbacks.{name}", "init_args": given},
        }


def choose(
    profile: Profile, mtbf: float, *, scope: Scope | None = None, allow_loss: float = 0.0, host_nbytes: int | None = None,
    replicas: int | None = None, policies: Sequence[str] = ("sparse", "dense", "differential", "partial"),
) -> list[PlannedRun]:  # fmt: skip
    """Return the best ways to take checkpoints, best first, different in policy, window or experts: three at most.

    The whole run fails every `mtbf` seconds, usually with the loss `scope`: by default a node where there are several, else a process. `allow_loss` is
    the largest portion of tokens that may be lost for good. `host_nbytes` limits a node's shared memory. `replicas` on other nodes are chosen if `None`.
    Raises `ConfigurationError` if no checkpoint can help at this rate, an argument is out of range, or nothing fits into memory.
    """
    if not 0 <= allow_loss < 1:
        raise ConfigurationError(f"`allow_loss={allow_loss:g}` must be a portion of tokens, from 0 to below 1.")
    refuse_hopeless(profile, mtbf)
    _refuse_starts(profile, mtbf)
    scope = scope or ("node" if profile.cluster.nodes > 1 else "process")
    search = _Search(profile, mtbf, scope)
    found = [search.best(system) for system in _candidates(profile, allow_loss, replicas) if system.policy in policies]
    found.sort(key=lambda each: -each.goodput.share)
    chosen, least, refused = list[PlannedRun](), math.inf, None
    for each in found:
        if each.lost_portion > allow_loss or each.label in [other.label for other in chosen]:
            continue
        try:
            held = _memory(profile, each)
        except ConfigurationError as error:  # which the run's planner would raise
            refused = error
            continue
        least = min(least, held)
        if held <= (math.inf if host_nbytes is None else host_nbytes):
            chosen.append(replace(each, host_nbytes=held))
        if len(chosen) == 3:
            break
    if not chosen and refused is not None and least == math.inf:
        raise refused
    if not chosen:
        raise ConfigurationError(
            f"The least that a node needs is {size_text(least)} of shared memory, and {size_text(host_nbytes or 0)} are given. "
            "Spread the run over more nodes, or see `docs/sizing.md` for what else saves memory."
        )
    return chosen


def reasons(planned: Sequence[PlannedRun]) -> list[str]:
    """Return a sentence for each alternative: its deficit, and the parts with the largest losses and gains."""
    best, *others = planned
    said, ours = list[str](), best.goodput.shares()
    for other in others:
        more = {name: 100 * (its - ours[name]) for name, its in other.goodput.shares().items() if name != "productive"}
        told = sorted((name for name in more if abs(more[name]) >= 0.005), key=lambda name: -abs(more[name]))[:3]
        why = ", ".join(f"{abs(more[name]):.2f} {'more' if more[name] > 0 else 'less'} {name}" for name in told)
        less = 100 * (best.goodput.share - other.goodput.share)
        said.append(f"{other.label}: {less:.2f} points less{why and f': {why}'}")
    return said


def _refuse_starts(profile: Profile, mtbf: float) -> None:
    costs = profile.costs
    back = costs.detection + costs.startup + costs.restore_fixed
    if back > 5 * mtbf:  # one recovery of 150 would succeed
        raise ConfigurationError(
            f"`mtbf={time_text(float(mtbf))}` is too short for a start, which takes {time_text(float(back))} (`costs` of the profile): hardly any "
            "ends before the next failure, whatever is stored. Shorten the start, or let `moe-ckpt run` replace lost processes alone."
        )


def _candidates(profile: Profile, allow_loss: float, replicas: int | None) -> Iterator[Ours]:
    """Yield candidates without intervals."""
    copies = [0] if profile.cluster.nodes == 1 else [each for each in (0, 1, 2) if each < profile.cluster.nodes]
    most, experts = len(rank_items(profile)), profile.model.experts
    for number in copies if replicas is None else [replicas]:
        shared = Ours(replicas=number, localized=profile.cluster.pipeline > 1)
        yield from (replace(shared, window=window) for window in _WINDOWS if window <= most)
        yield replace(shared, policy="dense", localized=False)
        yield replace(shared, policy="differential", localized=False)
        if allow_loss and experts:
            taken = sorted({max(1, experts // part) for part in (2, 4, 8, 16)})
            yield from (replace(shared, policy="partial", k=k, plt_budget=allow_loss, localized=False) for k in taken)


class _Search:
    """Search for intervals, with a profile and a rate of failures."""

    def __init__(self, profile: Profile, mtbf: float, scope: Scope) -> None:
        self._spares = _spares(profile, mtbf, scope)
        cluster = replace(profile.cluster, spares=profile.cluster.spares or self._spares)
        self._profile, self._mtbf, self._scope = replace(profile, cluster=cluster), mtbf, scope
        # A loss of every node's memory, such as by a kill of all processes at once, takes no machine away.
        self._rare = replace(profile, costs=replace(profile.costs, repair=0.0))
        self._rarely = 0.0 if scope == "cluster" else EVERY_MEMORY

    def best(self, system: Ours) -> PlannedRun:
        """Return the candidate with its best cadences."""
        step, found = self._profile.step_seconds, self._at_best_interval(system)
        if system.policy != "differential":  # whose batches all go to storage
            every, stored = found.every_n_steps or 1, self._stored(found)
            seconds = [each for each in _STORAGE_SECONDS if each > stored.every * step]
            slower = {every * max(1, math.ceil(each / step / every)) for each in seconds}
            found = max([found, *(replace(found, storage_every=each) for each in sorted(slower))], key=self._share)
            found = self._at_best_interval(found)
        return self.planned(found)

    def planned(self, found: Ours) -> PlannedRun:
        """Return what is expected of settings."""
        step = self._profile.step_seconds
        behaviour, stored = self._behaviour(found), self._stored(found)
        cycle = self._cycle(behaviour)
        hourly = stored.nbytes * 3600 / (step + behaviour.extra)
        return PlannedRun(
            system=found, goodput=cycle, window=found.window or 1, every=found.every_n_steps or 1,
            storage_seconds=stored.every * (step + behaviour.extra), plans_storage=bool(found.storage_every),
            storage_nbytes_per_hour=hourly * cycle.share, host_nbytes=round(behaviour.host_memory),
            lost_portion=behaviour.unsaved * step / max(cycle.productive, step), spares=self._profile.cluster.spares,
            spares_needed=self._spares,
        )  # fmt: skip

    def _at_best_interval(self, system: Ours) -> Ours:
        """Return the candidate with its best steps between generations: of powers of 4 times a window, then closer and closer."""
        least, factor = system.window or 1, 4.0
        scale = _BASES if system.policy == "differential" else [round(least * factor**power) for power in range(9)]
        best = max((replace(system, every_n_steps=every) for every in scale), key=self._share)
        while system.policy != "differential" and (factor := factor**0.5) > _NEAR:
            near = {max(least, round((best.every_n_steps or least) * by)) for by in (1 / factor, 1.0, factor)}
            best = max((replace(system, every_n_steps=every) for every in sorted(near)), key=self._share)
        return best

    def _behaviour(self, system: Ours) -> Behaviour:
        return system.behaviour(self._profile, self._mtbf)

    def _stored(self, system: Ours) -> Any:
        return next(place for place in self._behaviour(system).places if place.name == STORED)

    def _share(self, system: Ours) -> float:
        return self._cycle(self._behaviour(system)).share

    def _cycle(self, behaviour: Behaviour) -> Goodput:
        usual = mean_cycle(self._profile, behaviour, self._mtbf, self._scope)
        if not self._rarely:
            return usual
        rare, often = asdict(mean_cycle(self._rare, behaviour, self._mtbf, "cluster")), 1 - self._rarely
        return Goodput(**{name: often * each + self._rarely * rare[name] for name, each in asdict(usual).items()})


def _spares(profile: Profile, mtbf: float, scope: Scope) -> int:
    """Return the spares that are hardly ever too few; only failures of nodes need any."""
    if scope != "node" or not profile.costs.repair:
        return 0
    away = profile.costs.repair / mtbf
    least, enough = int(away), math.log1p(-_SPARES_SHORT)
    numbers = range(least, least + 10 + int(10 * away**0.5))
    return least + bisect_left(numbers, enough, key=lambda number: log_enough(away, number))


def _memory(profile: Profile, planned: PlannedRun) -> int:
    """Return the bytes of shared memory on a node, planned and laid out as in the run; the simulation's sum where numbers make no model."""
    model, cluster, system = profile.model, profile.cluster, planned.system
    sizes = {name: getattr(model, name) for name in ("layers", "experts", "params", "expert_params")}
    described = {"config": None, **sizes}
    described |= {"nodes": cluster.nodes, "ranks_per_node": cluster.ranks_per_node, "replicas": system.replicas}
    described |= {"expert_parallel": cluster.expert_parallel, "stages": cluster.pipeline}
    kinds: dict[str, Policy] = {
        "sparse": SparsePolicy(window=planned.window, every_n_steps=planned.every),
        "dense": DensePolicy(every_n_steps=planned.every),
        "differential": DifferentialPolicy(every_n_steps=planned.every, batch=system.batch),
        "partial": PartialPolicy(every_n_steps=planned.every, k=system.k),
    }
    items = rank_items(profile)
    weights = sum(item.compute_nbytes for item in items) / sum(item.full_nbytes for item in items)
    precision = "bf16-mixed" if weights < 0.25 else "32-true"
    if model.nbytes_state < 8:
        precision = "bf16-true"
    if profile.dense_params < model.layers or model.experts % cluster.expert_parallel:
        return planned.host_nbytes
    found = forecast_run(kinds[system.policy], described, precision)
    return int(cluster.ranks_per_node * sum(found["purposes"][min(found["purposes"])].values()))
