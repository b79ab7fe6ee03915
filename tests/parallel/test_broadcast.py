"""Many tensors become those of one rank, in few messages."""

from __future__ import annotations

import pytest
import torch
from launcher import run_world
from torch import Tensor

from lightning_moe_ckpt.parallel import broadcast_tensors, build_groups


def tensors(rank: int) -> list[Tensor]:
    return [
        torch.full((3,), float(rank)),
        torch.tensor(rank % 2 == 0),
        torch.full((2, 2), rank, dtype=torch.int64),
        torch.full((5,), rank, dtype=torch.bfloat16),
        torch.arange(6.0).view(2, 3).t() * (rank + 1),
        torch.empty(0),
        torch.full((2, 1, 1), float(rank)).expand(2, 3, 1),
        torch.full((1,), rank).expand(4),
        torch.full((8,), rank)[::8],
    ]


@pytest.mark.parametrize("message_nbytes", [1, 30, 10**6])
def test_every_dtype_and_layout_arrives(message_nbytes: int) -> None:
    """Odd sizes, a flag, a transposed, an empty, expanded and strided tensors; rank 1 of the group's ranks is the source."""

    def work(rank: int) -> list[Tensor]:
        own = tensors(rank)
        broadcast_tensors(own, build_groups(1).groups["world"], 1, message_nbytes=message_nbytes)
        return own

    for got in run_world(3, work):
        assert all(torch.equal(a, b) for a, b in zip(got, tensors(1), strict=True))
        assert got[-2].stride() == (0,), "its elements share memory no more"


def test_the_source_is_not_touched() -> None:
    """Its version counters tell what changed; a broadcast changed nothing there."""

    def work(rank: int) -> bool:
        own = tensors(rank)
        versions = [tensor._version for tensor in own]
        broadcast_tensors(own, build_groups(1).groups["world"], 0)
        return versions == [tensor._version for tensor in own]

    assert run_world(3, work) == [True, False, False]
