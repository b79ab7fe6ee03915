"""Choose the ranks that hold replicas of each rank's segments, and compute what losses a choice survives.

A *node* loses its memory at once: it is a machine. Two containers on one machine die together, so they are one node:
the kernel's boot id decides, not the host name. If `MOE_CKPT_SHARED_MEMORY` names a directory, processes that share it
are one node, so the directory is part of the node's name.

MOETION's Algorithm 2 fills the data-parallel group first and then any rank with room. It does not look at nodes, and
takes the same first peer for a whole group. Here the nodes are chosen first, in groups of `replicas + 1` that keep each
other's replicas. So a replica always leaves the node and, where racks allow it at equal loads, the rack. Nodes left
over join the last group, in which each node's replicas go to the next `replicas` nodes in a ring. A checkpoint is lost
only if a whole group is lost, or as many neighbours in the ring: fewer sets of nodes can do harm than with scattered
replicas. Then a rank on each chosen node is chosen: one of the owner's data-parallel group with room, else the rank
with least to keep.

Invariant: an owner's holders are on different nodes, none of them the owner's.
Bound: with nodes of n_min to n_max ranks no rank keeps more than `replicas * ceil(n_max / n_min)` times the largest
rank's bytes. So on nodes of one size the fullest rank keeps the least possible if `replicas` is 1 or ranks are equal,
and at most `replicas` times the least possible in any case, since some rank has to keep the largest rank's replica.
Source: Gemini (SOSP 2023), Sec. 4, mixed placement, with nodes of other racks first in a group; MOETION (arXiv
2412.15411v1), Sec. 5.1, Alg. 2, with the differences described above.

*Survival* is the probability that a placement survives the loss of k nodes or racks at once. An owner's generation is
lost if its own node and all its holders' nodes are lost. With k of n nodes lost, all choices equally likely, the
probability is the share of choices that contain none of these fatal sets. Sets that share no node are counted apart and
the counts multiplied as polynomials, in integers: exact for any cluster whose nodes are in groups. Where that would take
too long, the share is estimated from random choices with a fixed seed, with its standard error.

For groups of m nodes Gemini (Sec. 4, Corollary 1) gives 1 - (n / m) C(n - m, k - m) / C(n, k). That is a lower bound:
it counts a choice once per group in it, and is exact below k = 2m.
"""

from __future__ import annotations

import math
import os
import random
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Literal

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.tiers._shm import DIRECTORY_VARIABLE

NODE_VARIABLE, RACK_VARIABLE = "MOE_CKPT_NODE", "MOE_CKPT_RACK"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class FailureDomain:
    """Node and rack of a rank."""

    node: str
    """Name of the node; ranks with equal names lose their memory together."""
    rack: str = ""
    """Name of the rack, switch or power supply, whose nodes may be lost together; empty if unknown."""
    host: str = field(default="", compare=False)
    """Host name, for messages."""

    def __post_init__(self) -> None:
        if not self.node:
            raise ConfigurationError("`FailureDomain(node='')` must name a node. Use the name of its host.")


def this_domain(environ: Mapping[str, str] = os.environ) -> FailureDomain:
    """Return node and rack of this process.

    The node is `MOE_CKPT_NODE`, or else the boot id. The rack is `MOE_CKPT_RACK`, or the switch that SLURM's
    topology plugin names for this node.
    """
    return FailureDomain(
        node=environ.get(NODE_VARIABLE) or _found_node(environ.get(DIRECTORY_VARIABLE)),
        rack=environ.get(RACK_VARIABLE) or _slurm_switch(environ),
        host=socket.gethostname(),
    )


def _found_node(directory: str | None) -> str:
    return machine_name() if not directory else f"{machine_name()}:{os.path.realpath(directory)}"


