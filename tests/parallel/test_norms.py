"""The norm counts experts once, agrees with the unsharded model, and has the same bits on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy.typing as npt
import pytest
import torch
from launcher import run_world
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from lightning_moe_ckpt.parallel import ParallelGroups, build_groups, global_grad_norm
from lightning_moe_ckpt.parallel._norms import _fold, _sums, block_numel, pieces


def dense(name: str) -> Tensor:
    return torch.randn(33, 7, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def experts() -> Tensor:
    return torch.randn(12, 5, 6, generator=torch.Generator().manual_seed(7))


NORM_TYPES = (1.0, 2.0, 3.0, math.inf)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def alone(grads: Mapping[str, Tensor | None], norm_type: float = 2.0) -> Tensor:
    return global_grad_norm(grads.items(), expert_parallel=(), groups=ParallelGroups(), norm_type=norm_type)


@pytest.mark.parametrize("norm_type", [*NORM_TYPES, 2.5], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_torchs_norm_to_rounding(dtype: torch.dtype, norm_type: float) -> None:
    """In fp32, or fp64 if all gradients are; absent gradients do not count."""
    grads = {name: dense(name).to(dtype) for name in ("a", "b", "c")}
    got = alone({**grads, "absent": None, "empty": torch.empty(0, dtype=dtype)}, norm_type)
    exact = dtype == torch.float64
    assert got.dtype == (torch.float64 if exact else torch.float32)
    want = torch.nn.utils.get_total_norm([grad.double() for grad in grads.values()], norm_type)
    torch.testing.assert_close(got.double(), want, rtol=1e-14 if exact else 3e-7, atol=0)


def tree(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Sum a power of two of values, by halves."""
    while len(values) > 1:
        values = values[: len(values) // 2] + values[len(values) // 2 :]
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_device_adds_the_bits_of_a_tree(dtype: torch.dtype) -> None:
    """NumPy gets the same, block by block."""
    rows = torch.randn(50, 64, generator=torch.Generator().manual_seed(1), dtype=dtype)
    want = [tree(row**2)[0] for row in rows.numpy()]
    assert _fold(rows.clone(), 2.0).tolist() == want


@pytest.mark.parametrize("numel", [1, 31, 33, 1000, 70_001, 3_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_neither_other_blocks_nor_threads_change_bits(dtype: torch.dtype, numel: int) -> None:
    """The norm is that of blocks taken one by one, and of parameters beside others."""
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    block = block_numel(numel)

    def work(_: int) -> tuple[list[Tensor], list[Tensor]]:
        totals, sums = list[Tensor](), list[Tensor]()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            totals += [alone({"a": grad}), alone({"zero": torch.zeros(70_001, dtype=dtype), "a": grad})]
            sums.append(_sums([grad], block, 2.0))
            sums.append(torch.cat([_sums([part], block, 2.0) for part in torch.split(grad, block)]))
        return totals, sums

    for found in run_world(1, work)[0]:  # a process of its own, since no process with threads can be forked
        assert all(torch.equal(each, found[0]) for each in found)


def test_no_value_is_waited_for() -> None:
    """Fake tensors have no values, and reading one would raise: on a device the host would wait for it."""
    with FakeTensorMode():
        got = alone({"a": torch.ones(70_001), "b": torch.ones(3, dtype=torch.bfloat16)})
        with pytest.raises(DataDependentOutputException):
            got.item()


def test_elements_count_in_logical_order() -> None:
    """A gradient that is a transposed view, or a scalar."""
    grad = torch.randn(300, 700)
    assert torch.equal(alone({"a": grad.t()}), alone({"a": grad.t().contiguous()}))
    assert torch.equal(alone({"a": torch.tensor(-3.0)}), torch.tensor(3.0))


def test_not_a_number_and_infinity_stay() -> None:
    """A scaler looks for them; a maximum must not hide them."""
    for norm_type in NORM_TYPES:
        assert alone({"a": torch.tensor([1.0] * 40 + [math.nan] + [1.0] * 40)}, norm_type).isnan()
        assert alone({"a": torch.tensor([1.0] * 40 + [-math.inf])}, norm_type) == math.inf


@pytest.mark.parametrize("norm_type", [0.0, -1.0, math.nan])
def test_a_norm_type_that_is_not_above_zero_is_refused(norm_type: float) -> None:
    """The error names it."""
    with pytest.raises(ValueError, match=f"`norm_type={norm_type}` must be above zero"):
        alone({"a": torch.ones(1)}, norm_type)


def gradients(groups: ParallelGroups, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """A stage's gradients: uneven tails, a view, a scalar, none, and those of experts, absent on one rank."""
    generator = torch.Generator().manual_seed(groups.stage)
    shapes = {"a": (33, 7), "long": (100_003,), "view": (260, 270), "scalar": (), "empty": (0, 4), "short": (40,)}
    named: dict[str, Tensor | None] = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }
    view = named["view"]
    assert view is not None
    experts = torch.Generator().manual_seed(100 + groups.rank // groups.stage_size * 10 + groups.ep_rank)
    own = {name: torch.randn(numel, generator=experts).to(dtype) for name, numel in (("w1", 40_001), ("w2", 100))}
    return {**named, "view": view.t(), "none": None, "w1": own["w1"], "w2": None if groups.ep_rank == 1 else own["w2"]}


@pytest.mark.parametrize(
    ("world_size", "ep_size", "num_stages"),
    [(1, 1, 1), (3, 1, 1), (3, 3, 1), (4, 1, 1), (4, 2, 1), (4, 1, 2), (4, 2, 2)],
)
def test_pieces_give_the_bits_of_whole_gradients(world_size: int, ep_size: int, num_stages: int) -> None:
    """In every dtype and norm; some parameters may stay whole. Every rank has the same result."""

    def work(rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        groups = build_groups(ep_size, num_stages=num_stages)
        experts = {"w1", "w2"} if ep_size > 1 else set()
        results = list[tuple[Tensor, Tensor, Tensor]]()
        for dtype in DTYPES:
            grads = gradients(groups, dtype)
            numels = {name: 100 if grad is None else grad.numel() for name, grad in grads.items()}
            owned = dict(grads)
            for name, grad in grads.items():
                ranks = groups.ranks("expert_data" if name in experts else "stage")
                start, stop = pieces(numels[name], len(ranks))[ranks.index(rank)]
                owned[name] = None if grad is None else grad.reshape(-1)[start:stop]
            mixed = {name: grads[name] if name in {"w2", "view"} else grad for name, grad in owned.items()}
            some = {name: numel for name, numel in numels.items() if name not in {"w2", "view"}}
            for norm_type in NORM_TYPES:
                norm = partial(global_grad_norm, expert_parallel=experts, groups=groups, norm_type=norm_type)
                results.append(
                    (norm(grads.items()), norm(owned.items(), whole=numels), norm(mixed.items(), whole=some))
                )
        return results

    ranks = run_world(world_size, work)
    for rank in ranks:
        assert len(rank) == len(DTYPES) * len(NORM_TYPES)
        for (whole, owned, mixed), (first, _, _) in zip(rank, ranks[0], strict=True):
            assert whole.dtype == owned.dtype == mixed.dtype
            assert torch.equal(whole, first)
            assert torch.equal(owned, whole)
            assert torch.equal(mixed, whole)


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
