"""The norm counts experts once, agrees with the unsharded model, and has the same bits on every rank."""

from __future__ import annotations

import math

import pytest
import torch
from launcher import run_world
from torch import Tensor

from lightning_moe_ckpt.parallel import ParallelGroups, build_groups, global_grad_norm


def dense(name: str) -> Tensor:
    return torch.randn(33, 7, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def experts() -> Tensor:
    return torch.randn(12, 5, 6, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_experts_it_is_torchs_own_norm(dtype: torch.dtype) -> None:
    """Equal in bits and dtype to `get_total_norm`; absent gradients do not count."""
    grads = {name: dense(name).to(dtype) for name in ("a", "b", "c")}
    got = global_grad_norm([*grads.items(), ("absent", None)], expert_parallel=(), groups=ParallelGroups())
    want = torch.nn.utils.get_total_norm(grads.values())
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


def test_no_gradient_at_all_is_zero() -> None:
    """A scalar on the device asked for."""
    assert global_grad_norm([("a", None)], expert_parallel=(), groups=ParallelGroups()).item() == 0.0


@pytest.mark.parametrize(("world_size", "ep_size"), [(3, 1), (3, 3), (4, 2), (4, 4)])
@pytest.mark.parametrize("norm_type", [2.0, math.inf], ids=str)
def test_ranks_agree_in_bits_and_with_one_process_to_rounding(world_size: int, ep_size: int, norm_type: float) -> None:
    """Whatever the sharding: the norm of all experts and the dense part, each once."""

    def work(rank: int) -> Tensor:
        groups = build_groups(ep_size)
        own = experts().chunk(ep_size)[groups.ep_rank]
        grads = [("moe.w", own), ("a", dense("a")), ("b", dense("b")), ("none", None)]
        sharded = {"moe.w"} if ep_size > 1 else set()
        return global_grad_norm(grads, expert_parallel=sharded, groups=groups, norm_type=norm_type)

    results = run_world(world_size, work)
    want = torch.nn.utils.get_total_norm([experts(), dense("a"), dense("b")], norm_type)
    assert all(torch.equal(got, results[0]) for got in results)
    torch.testing.assert_close(results[0], want)


def test_an_expert_without_gradient_on_one_rank_counts_as_zero() -> None:
    """Ranks whose experts are frozen still take part."""

    def work(rank: int) -> Tensor:
        groups = build_groups(3)
        grad = None if rank == 1 else torch.full((4,), 2.0)
        return global_grad_norm([("moe.w", grad), ("a", None)], expert_parallel={"moe.w"}, groups=groups)

    for got in run_world(3, work):
        assert got.item() == pytest.approx(math.sqrt(32.0))


def test_sixteen_bit_experts_have_an_fp32_norm() -> None:
    """Norms of shards are combined in fp32, not rounded to bf16 first."""

    def work(_: int) -> Tensor:
        groups = build_groups(3)
        own = experts().bfloat16().chunk(3)[groups.ep_rank]
        return global_grad_norm([("moe.w", own)], expert_parallel={"moe.w"}, groups=groups)

    want = experts().bfloat16().float().norm()
    for got in run_world(3, work):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want)
