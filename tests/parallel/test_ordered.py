"""The ordered reduction gives the bits of a sum in rank order, wherever an element lies."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from launcher import run_world
from torch import Tensor

from lightning_moe_ckpt.parallel._collectives import ordered_all_reduce, plain_all_reduce

LENGTH = 10_007  # prime: no group size divides it


def contribution(rank: int, dtype: torch.dtype = torch.float32, length: int = LENGTH) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reference(world_size: int, dtype: torch.dtype, divisor: int) -> Tensor:
    wide = torch.float32 if dtype in {torch.bfloat16, torch.float16} else dtype
    total = contribution(0, dtype).to(wide)
    for rank in range(1, world_size):
        total = total + contribution(rank, dtype).to(wide)
    return (total / divisor).to(dtype)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_rank_gets_the_sum_in_rank_order(world_size: int, dtype: torch.dtype) -> None:
    """Equal in bits to a loop over ranks; 16-bit floats are added and divided in fp32 and rounded once."""

    def work(rank: int) -> Tensor:
        return ordered_all_reduce(contribution(rank, dtype), dist.distributed_c10d._get_default_group(), divisor=3)

    want = reference(world_size, dtype, 3)
    for got in run_world(world_size, work):
        assert got.dtype == dtype
        assert torch.equal(got, want)


@pytest.mark.parametrize("world_size", [3, 4])
def test_bits_do_not_depend_on_the_bucket(world_size: int) -> None:
    """Whole, cut in pieces of any size, and embedded among other values: the same bits. A plain all-reduce differs."""

    def work(rank: int) -> tuple[int, int]:
        group = dist.distributed_c10d._get_default_group()
        own = contribution(rank)

        def changed(reduce: object) -> int:
            assert callable(reduce)
            whole = reduce(own.clone(), group)
            pieces = torch.cat([reduce(piece.clone(), group) for piece in torch.split(own, 1_237)])
            shifted = reduce(torch.cat([contribution(9 + rank, length=5_003), own]), group)[5_003:]
            return int((whole != pieces).sum() + (whole != shifted).sum())

        return changed(ordered_all_reduce), changed(plain_all_reduce)

    for ordered, plain in run_world(world_size, work):
        assert ordered == 0
        assert plain > 100, "this test would not see a reduction that depends on the layout"


def test_works_in_place_with_and_without_scratch() -> None:
    """The result is in the tensor that was given, also when it is longer than a multiple of the group."""

    def work(rank: int) -> list[bool]:
        group = dist.distributed_c10d._get_default_group()
        results = []
        for length in (12, 10, 1):
            plain, scratched = contribution(rank, length=length), contribution(rank, length=length)
            returned = ordered_all_reduce(plain, group)
            ordered_all_reduce(scratched, group, scratch=torch.empty(15))
            results += [returned is plain, torch.equal(plain, scratched)]
        return results

    assert all(all(results) for results in run_world(3, work))


def test_non_finite_values_travel() -> None:
    """An overflow on one rank is an overflow on all."""

    def work(rank: int) -> Tensor:
        values = torch.ones(7)
        if rank == 2:
            values[3] = float("inf")
        return ordered_all_reduce(values, dist.distributed_c10d._get_default_group())

    for got in run_world(3, work):
        assert torch.isinf(got).tolist() == [False] * 3 + [True] + [False] * 3
