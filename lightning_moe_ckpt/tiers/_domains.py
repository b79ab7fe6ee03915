"""Find the node and the rack of a process, which are what fails together.

A node is a machine. Two containers on one machine die together, so they are one node: the kernel's boot id decides,
not the host name. If `MOE_CKPT_SHARED_MEMORY` names a directory, processes that share it are one node, so the directory
is part of the node's name.
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
    """Node and rack that a rank runs on."""

    node: str
    """Ranks with equal names lose their memory together."""
    rack: str = ""
    """Nodes with equal names may be lost together (rack, switch, power); empty if unknown."""
    host: str = field(default="", compare=False)
    """Host name, for messages."""

    def __post_init__(self) -> None:
        if not self.node:
            raise ConfigurationError("`FailureDomain(node='')` must name a node. Use the name of its host.")


def this_domain(environ: Mapping[str, str] | None = None) -> FailureDomain:
    """Return node and rack of this process.

    The node is `MOE_CKPT_NODE`, or else the boot id. The rack is `MOE_CKPT_RACK`, or the switch that SLURM's
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
    """Check the domains that a user gave, one per rank.

    Raises:
        ConfigurationError: there is not one domain per rank.
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
    """Return `top.leaf` of `SLURM_TOPOLOGY_ADDR=top.leaf.node`; SLURM's pattern, such as `switch.switch.node`, names the parts.

    Node names may have dots, so the number of parts is taken from the pattern.
    """
    address, pattern = variables.get("SLURM_TOPOLOGY_ADDR", ""), variables.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    kinds = pattern.split(".")
    if kinds[-1] != "node":
        return ""
    return ".".join(address.split(".", len(kinds) - 1)[: len(kinds) - 1])
