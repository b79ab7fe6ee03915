"""What fails together: the node and the rack of a process.

A node is a machine: two containers on one machine are one node, since they die together, so the kernel's boot id decides
and not the host name. Who names a directory for shared memory by `MOE_CKPT_SHARED_MEMORY` says with it which processes are
one node, so it is part of the name then.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.tiers._shm import DIRECTORY_VARIABLE

NODE_VARIABLE, RACK_VARIABLE = "MOE_CKPT_NODE", "MOE_CKPT_RACK"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class FailureDomain:
    """Where a rank runs, as far as what fails with it is concerned."""

    node: str
    """Ranks with equal names lose their memory together."""
    rack: str = ""
    """Nodes with equal names may be lost together (rack, switch, power); empty where nothing is known."""
    host: str = field(default="", compare=False)
    """Host name, for messages."""

    def __post_init__(self) -> None:
        if not self.node:
            raise ConfigurationError("`FailureDomain(node='')` must name a node. Use the name of its host.")


def this_domain(environ: Mapping[str, str] | None = None) -> FailureDomain:
    """Node and rack of this process.

    The node is `MOE_CKPT_NODE`, or found as the module says. The rack is `MOE_CKPT_RACK`, or the switch that SLURM's
    topology plugin names for this node.

    Args:
        environ: environment variables; those of the process by default.
    """
    variables = os.environ if environ is None else environ
    return FailureDomain(
        node=variables.get(NODE_VARIABLE) or _found_node(variables.get(DIRECTORY_VARIABLE)),
        rack=variables.get(RACK_VARIABLE) or _slurm_switch(variables),
        host=socket.gethostname(),
    )


def expect_domains(given: Sequence[FailureDomain], world_size: int) -> tuple[FailureDomain, ...]:
    """Check what a user said about every rank.

    Raises:
        ConfigurationError: not one per rank.
    """
    if len(given) != world_size:
        raise ConfigurationError(
            f"`failure_domains` names {len(given)} ranks, the run has {world_size}. Name each rank's node, by rank, or "
            f"leave the argument out and set {NODE_VARIABLE} and {RACK_VARIABLE} in the environment of each process."
        )
    return tuple(given)


def _found_node(directory: str | None) -> str:
    try:
        machine = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        machine = socket.gethostname()
    return machine if not directory else f"{machine}:{os.path.realpath(directory)}"


def _slurm_switch(variables: Mapping[str, str]) -> str:
    """`top.leaf` of `SLURM_TOPOLOGY_ADDR=top.leaf.node`, whose parts the pattern names, such as `switch.switch.node`.

    Node names may have dots, so it is the pattern that counts the parts.
    """
    address, pattern = variables.get("SLURM_TOPOLOGY_ADDR", ""), variables.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    kinds = pattern.split(".")
    if kinds[-1] != "node":
        return ""
    return ".".join(address.split(".", len(kinds) - 1)[: len(kinds) - 1])
