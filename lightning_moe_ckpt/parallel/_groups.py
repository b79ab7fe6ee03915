"""Process groups by name, looked up when they are used and never stored in modules.

A module that kept a `ProcessGroup` could not be pickled, deep-copied or moved to another world. `MoEStrategy` builds
the groups before `configure_model`; without it (single process, plain DDP) the defaults describe one expert-parallel
rank that holds every expert.

Ranks of one expert-parallel group are consecutive: rank = dp_rank * ep_size + ep_rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch.distributed as dist

GroupName = Literal["world", "expert", "expert_data", "control"]
"""`expert`: ranks that together hold all experts once. `expert_data`: ranks that hold the same experts.
`control`: all ranks, on gloo with CPU tensors whatever the training backend."""


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """This rank's place in the world, and the process groups that go with it."""

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
        """How many ranks hold the same experts."""
        return self.world_size // self.ep_size

    def ranks(self, name: GroupName) -> list[int]:
        """Global ranks of this rank's group `name`, ascending."""
        if name == "expert":
            first = self.dp_rank * self.ep_size
            return list(range(first, first + self.ep_size))
        if name == "expert_data":
            return list(range(self.ep_rank, self.world_size, self.ep_size))
        return list(range(self.world_size))

    def group(self, name: GroupName) -> dist.ProcessGroup | None:
        """The process group, or `None` in a world of one process."""
        if self.world_size == 1:
            return None
        return self.groups[name]


_current = ParallelGroups()


def current_groups() -> ParallelGroups:
    """The groups in force; a world of one process until a strategy sets them."""
    return _current


def set_current_groups(groups: ParallelGroups | None) -> None:
    """Install `groups` for this process; `None` restores the world of one."""
    global _current  # noqa: PLW0603  # one process has one world; modules look it up by name
    _current = groups if groups is not None else ParallelGroups()
