"""Simulate a run from failure to failure.

Between two failures all steps are alike, so the steps of a stretch are counted and not walked through: a simulation's time
depends on the number of failures alone, not on ranks or steps.

Time goes to the parts of `Goodput`. Steps thrown away by a failure are `productive` when first taken, and `lost` when taken
again; an interrupted step is lost as a whole.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.goodput import PARTS, Goodput
from lightning_moe_ckpt.simulation._behaviour import SimulatedTier, mean_cycle, recovery, refuse_hopeless
from lightning_moe_ckpt.simulation._profile import SCOPES, Failures, Profile, Scope
from lightning_moe_ckpt.simulation._systems import System
from lightning_moe_ckpt.tiers import FailureDomain, place_replicas, survival_probability

_MOST_FAILURES = 100_000
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A simulated run."""

    goodput: Goodput
    """Seconds by part."""
    steps: float
    """Steps in the last state."""
    failures: int
    """Failures in the run's time."""
    nbytes: Mapping[str, float]
    """Bytes to each place, all ranks together."""
    host_memory: float
    """Bytes of generations on a node, at most."""
    lost_tokens: float
    """Tokens whose updates are lost for good; in steps if the profile does not say the tokens of a step."""
    lost_portion: float
    """Lost tokens as a part of all, PLT."""
    finish_seconds: float | None
    """Seconds of the whole training at this rate; `None` if its steps are not known, or none stayed."""
    notes: Mapping[str, float] = field(default_factory=dict)
    """Settings at the end, as chosen by the system."""


def simulate(
    profile: Profile, system: System, failures: Failures, *, until_steps: int | None = None,
    until_seconds: float | None = None, seed: int = 0, first_start: float = 0.0,
) -> Simulated:  # fmt: skip
    """Simulate a run until a number of steps or seconds of wall time, whichever comes first; by default `training.steps` of the profile.

    The `seed` decides when failures come without a trace, and which nodes are lost together. The first step begins after `first_start` seconds.
    Raises `ConfigurationError` if failures are less than a step apart, or the run would never end.
    """
    if until_steps is None and until_seconds is None:
        until_steps = profile.training.steps
    if until_steps is None and until_seconds is None:
        raise ConfigurationError(
            "`simulate(until_steps=None, until_seconds=None)` needs one of them, or `training.steps` in the profile."
        )
    goal, end = (math.inf if each is None else each for each in (until_steps, until_seconds))
    if not min(goal, end) > 0 or goal == end == math.inf:
        raise ConfigurationError(
            f"`simulate(until_steps={until_steps}, until_seconds={until_seconds})` must be above 0, and finite."
        )
    if failures.trace is None:
        refuse_hopeless(profile, failures.mtbf)
    run = _Run(profile, system, failures.mean_seconds(end), goal=goal, end=end, seed=seed)
    return run.through(failures, seed, first_start)


def expected(profile: Profile, system: System, mtbf: float, scope: Scope = "node") -> Goodput:
    """Return the mean seconds between two failures by part, or of a step where `mtbf` is infinite, in closed form.

    Partial generations have the least K within the system's budget at this rate.
    """
    refuse_hopeless(profile, mtbf)
    found, step = system.behaviour(profile, mtbf), profile.step_seconds
    while found.taken < 1 and mtbf < math.inf:
        grown = system.grown(profile, found, found.unsaved * (step + found.extra) / mtbf, 0.0)
        if grown.taken <= found.taken:
            break
        found = grown
    return mean_cycle(profile, found, mtbf, scope)


@cache
def still_there(nodes: int, replicas: int, lost: int) -> float:
    """Return the probability that memory still has all state after the last loss, given all state before."""
    domains = [FailureDomain(node=f"{i}", rack="") for i in range(nodes)]
    placement = place_replicas(domains, [range(nodes)], [1] * nodes, replicas)
    before, after = (survival_probability(placement, each).probability for each in (lost - 1, lost))
    return after / before if before else 0.0


