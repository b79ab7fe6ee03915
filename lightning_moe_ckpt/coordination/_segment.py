"""What neighbouring pipeline stages hand each other while they repeat steps together, without all others.

Everything goes through the host and gloo, whatever the training backend: nobody has to know shapes before, and one that sends
never waits for one that receives, so that two neighbours may send to each other at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_ckpt.coordination._exchange import expected_nbytes
from lightning_moe_ckpt.journal import decode, encode
from lightning_moe_ckpt.parallel import ParallelGroups


class Segment:
    """Stages that repeat steps together, as this rank sees them.

    Args:
        groups: this rank's place, in one of them.
        stages: which they are, one behind the other.
    """

    def __init__(self, groups: ParallelGroups, stages: range) -> None:
        size, here = groups.stage_size, groups.stage
        self._rank, self._ranks = groups.rank, range(stages.start * size, stages.stop * size)
        self._group = groups.group("control")
        self.before = _Link(groups, groups.rank - size) if here - 1 in stages else None
        """Border to the stage before this one, if that is in the segment."""
        self.behind = _Link(groups, groups.rank + size) if here + 1 in stages else None
        """The same of the stage behind."""

    def meet(self) -> None:
        """Wait until all ranks of these stages have come here; no other is asked."""
        first, here = self._ranks[0], torch.zeros(1)
        if self._rank != first:
            dist.send(here, first, self._group)
            dist.recv(here, first, self._group)
            return
        for rank in self._ranks[1:]:
            dist.recv(here, rank, self._group)
        for rank in self._ranks[1:]:
            dist.send(here, rank, self._group)


class _Link:
    """One border of this rank's stage.

    Args:
        groups: this rank's place.
        peer: the rank on the other side.
    """

    def __init__(self, groups: ParallelGroups, peer: int) -> None:
        self._group, self._peer = groups.group("pipeline_control"), peer
        self._under_way: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Begin to send copies on the host."""
        payload = torch.frombuffer(bytearray(encode(list(tensors))), dtype=torch.uint8)
        for each in (torch.tensor([payload.nbytes]), payload):
            self._under_way.append((dist.isend(each, self._peer, self._group), each))

    def settle(self) -> None:
        """Wait until the other side has what was sent; it needs nothing more of this side for that."""
        for work, _ in self._under_way:
            if work is not None:
                work.wait()
        self._under_way = []

    def receive(self) -> list[Tensor]:
        """Return what the other side has sent next."""
        nbytes = torch.zeros(1, dtype=torch.int64)
        dist.recv(nbytes, self._peer, self._group)
        payload = torch.empty(expected_nbytes(int(nbytes)), dtype=torch.uint8)
        dist.recv(payload, self._peer, self._group)
        return cast("list[Tensor]", decode(payload.numpy().tobytes()))
