"""Process groups by name, looked up when they are used and never stored in modules.

A module that kept a `ProcessGroup` could not be pickled, deep-copied or moved to another world. `MoEStrategy` builds
the groups before `configure_model`; without it (single process, plain DDP) the defaults describe one expert-parallel
rank that holds every expert.

Ranks of one expert-parallel group are consecutive: rank = dp_rank * ep_size + ep_rank.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.parallel._door import closed_doors

GroupName = Literal["world", "expert", "expert_data", "control", "reduce", "replicate"]
"""`expert`: ranks that together hold all experts once. `expert_data`: ranks that hold the same experts.
`control`: all ranks, on gloo with CPU tensors whatever the training backend; for the training thread only.
`reduce`: all ranks, used by the gradient reduction alone. It runs beside the backward pass, where a rank may reach
its collectives earlier or later than the all-to-alls of expert parallelism, so the two must not share a group.
`replicate`: all ranks, on gloo, for point-to-point operations of background threads. These may wait long for each
other, so they must not share a group with collectives."""


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """This rank's indices in the world, and its process groups."""

    rank: int = 0
    world_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    groups: dict[GroupName, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def dp_rank(self) -> int:
        """Index of this rank among those that hold the same experts."""
        return self.rank // self.ep_size

    @property
    def dp_size(self) -> int:
        """Number of ranks that hold the same experts."""
        return self.world_size // self.ep_size

    def ranks(self, name: GroupName) -> list[int]:
        """Return the global ranks of this rank's group `name`, ascending."""
        if name == "expert":
            first = self.dp_rank * self.ep_size
            return list(range(first, first + self.ep_size))
        if name == "expert_data":
            return list(range(self.ep_rank, self.world_size, self.ep_size))
        return list(range(self.world_size))

    def group(self, name: GroupName) -> dist.ProcessGroup | None:
        """Return the process group, or `None` in a world of one process."""
        if self.world_size == 1:
            return None
        return self.groups[name]


_current = ParallelGroups()


def current_groups() -> ParallelGroups:
    """Return the installed groups; a world of one process until a strategy sets them."""
    return _current


def set_current_groups(groups: ParallelGroups | None) -> None:
    """Install `groups` for this process; `None` restores the world of one."""
    global _current  # noqa: PLW0603  # one process has one world; modules look it up by name
    _current = groups if groups is not None else ParallelGroups()


def build_groups(ep_size: int = 1, timeout: timedelta = timedelta(minutes=30)) -> ParallelGroups:
    """Build every group over the default process group. Collective: all ranks call it at the same point.

    Args:
        ep_size: ranks that share one set of experts; must divide the world size.
        timeout: limit for one collective of the new groups.

    Returns:
        This rank's groups. They are not installed; see `set_current_groups`.

    Raises:
        ConfigurationError: `ep_size` does not divide the world size.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    check_ep_size(ep_size, world_size)
    if world_size == 1:
        return ParallelGroups()
    rows = [list(range(first, first + ep_size)) for first in range(0, world_size, ep_size)]
    columns = [list(range(first, world_size, ep_size)) for first in range(ep_size)]
    with closed_doors() if dist.get_backend() == "gloo" else nullcontext():
        groups: dict[GroupName, dist.ProcessGroup] = {
            "world": _world(),
            "expert": _part_of(rows, rank, timeout),
            "expert_data": _part_of(columns, rank, timeout),
            "reduce": dist.new_group(timeout=timeout),
        }
    with closed_doors():
        groups["control"] = dist.new_group(timeout=timeout, backend="gloo")
        groups["replicate"] = dist.new_group(timeout=timeout, backend="gloo")
    return ParallelGroups(rank=rank, world_size=world_size, ep_rank=rank % ep_size, ep_size=ep_size, groups=groups)


def check_ep_size(ep_size: int, world_size: int) -> None:
    """Raise `ConfigurationError` unless `ep_size` ranks can share the experts in a world of `world_size`."""
    if ep_size < 1 or world_size % ep_size:
        raise ConfigurationError(
            f"`expert_parallel={ep_size}` does not divide the {world_size} processes of this run. "
            "Choose a divisor of the number of processes."
        )


def _part_of(partition: list[list[int]], rank: int, timeout: timedelta) -> dist.ProcessGroup:
    if len(partition) == 1:
        return _world()
    if len(partition[0]) == 1:
        # A real group even of one: `None` would mean the whole world to `torch.distributed`.
        return _new_group([rank], timeout, use_local_synchronization=True)
    made = [_new_group(ranks, timeout) for ranks in partition]  # all ranks take part in making each
    return next(group for group, ranks in zip(made, partition, strict=True) if rank in ranks)


def _new_group(ranks: list[int], timeout: timedelta, *, use_local_synchronization: bool = False) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(
        ranks, timeout=timeout, use_local_synchronization=use_local_synchronization
    )
    return group


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("The default process group is not initialised. Call `init_process_group` first.")
    return world