def machine_name() -> str:
    """Return the kernel's boot id, equal in all containers of a machine, or else the host name."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _slurm_switch(variables: Mapping[str, str]) -> str:
    """Return `top.leaf` of `SLURM_TOPOLOGY_ADDR=top.leaf.node`; SLURM's pattern, as in `switch.switch.node`, names the
    parts.

    Node names may have dots, so the number of parts is taken from the pattern.
    """
    address, pattern = variables.get("SLURM_TOPOLOGY_ADDR", ""), variables.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    kinds = pattern.split(".")
    if kinds[-1] != "node":
        return ""
    return ".".join(address.split(".", len(kinds) - 1)[: len(kinds) - 1])


def expect_domains(given: Sequence[FailureDomain], world_size: int) -> tuple[FailureDomain, ...]:
    """Return the domains given by a user. Raises `ConfigurationError` unless there is one per rank."""
    if len(given) != world_size:
        raise ConfigurationError(
            f"`failure_domains` names {len(given)} ranks, the run has {world_size}. Name each rank's node, by rank, or "
            f"leave the argument out and set {NODE_VARIABLE} and {RACK_VARIABLE} in the environment of each process."
        )
    return tuple(given)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPlacement:
    """Holders of every rank's replicas; equal on all ranks. All fields are indexed by rank."""

    domains: tuple[FailureDomain, ...]
    nbytes: tuple[int, ...]
    """Bytes of a replica, by rank."""
    holders: tuple[tuple[int, ...], ...]
    """Ranks that are sent a replica, on different nodes, none of them the owner's."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len({domain.node for domain in self.domains})

    @property
    def num_racks(self) -> int:
        """Number of racks; 1 if none is known."""
        return len({domain.rack for domain in self.domains})

    def owners(self, holder: int) -> tuple[int, ...]:
        """Return the ranks that send `holder` a replica, ascending."""
        return tuple(owner for owner, sent in enumerate(self.holders) if holder in sent)

    def held_nbytes(self, holder: int) -> int:
        """Return the bytes per generation that `holder` receives and keeps for others."""
        return sum(self.nbytes[owner] for owner in self.owners(holder))

    def leaves_rack(self, owner: int) -> bool:
        """Return whether any replica of `owner` is in another rack."""
        return any(self.domains[holder].rack != self.domains[owner].rack for holder in self.holders[owner])


def place_replicas(
    domains: Sequence[FailureDomain], data_parallel: Sequence[Sequence[int]], nbytes: Sequence[int], replicas: int
) -> ReplicaPlacement:
    """Choose every rank's holders. Deterministic: equal arguments give equal placements on every rank.

    `data_parallel` has the ranks of each group with the same experts; every rank is in a group. `nbytes` are those of a
    replica of each rank, and `replicas` come besides its own copy. Raises `ConfigurationError` if there are not more
    than `replicas` nodes, or one node is in two racks, `ValueError` if the arguments do not name each rank once.
    """
    each_once = sorted(rank for group in data_parallel for rank in group) == [*range(len(nbytes))]
    if replicas < 0 or len(nbytes) != len(domains) or not each_once:
        raise ValueError("`place_replicas` needs `replicas` of zero or more, and each rank in every argument once.")
    group_of = {rank: index for index, group in enumerate(data_parallel) for rank in group}
    nodes = _nodes(domains, group_of)
    if replicas >= len(nodes):
        raise ConfigurationError(
            f"`replicas={replicas}` needs {replicas + 1} nodes, because a copy on the owner's node would die with it, and "
            f"the {len(domains)} ranks of this run are on {len(nodes)}. Use `replicas={len(nodes) - 1}` or start on more "
            f"nodes; if one of these nodes is several machines, give each a name of its own in {NODE_VARIABLE}."
        )
    partners = _partners(nodes, replicas) if replicas else [()] * len(nodes)
    holders: list[list[int]] = [[] for _ in domains]
    load: Counter[int] = Counter()
    for node, places in zip(nodes, partners, strict=True):
        for place in places:
            for owner, holder in _assign(node.ranks, nodes[place].ranks, group_of, nbytes, load).items():
                holders[owner].append(holder)
                load[holder] += nbytes[owner]
    return ReplicaPlacement(domains=tuple(domains), nbytes=tuple(nbytes), holders=tuple(map(tuple, holders)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Node:
    rack: str
    ranks: tuple[int, ...]
    """Ranks on this node, ascending."""
    kinds: Counter[int]
    """Ranks on this node in each data-parallel group, as counts."""


def _nodes(domains: Sequence[FailureDomain], group_of: Mapping[int, int]) -> list[_Node]:
    """Return the nodes in the order of their lowest ranks. Raises `ConfigurationError` if one node is in two racks."""
    ranks: dict[str, list[int]] = {}
    for rank, domain in enumerate(domains):
        ranks.setdefault(domain.node, []).append(rank)
    for node, on in ranks.items():
        if len(racks := {domains[rank].rack for rank in on}) > 1:
            raise ConfigurationError(
                f"Node {node!r} is said to be in racks {sorted(racks)}, by its ranks {on}. Give them one {RACK_VARIABLE}."
            )
    return [
        _Node(rack=domains[on[0]].rack, ranks=tuple(on), kinds=Counter(group_of[rank] for rank in on))
        for on in ranks.values()
    ]


def _assign(
    owners: Sequence[int],
    candidates: Sequence[int],
    group_of: Mapping[int, int],
    nbytes: Sequence[int],
    load: Mapping[int, int],
) -> dict[int, int]:
    """Return a holder for each owner: equally many per candidate, and of its data-parallel group if possible."""
    room = dict.fromkeys(candidates, -(-len(owners) // len(candidates)))
    added: Counter[int] = Counter()
    holder: dict[int, int] = {}
    for within_group in (True, False):
        for owner in sorted(owners, key=lambda owner: (-nbytes[owner], owner)):
            able = [c for c in candidates if room[c] and (not within_group or group_of[c] == group_of[owner])]
            if owner in holder or not able:
                continue
            best = min(able, key=lambda c: (load[c] + added[c], c))
            holder[owner] = best
            room[best] -= 1
            added[best] += nbytes[owner]
    return holder


# -- groups of nodes


def _partners(nodes: Sequence[_Node], replicas: int) -> list[tuple[int, ...]]:
    """Return the nodes that keep each node's replicas, by their indices, nearest in the ring first.

    Guarantees, for `replicas + 1` dividing the number of nodes: every node keeps the copies of exactly `replicas`
    others. If in addition no rack has more nodes than there are groups, the nodes of a group are in different racks.
    With fewer racks, nodes are spread over them as evenly as can be.
    """
    found: list[tuple[int, ...]] = [()] * len(nodes)
    for ring in _groups(nodes, replicas + 1):
        for place, member in enumerate(ring):
            found[member] = tuple(ring[(place + step) % len(ring)] for step in range(1, replicas + 1))
    return found


def _groups(nodes: Sequence[_Node], size: int) -> list[list[int]]:
    num_groups, left = len(nodes) // size, dict[object, list[int]]()
    for i, node in reversed([*enumerate(nodes)]):
        left.setdefault((node.rack, len(node.ranks), frozenset(node.kinds.items())), []).append(i)
    per_rack = Counter(node.rack for node in nodes)
    # Smallest limit on nodes of one rack per group that all groups can meet.
    share = {rack: -(-count // num_groups) for rack, count in per_rack.items()}
    groups = [_take_group(nodes, [*left.values()], size, share, after) for after in range(num_groups - 1, 0, -1)]
    return [*groups, _alternate(nodes, sorted(i for alike in left.values() for i in alike))]


def _take_group(
    nodes: Sequence[_Node], left: Sequence[list[int]], size: int, share: Mapping[str, int], groups_after: int
) -> list[int]:
    """Return the next group of `size` nodes, and remove them from `left`, which has a list per kind of node, lowest last."""
    per_rack = Counter[str]()
    for alike in filter(None, left):
        per_rack[nodes[alike[0]].rack] += len(alike)
    due = {rack: count - groups_after * share[rack] for rack, count in per_rack.items()}
    group: list[int] = []
    taken: Counter[str] = Counter()
    while len(group) < size:
        members = [nodes[i] for i in group]

        def cost(i: int, members: Sequence[_Node] = members) -> tuple[bool, int, int, int, int]:
            node = nodes[i]
            # First take nodes that later groups could not take; sizes count after racks, then the ranks that can have a
            # holder on a member in their own data-parallel group.
            return (
                taken[node.rack] >= due[node.rack],
                taken[node.rack],
                sum(abs(len(node.ranks) - len(member.ranks)) for member in members) if members else -len(node.ranks),
                -sum((node.kinds & member.kinds).total() for member in members),
                i,
            )

        best = min(filter(None, left), key=lambda alike: cost(alike[-1])).pop()
        group.append(best)
        taken[nodes[best].rack] += 1
    return group


def _alternate(nodes: Sequence[_Node], members: Sequence[int]) -> list[int]:
    """Return `members` ordered so that neighbours are in different racks as far as possible."""
    seen: Counter[str] = Counter()
    order = []
    for i in members:
        order.append((seen[nodes[i].rack], i))
        seen[nodes[i].rack] += 1
    return [i for _, i in sorted(order)]


# -- survival

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
    """Compute the probability that a placement survives the loss of `lost` nodes or racks at once. All nodes of unknown
    rack count as one rack. Raises `ValueError` if there are fewer.
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
