"""The subcommand `placement`: who would keep whose copies on a cluster, and which losses that survives."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.inspection._screen import Screen
from lightning_moe_ckpt.tiers import (
    FailureDomain,
    Placement,
    Survival,
    percent,
    place_replicas,
    survival_probability,
)

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  # argparse has no public name for it

_DESCRIPTION = """\
Show who keeps copies of whose state on a cluster of NODES, and the probability that memory still holds every rank's
newest generation after nodes, or racks, are lost at once.

A run on such a cluster places its copies the same way. Ranks are numbered node by node, nodes rack by rack.
Exit status: 0 shown, 2 there can be no such placement."""


def add_placement(commands: Commands) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "placement",
        help="show who keeps whose copies on a cluster, and which losses that survives",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def count(flag: str, default: int | None, text: str) -> None:
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(
            flag, type=_count, default=default, required=default is None, metavar="N", help=text + shown
        )

    count("--nodes", None, "machines of the run")
    count("--ranks-per-node", 8, "processes on each")
    count("--replicas", 1, "copies on other nodes, besides one's own")
    count("--racks", 1, "racks that the nodes are in, equally many in each as far as that goes")
    count("--expert-parallel", 1, "ranks that share one set of experts, as given to MoEStrategy")
    count("--most", 4, "losses at once to look at")
    parser.add_argument("--json", action="store_true", help="write one JSON document, which also names every holder")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        placement, groups = _place(args)
    except ConfigurationError as error:
        sys.stderr.write(f"moe-ckpt placement: {error}\n")
        if args.json:
            _write({"error": {"type": type(error).__name__, "message": str(error)}})
        return 2
    survivals = _survivals(placement, args.most)
    facts = _facts(placement, groups)
    if args.json:
        survival = [dataclasses.asdict(each) for each in survivals]
        _write({"replicas": args.replicas, **facts, "survival": survival, "holders": placement.holders})
        return 0
    screen = Screen()
    copies = "1 copy" if args.replicas == 1 else f"{args.replicas} copies"
    screen.print(f"{copies} of each rank's state, on {args.nodes} nodes of {args.ranks_per_node} ranks")
    screen.print(_table(survivals))
    screen.print(
        f"{facts['within_data_parallel']:.0%} of all copies stay within their data-parallel group, "
        f"{facts['leaves_rack']:.0%} of all ranks have one in another rack.\n"
        f"The fullest rank keeps {facts['most_held']} copies, the emptiest {facts['least_held']}."
    )
    return 0


def _write(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def _place(args: argparse.Namespace) -> tuple[Placement, list[range]]:
    world_size = args.nodes * args.ranks_per_node
    if world_size % args.expert_parallel:
        raise ConfigurationError(
            f"`--expert-parallel {args.expert_parallel}` does not divide the {world_size} ranks. Choose a divisor."
        )
    if args.racks > args.nodes:
        raise ConfigurationError(f"`--racks {args.racks}` is more than `--nodes {args.nodes}`. Choose at most that.")
    nodes = [rank // args.ranks_per_node for rank in range(world_size)]
    domains = [FailureDomain(node=f"node {n}", rack=f"rack {n * args.racks // args.nodes}") for n in nodes]
    groups = [range(first, world_size, args.expert_parallel) for first in range(args.expert_parallel)]
    return place_replicas(domains, groups, [1] * world_size, args.replicas), groups


def _survivals(placement: Placement, most: int) -> list[Survival]:
    found = [survival_probability(placement, k) for k in range(1, min(most, placement.num_nodes) + 1)]
    if placement.num_racks > 1:
        racks = range(1, min(most, placement.num_racks) + 1)
        found += [survival_probability(placement, k, level="rack") for k in racks]
    return found


def _facts(placement: Placement, groups: Sequence[Sequence[int]]) -> dict[str, Any]:
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


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` must be a number of 1 or more")
    return int(text)
