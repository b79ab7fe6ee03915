"""Choose the ranks that keep replicas of each rank's segments.

MOETION's Algorithm 2 fills the data-parallel group first and then any rank with room. It does not look at nodes, and
takes the same first peer for a whole group. Here the nodes are chosen first, in groups that keep each other's replicas
(see `_node_groups`), so that a replica always leaves the node and, where racks allow it at equal loads, the rack. Then a
rank on each chosen node is chosen: one of the owner's data-parallel group if it has room, else the rank with least to
keep. Bytes that a rank of another node has anyway, as data parallelism replicates them, count as a replica and are not sent.

Invariant: the holders of an owner are on different nodes, none of them the owner's.
Bound: with nodes of n_min to n_max ranks no rank keeps more than `replicas * ceil(n_max / n_min)` times the largest
rank's bytes. So on nodes of one size the fullest rank keeps the least possible if `replicas` is 1 or ranks are equal,
and at most `replicas` times the least possible in any case, since some rank has to keep the largest rank's replica.
Source: MOETION (arXiv 2412.15411v1), Sec. 5.1, Alg. 2; we differ as described above.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.tiers._domains import NODE_VARIABLE, RACK_VARIABLE, FailureDomain
from lightning_moe_ckpt.tiers._node_groups import Node, partners


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPlacement:
    """Holders of every rank's replicas; equal on all ranks. All fields are indexed by rank."""

    domains: tuple[FailureDomain, ...]
    nbytes: tuple[int, ...]
    """Bytes of one replica of a rank."""
    holders: tuple[tuple[int, ...], ...]
    """Ranks that have a replica besides the owner, each on another node."""
    sent_to: tuple[tuple[int, ...], ...]
    """Holders that must be sent their replica; the others have the bytes anyway."""

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
        return tuple(owner for owner, sent in enumerate(self.sent_to) if holder in sent)

    def held_nbytes(self, holder: int) -> int:
        """Return the bytes of one generation that `holder` receives and keeps for others."""
        return sum(self.nbytes[owner] for owner in self.owners(holder))

    def sent_nbytes(self, owner: int) -> int:
        """Return the bytes that `owner` sends per generation."""
        return self.nbytes[owner] * len(self.sent_to[owner])

    def leaves_rack(self, owner: int) -> bool:
        """Return whether a replica is in another rack than the owner."""
        return any(self.domains[holder].rack != self.domains[owner].rack for holder in self.holders[owner])


def place_replicas(
    domains: Sequence[FailureDomain],
    data_parallel: Sequence[Sequence[int]],
    nbytes: Sequence[int],
    replicas: int,
    *,
    held_anyway: Mapping[int, Collection[int]] | None = None,
) -> ReplicaPlacement:
    """Choose the holders of every rank. Deterministic: equal arguments give equal placements on every rank.

    Args:
        domains: node and rack of every rank.
        data_parallel: the ranks of each group that holds the same experts; every rank is in one.
        nbytes: bytes of one replica of each rank, without what `held_anyway` covers in part.
        replicas: replicas of each rank besides its own copy.
        held_anyway: ranks that have all bytes of an owner without being sent them, by owner.

    Raises:
        ConfigurationError: there are not more than `replicas` nodes, or one node is in two racks.
        ValueError: the arguments do not name each rank once.
    """
    if (
        replicas < 0
        or len(nbytes) != len(domains)
        or sorted(r for g in data_parallel for r in g) != [*range(len(nbytes))]
    ):
        raise ValueError("`place_replicas` needs `replicas` of zero or more, and each rank in every argument once.")
    group_of = {rank: index for index, group in enumerate(data_parallel) for rank in group}
    nodes = _nodes(domains, group_of)
    if replicas >= len(nodes):
        raise _too_few_nodes(replicas, len(nodes), len(domains))
    kept_by = partners(nodes, replicas) if replicas else [()] * len(nodes)
    free: list[tuple[int, ...]] = [()] * len(domains)
    sent: list[list[int]] = [[] for _ in domains]
    load: Counter[int] = Counter()
    for node, to in zip(nodes, kept_by, strict=True):
        must_leave = any(nodes[place].rack != node.rack for place in to)
        for owner in node.ranks:
            free[owner] = _free_holders(domains, owner, (held_anyway or {}).get(owner, ()), replicas, must_leave)
        for place, owners in _by_place(domains, nodes, node, to, free).items():
            for owner, holder in _assign(owners, nodes[place].ranks, group_of, nbytes, load).items():
                sent[owner].append(holder)
                load[holder] += nbytes[owner]
    return ReplicaPlacement(
        domains=tuple(domains),
        nbytes=tuple(nbytes),
        holders=tuple((*own, *others) for own, others in zip(free, sent, strict=True)),
        sent_to=tuple(tuple(others) for others in sent),
    )


def _nodes(domains: Sequence[FailureDomain], group_of: Mapping[int, int]) -> list[Node]:
    """Return the nodes in the order of their lowest ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, domain in enumerate(domains):
        ranks.setdefault(domain.node, []).append(rank)
    for node, on in ranks.items():
        if len(racks := {domains[rank].rack for rank in on}) > 1:
            raise ConfigurationError(
                f"Node {node!r} is said to be in racks {sorted(racks)}, by its ranks {on}. Give them one {RACK_VARIABLE}."
            )
    return [
        Node(rack=domains[on[0]].rack, ranks=tuple(on), kinds=Counter(group_of[rank] for rank in on))
        for on in ranks.values()
    ]


def _free_holders(
    domains: Sequence[FailureDomain], owner: int, having: Collection[int], replicas: int, must_leave: bool
) -> tuple[int, ...]:
    """Return up to `replicas` ranks of different other nodes that have the owner's bytes anyway, other racks first.

    If none is of another rack, but one must be, the last place is left to a replica that is sent there.
    """
    home = domains[owner]
    seen = {home.node}
    free = []
    for rank in sorted(having, key=lambda rank: (domains[rank].rack == home.rack, rank)):
        if domains[rank].node not in seen:
            seen.add(domains[rank].node)
            free.append(rank)
    stays = must_leave and not any(domains[rank].rack != home.rack for rank in free)
    return tuple(free[: replicas - stays])


def _by_place(
    domains: Sequence[FailureDomain],
    nodes: Sequence[Node],
    node: Node,
    to: Sequence[int],
    free: Sequence[Sequence[int]],
) -> dict[int, list[int]]:
    """Return the owners of `node` whose replicas are sent to each node of `to`: all but those held anyway."""
    far_first = sorted(to, key=lambda place: nodes[place].rack == node.rack)
    owners: dict[int, list[int]] = {place: [] for place in to}
    for owner in node.ranks:
        covered = {domains[rank].node for rank in free[owner]}
        open_places = [place for place in far_first if domains[nodes[place].ranks[0]].node not in covered]
        for place in open_places[: len(to) - len(free[owner])]:
            owners[place].append(owner)
    return owners


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


def _too_few_nodes(replicas: int, num_nodes: int, world_size: int) -> ConfigurationError:
    return ConfigurationError(
        f"`replicas={replicas}` needs {replicas + 1} nodes, because a copy on the owner's node would die with it, and the "
        f"{world_size} ranks of this run are on {num_nodes}. Use `replicas={num_nodes - 1}` or start on more nodes; if one "
        f"of these nodes is several machines, give each a name of its own in {NODE_VARIABLE}."
    )
