"""The expected course of a run under a Poisson process of failures, in closed form.

A cycle is a recovery, begun anew by each failure within, and the training until the next failure. In training of random length X a
run completes generations of E steps: one for each k with k E steps and the place's lag within X, so E sum(exp(-(k E c + lag) / MTBF)) steps of c seconds
stay. All steps beyond are taken again in the next cycle.

Differs from MoEvement (2026), Sec. 2.4, in counting failures during recovery, steps in flight, and the time before restoring.
"""

from __future__ import annotations

import math

from lightning_moe_ckpt._units import time_text
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.goodput import PARTS, Goodput
from lightning_moe_ckpt.simulation._behaviour import Behaviour, SimulatedTier, recovery
from lightning_moe_ckpt.simulation._failures import SCOPES, Scope
from lightning_moe_ckpt.simulation._profile import Profile

_HOPELESS = 100.0
"""Shortest hopeless recovery, in mean times between failures."""


def mean_cycle(profile: Profile, behaviour: Behaviour, mtbf: float, scope: Scope = "node") -> Goodput:
    """Return the mean seconds of a cycle by part; of a step without failures. The run's first start is left out."""
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
