"""The small exchange of every optimizer step: which gradients exist on any rank, and the values of flags.

It is a maximum over all ranks of a vector of integers: one element per replicated parameter, one per sharded parameter
and expert-parallel rank (the same name means different experts there), one per flag. It runs on the host, which needs
the result (a gradient is `None` or not).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from lightning_moe_ckpt.parallel._groups import ParallelGroups


class StepExchange:
    """Exchange with a fixed element per name and flag. All ranks construct it with equal arguments.

    Args:
        replicated: names whose gradient every rank may hold.
        sharded: names whose gradient the ranks with this `ep_rank` may hold.
        flags: names of integers, at most 2**31 - 1, whose maximum is exchanged too.
        groups: this rank's groups.
    """

    def __init__(
        self, replicated: Sequence[str], sharded: Sequence[str], flags: Sequence[str], groups: ParallelGroups
    ) -> None:
        self._replicated, self._sharded, self._flags = tuple(replicated), tuple(sharded), tuple(flags)
        self._control = groups.groups["control"]
        self._own_row = len(replicated) + groups.ep_rank * len(sharded)
        self._first_flag = len(replicated) + groups.ep_size * len(sharded)
        self._votes = torch.zeros(self._first_flag + len(flags), dtype=torch.int32)

    def run(self, present: Mapping[str, bool], flags: Mapping[str, int]) -> tuple[dict[str, bool], dict[str, int]]:
        """Exchange gradients' presence and flags. Collective.

        Args:
            present: for every name, whether this rank holds a gradient.
            flags: this rank's values.

        Returns:
            For every name, whether any rank that shares the parameter holds a gradient; and each flag's maximum over
            all ranks.
        """
        votes = torch.zeros(self._first_flag + len(self._flags), dtype=torch.int32)
        votes[: len(self._replicated)] = torch.tensor([present[name] for name in self._replicated], dtype=torch.int32)
        row = slice(self._own_row, self._own_row + len(self._sharded))
        votes[row] = torch.tensor([present[name] for name in self._sharded], dtype=torch.int32)
        votes[self._first_flag :] = torch.tensor([flags[name] for name in self._flags], dtype=torch.int32)
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._control)
        return self._split(votes.tolist())

    def _split(self, votes: list[int]) -> tuple[dict[str, bool], dict[str, int]]:
        present = dict(zip(self._replicated, map(bool, votes), strict=False))
        present.update(zip(self._sharded, map(bool, votes[self._own_row :]), strict=False))
        return present, dict(zip(self._flags, votes[self._first_flag :], strict=True))
