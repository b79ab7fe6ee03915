"""Find the parameters that hold only this expert-parallel rank's experts, by duck typing.

A module that shards experts over ranks has `expert_parallel_parameters()`, an iterator of (name in the module,
parameter) over those whose dim 0 runs over this rank's experts, consecutive by `ep_rank`. Everything else is
replicated on all ranks. Tutel's layers do the same under other names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from torch import nn

from lightning_moe_ckpt.parallel._tutel import TutelShards, is_tutel


@runtime_checkable
class ExpertParallelModule(Protocol):
    """A module that may hold only a part of its experts."""

    ep_size: int
    """Number of ranks over which the module shards its experts."""

    def expert_parallel_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters sharded over expert-parallel ranks; none when `ep_size` is 1."""
        ...


def expert_parallel_modules(root: nn.Module) -> Iterator[tuple[str, ExpertParallelModule]]:
    """Yield every (FQN, module) below and including `root` that may shard experts."""
    for fqn, module in root.named_modules():
        if isinstance(module, ExpertParallelModule):
            yield fqn, module
        elif is_tutel(module):
            yield fqn, TutelShards(module)


def expert_parallel_fqns(root: nn.Module) -> set[str]:
    """Return the names, as in `root.named_parameters()`, of parameters that hold one rank's part of the experts."""
    sharded = {id(p) for _, module in expert_parallel_modules(root) for _, p in module.expert_parallel_parameters()}
    return {fqn for fqn, parameter in root.named_parameters(remove_duplicate=False) if id(parameter) in sharded}
