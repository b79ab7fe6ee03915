"""Choose groups of nodes that keep each other's replicas.

Nodes are divided into groups of `replicas + 1`. Nodes left over join the last group, in which each node's replicas
go to the `replicas` nodes after it in a ring. A checkpoint is lost only if a whole group is lost (or as many neighbours
in the ring). Fewer sets of nodes can do harm than if replicas were scattered, which makes survival more likely.
Source: Gemini (SOSP 2023), Sec. 4, mixed placement. We differ in the choice of a group: nodes of other racks come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One node, with the facts that decide its group."""

    rack: str
    ranks: tuple[int, ...]
    """Its ranks, ascending."""
    kinds: Mapping[Hashable, int]
    """Number of its ranks in each data-parallel group."""


def partners(nodes: Sequence[Node], replicas: int) -> list[tuple[int, ...]]:
    """Return the nodes that keep the replicas of each node.

    Guarantees, for `replicas + 1` dividing the number of nodes: every node keeps the copies of exactly `replicas`
    others. If in addition no rack has more nodes than there are groups, the nodes of a group are in different racks.
    With fewer racks than that, nodes are spread over them as evenly as can be.

    Args:
        nodes: in an order that is the same on every rank.
        replicas: at least 1, less than the number of nodes.

    Returns:
        By node, `replicas` different indices of other nodes, nearest in the ring first.
    """
    found: list[tuple[int, ...]] = [()] * len(nodes)
    for ring in _groups(nodes, replicas + 1):
        for place, member in enumerate(ring):
            found[member] = tuple(ring[(place + step) % len(ring)] for step in range(1, replicas + 1))
    return found


def _groups(nodes: Sequence[Node], size: int) -> list[list[int]]:
    left, num_groups = list(range(len(nodes))), len(nodes) // size
    per_rack = Counter(node.rack for node in nodes)
    # Smallest limit on nodes of one rack per group that all groups can meet.
    share = {rack: -(-count // num_groups) for rack, count in per_rack.items()}
    groups = [_take_group(nodes, left, size, share, after) for after in range(num_groups - 1, 0, -1)]
    return [*groups, _alternate(nodes, left)]


def _take_group(
    nodes: Sequence[Node], left: list[int], size: int, share: Mapping[str, int], groups_after: int
) -> list[int]:
    """Remove the next group from `left`."""
    per_rack = Counter(nodes[i].rack for i in left)
    due = {rack: count - groups_after * share[rack] for rack, count in per_rack.items()}
    group: list[int] = []
    taken: Counter[str] = Counter()
    while len(group) < size:
        members = [nodes[i] for i in group]

        def cost(i: int, members: Sequence[Node] = members) -> tuple[bool, int, int, int, int]:
            node = nodes[i]
            # First take nodes that later groups could not take; sizes and common ranks count after racks.
            return (
                taken[node.rack] >= due[node.rack],
                taken[node.rack],
                sum(abs(len(node.ranks) - len(each.ranks)) for each in members) if members else -len(node.ranks),
                -sum(_in_common(node, each) for each in members),
                i,
            )

        best = min(left, key=cost)
        left.remove(best)
        group.append(best)
        taken[nodes[best].rack] += 1
    return group


def _in_common(a: Node, b: Node) -> int:
    """Return the number of ranks of `a` that can have a holder of their own data-parallel group on `b`."""
    return sum(min(count, b.kinds.get(kind, 0)) for kind, count in a.kinds.items())


def _alternate(nodes: Sequence[Node], members: Sequence[int]) -> list[int]:
    """Return `members` in an order in which neighbours are of different racks as far as possible."""
    seen: Counter[str] = Counter()
    order = []
    for i in members:
        order.append((seen[nodes[i].rack], i))
        seen[nodes[i].rack] += 1
    return [i for _, i in sorted(order)]