class _Run:
    """State of a run between two failures."""

    def __init__(self, profile: Profile, system: System, mtbf: float, *, goal: float, end: float, seed: int) -> None:
        self.profile, self.system, self.goal, self.end = profile, system, goal, end
        self.now, self.done, self.reached = 0.0, 0.0, 0.0
        """Seconds; steps in the ranks' state; steps taken at least once."""
        self.planned = min(goal, end / profile.step_seconds, profile.training.steps or math.inf)
        """Steps of the training, to divide lost tokens by."""
        self.behaviour = system.behaviour(profile, mtbf)
        self.has = dict.fromkeys((place.name for place in self.behaviour.places), 0)
        """Last step in the newest generation, by place."""
        self.parts, self.nbytes = dict.fromkeys(PARTS, 0.0), dict.fromkeys(self.has, 0.0)
        self.memory, self.failures, self.lost = self.behaviour.host_memory, 0, 0.0
        self._spares, self._returning, self._missing = profile.cluster.spares, list[float](), 0
        self._together = 0
        """Nodes lost since copies were last complete."""
        self._draw = random.Random(f"nodes {seed}")

    def through(self, failures: Failures, seed: int, first_start: float) -> Simulated:
        coming = failures.times(seed)
        after, scope = next(coming, (math.inf, "node"))
        self._pass("startup", first_start, math.inf)
        while True:
            self._train(min(after, self.end))
            if self.done >= self.goal or self.now >= self.end - _ROUNDING or after >= self.end:
                return self._ended()
            after, scope = self._recovered(scope, coming)

    def _pass(self, part: str, seconds: float, until: float) -> bool:
        """Spend the seconds, or the time left until then; return whether all were spent."""
        spent = max(0.0, min(seconds, until - self.now))
        self.parts[part] += spent
        self.now += spent
        return spent >= seconds

    def _train(self, until: float) -> None:
        """Take steps until then or the goal: first lost steps again, then new steps."""
        b, step = self.behaviour, self.profile.step_seconds
        for part, each, most in (("lost", b.again, self.reached - self.done), ("productive", step, math.inf)):
            if (steps := min((until - self.now) / (each + b.extra), most, self.goal - self.done)) <= 0:
                continue
            self.parts[part] += steps * each
            self.parts["hooks"] += steps * b.hooks
            self.parts["slowed"] += steps * b.slowed
            for place in b.places:
                self.nbytes[place.name] += steps * place.nbytes
            self.now += steps * (each + b.extra)
            self.done += steps
        self.reached = max(self.reached, self.done)

    def _recovered(self, scope: Scope, coming: Iterator[tuple[float, Scope]]) -> tuple[float, Scope]:
        """Recover from a failure, and from failures during recovery; return the next failure."""
        self._interrupt_step()
        self._lose_tokens()
        while True:
            place = self._fail(scope)
            after, next_scope = next(coming, (math.inf, scope))
            for part, seconds in recovery(self.profile, self.behaviour, place, self._wait(scope)):
                if not self._pass(part, seconds, min(after, self.end)):
                    break
                if part == "idle":
                    self._count_returned()
                    self._spares, self._missing = self._spares - self._missing, 0
                elif part == "restore":  # with which copies are complete again
                    self._together = 0
            else:
                return after, next_scope
            if self.now >= self.end - _ROUNDING:
                return math.inf, scope
            scope = next_scope

    def _interrupt_step(self) -> None:
        """Note every place's newest generation, and count the step under way as lost."""
        for place in self.behaviour.places:
            lag = place.lag / (self.profile.step_seconds + self.behaviour.extra)
            newest = math.floor((self.done - lag) / place.every + _ROUNDING) * place.every
            self.has[place.name] = max(self.has[place.name], newest)
        if self.done == self.reached:
            self.reached = math.floor(self.done + _ROUNDING)
            self._throw_away(max(0.0, self.done - self.reached))

    def _throw_away(self, steps: float) -> None:
        self.parts["productive"] -= steps * self.profile.step_seconds
        self.parts["lost"] += steps * self.profile.step_seconds

    def _lose_tokens(self) -> None:
        """Count the steps lost for good by a failure, and let the system take more experts from now on."""
        if not self.behaviour.unsaved or self.done < 1:
            return
        lost = min(self.behaviour.unsaved, self.done)
        self.lost += lost
        share = 1 / max(self.planned, self.done)
        self.behaviour = self.system.grown(self.profile, self.behaviour, self.lost * share, lost * share)
        self.memory = max(self.memory, self.behaviour.host_memory)

    def _fail(self, scope: Scope) -> SimulatedTier | None:
        """Apply a failure's loss, and go back to the newest generation left; return its place."""
        self.failures += 1
        if self.failures > _MOST_FAILURES:
            raise ConfigurationError(
                f"after {_MOST_FAILURES:,} failures the run is at step {self.done:.0f}: it never ends. Give a time to end at, fewer failures, or "
                "another system."
            )
        if scope == "node":
            self._missing, self._together = self._missing + 1, self._together + 1
            self._returning.append(self.now + self.profile.costs.repair)
        nodes = self.profile.cluster.nodes
        for place in self.behaviour.places:
            gone = SCOPES.index(place.survives) < SCOPES.index(scope)
            if scope == "node" and 0 < place.copies < self._together:
                gone |= self._draw.random() > still_there(nodes, place.copies, min(self._together, nodes))
            if gone:
                self.has[place.name] = 0
        newest = max(self.has.values(), default=0)
        self.done = float(newest)
        return next((place for place in self.behaviour.places if newest and self.has[place.name] == newest), None)

    def _wait(self, scope: Scope) -> float:
        """Return the seconds until every missing machine is replaced: by spares at once, by lost machines after their repair."""
        self._count_returned()
        late = self._missing - self._spares
        nodes = sorted(self._returning)[late - 1] - self.now if late > 0 else 0.0
        return max(nodes, self.profile.costs.repair if scope == "cluster" else 0.0)

    def _count_returned(self) -> None:
        back = [each for each in self._returning if each <= self.now + _ROUNDING]
        self._spares += len(back)
        self._returning = [each for each in self._returning if each > self.now + _ROUNDING]

    def _ended(self) -> Simulated:
        self._throw_away(self.reached - self.done)
        wanted, tokens = self.profile.training.steps, self.profile.training.tokens or 1
        finish = self.now if self.done >= self.goal else wanted * self.now / self.done if wanted and self.done else None
        parts = {name: max(0.0, each) for name, each in self.parts.items()}
        portion = self.lost / (self.done or math.inf)
        return Simulated(
            goodput=Goodput(**parts), steps=self.done, failures=self.failures, nbytes=self.nbytes,
            host_memory=self.memory, lost_tokens=self.lost * tokens, lost_portion=portion, finish_seconds=finish,
            notes=self.behaviour.notes,
        )  # fmt: skip
