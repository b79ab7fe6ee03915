"""Compute the probability that a placement survives the loss of k nodes or racks at once.

An owner's generation is lost if its own node and all its holders' nodes are lost. With k of n nodes lost, all choices
equally likely, the probability is the share of choices that contain none of these fatal sets. Sets that share no node
are counted apart and the counts multiplied as polynomials, in integers: exact for any cluster whose nodes are in
groups. Where that would take too long, the share is estimated from random choices with a fixed seed, with its standard
error.

For groups of m nodes Gemini (SOSP 2023, Sec. 4, Corollary 1) gives 1 - (n / m) C(n - m, k - m) / C(n, k). That is a
lower bound: it counts a choice once per group in it, and is exact below k = 2m.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from lightning_moe_ckpt.tiers._placement import FailureDomain, ReplicaPlacement

Level = Literal["node", "rack"]
_EXACT_CHOICES = 300_000
"""Most choices to enumerate, in about a second."""
_SAMPLES = 40_000
"""Random choices of an estimate; its standard error is at most 0.0025."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survival:
    """Outcome of a simultaneous loss."""

    level: Level
    lost: int
    """Nodes or racks lost at once, all choices equally likely."""
    of: int
    """All nodes or racks."""
    probability: float
    """Probability that memory still has every owner's generation."""
    error: float
    """Standard error of an estimate; 0 if exact."""


def survival_probability(placement: ReplicaPlacement, lost: int, *, level: Level = "node") -> Survival:
    """Compute the probability that a placement survives one simultaneous loss.

    Args:
        placement: holders of every rank's replicas.
        lost: nodes or racks lost at once.
        level: whether nodes or racks are lost. All nodes of unknown rack count as one rack.

    Raises:
        ValueError: there are fewer than `lost` nodes or racks.
    """
    names = sorted({_name(domain, level) for domain in placement.domains})
    if not 0 <= lost <= len(names):
        raise ValueError(f"`survival_probability(lost={lost})`: there are {len(names)} {level}s to lose.")
    number = {name: index for index, name in enumerate(names)}
    fatal = {
        frozenset(number[_name(placement.domains[rank], level)] for rank in (owner, *holders))
        for owner, holders in enumerate(placement.holders)
    }
    groups = _connected(fatal)
    if sum(math.comb(len(nodes), j) for nodes, _ in groups for j in range(min(lost, len(nodes)) + 1)) <= _EXACT_CHOICES:
        probability, error = _exact(groups, len(names), lost), 0.0
    else:
        probability, error = _estimate(fatal, len(names), lost)
    return Survival(level=level, lost=lost, of=len(names), probability=probability, error=error)


def survival_summary(placement: ReplicaPlacement, most: int = 4) -> str:
    """Return a log line on losses of up to `most` nodes, and of one rack if racks are known.

    The figures hold once every operator has been copied since the start, and since a lost node came back.
    """
    parts = [_words(survival_probability(placement, k)) for k in range(1, min(most, placement.num_nodes - 1) + 1)]
    if placement.num_racks > 1:
        parts.append(_words(survival_probability(placement, 1, level="rack")))
    return "once all was copied, memory holds every rank's state after the loss of " + ", ".join(parts)


def _words(survival: Survival) -> str:
    things = f"{survival.lost} {survival.level}{'s' if survival.lost > 1 else ''}"
    about = f" (+-{survival.error:.2%})" if survival.error else ""
    return f"{things}: {percent(survival.probability)}{about}"


def percent(probability: float) -> str:
    """Format a probability with two decimals; only certain outcomes read as 0 or 100 %."""
    if probability in (0, 1):
        return f"{probability:.0%}"
    return {"100.00%": "> 99.99%", "0.00%": "< 0.01%"}.get(text := f"{probability:.2%}", text)


def _name(domain: FailureDomain, level: Level) -> str:
    return domain.node if level == "node" else domain.rack


def _connected(fatal: Iterable[frozenset[int]]) -> list[tuple[list[int], list[frozenset[int]]]]:
    """Split fatal sets into parts that share no node; return the nodes and sets of each part."""
    parts: list[tuple[set[int], list[frozenset[int]]]] = []
    for each in fatal:
        touching = [part for part in parts if part[0] & each]
        parts = [part for part in parts if not part[0] & each]
        nodes = set(each).union(*(nodes for nodes, _ in touching))
        parts.append((nodes, [each, *(one for _, sets in touching for one in sets)]))
    return [(sorted(nodes), sets) for nodes, sets in parts]


def _exact(groups: Sequence[tuple[list[int], list[frozenset[int]]]], num_names: int, lost: int) -> float:
    """Return the share of choices without a fatal set: the coefficient of x^lost in a product of polynomials."""
    free = num_names - sum(len(nodes) for nodes, _ in groups)
    product = [math.comb(free, j) for j in range(lost + 1)]
    for nodes, sets in groups:
        survived = [_survivors(nodes, sets, j) for j in range(min(lost, len(nodes)) + 1)]
        product = [sum(product[j - i] * count for i, count in enumerate(survived) if i <= j) for j in range(lost + 1)]
    return product[lost] / math.comb(num_names, lost)


def _survivors(nodes: Sequence[int], sets: Sequence[frozenset[int]], lost: int) -> int:
    """Return the number of choices of `lost` among `nodes` that contain none of `sets`."""
    if lost < min(map(len, sets)):
        return math.comb(len(nodes), lost)
    return sum(not any(each <= choice for each in sets) for choice in map(frozenset, combinations(nodes, lost)))


def _estimate(fatal: Iterable[frozenset[int]], num_names: int, lost: int) -> tuple[float, float]:
    """Return the share of random choices that contain none of `fatal`, and its standard error."""
    first: dict[int, list[frozenset[int]]] = {}
    for each in fatal:
        first.setdefault(min(each), []).append(each)
    rng = random.Random(0)
    survived = 0
    for _ in range(_SAMPLES):
        choice = frozenset(rng.sample(range(num_names), lost))
        survived += not any(each <= choice for node in choice for each in first.get(node, ()))
    # The estimate is not 1 if no sample was lost: losses are rare then, not impossible (Agresti-Coull).
    share = (survived + 2) / (_SAMPLES + 4)
    return survived / _SAMPLES, math.sqrt(share * (1 - share) / _SAMPLES)
