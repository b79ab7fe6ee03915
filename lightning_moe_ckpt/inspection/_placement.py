"""Run the subcommand `placement`: compute the holders of replicas on a cluster, and the losses that they survive."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.inspection._report import Answer
from lightning_moe_ckpt.tiers import (
    FailureDomain,
    ReplicaPlacement,
    Survival,
    percent,
    place_replicas,
    survival_probability,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Shape of a cluster, and the number of simultaneous losses to consider."""

    nodes: int
    ranks_per_node: int
    replicas: int
    racks: int
    expert_parallel: int
    most: int


def answer(cluster: Cluster) -> Answer:
    """Place replicas as a run on such a cluster does, and return the losses that they survive.

    Raises:
        ConfigurationError: no such placement is possible.
    """
    placed, groups = _place(cluster)
    survivals, facts = _survivals(placed, cluster.most), _facts(placed, groups)
    document = {
        "replicas": cluster.replicas,
        **facts,
        "survival": [dataclasses.asdict(each) for each in survivals],
        "holders": placed.holders,
    }
    copies = "1 copy" if cluster.replicas == 1 else f"{cluster.replicas} copies"
    heading = f"{copies} of each rank's state, on {cluster.nodes} nodes of {cluster.ranks_per_node} ranks"
    closing = (
        f"{facts['within_data_parallel']:.0%} of all copies stay within their data-parallel group, "
        f"{facts['leaves_rack']:.0%} of all ranks have one in another rack.\n"
        f"The fullest rank keeps {facts['most_held']} copies, the emptiest {facts['least_held']}."
    )
    return Answer(document, lambda: [heading, _table(survivals), closing])


def _place(cluster: Cluster) -> tuple[ReplicaPlacement, list[range]]:
    world_size = cluster.nodes * cluster.ranks_per_node
    if world_size % cluster.expert_parallel:
        raise ConfigurationError(
            f"`--expert-parallel {cluster.expert_parallel}` does not divide the {world_size} ranks. Choose a divisor."
        )
    if cluster.racks > cluster.nodes:
        raise ConfigurationError(
            f"`--racks {cluster.racks}` is more than `--nodes {cluster.nodes}`. Choose at most that."
        )
    nodes = [rank // cluster.ranks_per_node for rank in range(world_size)]
    domains = [FailureDomain(node=f"node {n}", rack=f"rack {n * cluster.racks // cluster.nodes}") for n in nodes]
    groups = [range(first, world_size, cluster.expert_parallel) for first in range(cluster.expert_parallel)]
    return place_replicas(domains, groups, [1] * world_size, cluster.replicas), groups


def _survivals(placement: ReplicaPlacement, most: int) -> list[Survival]:
    found = [survival_probability(placement, k) for k in range(1, min(most, placement.num_nodes) + 1)]
    if placement.num_racks > 1:
        racks = range(1, min(most, placement.num_racks) + 1)
        found += [survival_probability(placement, k, level="rack") for k in racks]
    return found


def _facts(placement: ReplicaPlacement, groups: Sequence[Sequence[int]]) -> dict[str, Any]:
    group_of = {rank: index for index, group in enumerate(groups) for rank in group}
    pairs = [(owner, holder) for owner, holders in enumerate(placement.holders) for holder in holders]
    ranks = range(len(placement.domains))
    held = Counter(holder for _, holder in pairs)
    return {
        "within_data_parallel": sum(group_of[owner] == group_of[holder] for owner, holder in pairs) / len(pairs),
        "leaves_rack": sum(map(placement.leaves_rack, ranks)) / len(ranks),
        "most_held": max(held[rank] for rank in ranks),
        "least_held": min(held[rank] for rank in ranks),
    }


def _table(survivals: Sequence[Survival]) -> Table:
    table = Table(show_edge=False)
    for column in ("lost at once", "of", "everything survives"):
        table.add_column(column, justify="right")
    for each in survivals:
        about = f" +- {each.error:.2%}" if each.error else ""
        table.add_row(
            f"{each.lost} {each.level}{'s' * (each.lost > 1)}", str(each.of), percent(each.probability) + about
        )
    return table
