"""Run the subcommand `placement`: compute the holders of replicas on a cluster, and the losses that they survive."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.inspection._report import Answer, plain_table
from lightning_moe_ckpt.tiers import (
    FailureDomain,
    ReplicaPlacement,
    Survival,
    percent,
    place_replicas,
    survival_probability,
)


def answer(*, nodes: int, ranks_per_node: int, replicas: int, racks: int, expert_parallel: int, most: int) -> Answer:
    """Place replicas as a run on such a cluster does, and return which of up to `most` losses at once they survive.

    Raises:
        ConfigurationError: no such placement is possible.
    """
    world_size = nodes * ranks_per_node
    if world_size % expert_parallel:
        raise ConfigurationError(
            f"`--expert-parallel {expert_parallel}` does not divide the {world_size} ranks. Choose a divisor."
        )
    if racks > nodes:
        raise ConfigurationError(f"`--racks {racks}` is more than `--nodes {nodes}`. Choose at most that.")
    node_of = [rank // ranks_per_node for rank in range(world_size)]
    domains = [FailureDomain(node=f"node {n}", rack=f"rack {n * racks // nodes}") for n in node_of]
    groups = [range(first, world_size, expert_parallel) for first in range(expert_parallel)]
    placed = place_replicas(domains, groups, [1] * world_size, replicas)
    survivals, facts = _survivals(placed, most), _facts(placed, groups)
    document = {
        "replicas": replicas,
        **facts,
        "survival": [dataclasses.asdict(survival) for survival in survivals],
        "holders": placed.holders,
    }
    copies = "1 copy" if replicas == 1 else f"{replicas} copies"
    heading = f"{copies} of each rank's state, on {nodes} nodes of {ranks_per_node} ranks"
    closing = (
        f"{facts['within_data_parallel']:.0%} of all copies stay within their data-parallel group, "
        f"{facts['leaves_rack']:.0%} of all ranks have one in another rack.\n"
        f"The fullest rank keeps {facts['most_held']} copies, the emptiest {facts['least_held']}."
    )
    return Answer(document, lambda: [heading, _table(survivals), closing])


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
    table = plain_table()
    for column in ("lost at once", "of", "everything survives"):
        table.add_column(column, justify="right")
    for survival in survivals:
        about = f" +- {survival.error:.2%}" if survival.error else ""
        table.add_row(
            f"{survival.lost} {survival.level}{'s' * (survival.lost > 1)}",
            str(survival.of),
            percent(survival.probability) + about,
        )
    return table
